"""Optimizer: AdamW over the flat gradients, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from tpkernels import adamw_
from tpkernels.launch import by_triton

from tpengine.config import OptimConfig


def clip_(gradients: Iterable[Tensor], norm: Tensor, max_norm: float, loss_scale: float = 1.0) -> None:
    """Divide all gradients by the loss scale and multiply them by min(1, max_norm / norm), in place.

    Args:
        norm: of the gradients, divided by the loss scale.
        max_norm: 0 does not clip.
        loss_scale: that they were computed with, a power of two.

    No host synchronisation.
    """
    if max_norm == 0 and loss_scale == 1.0:
        return
    scale = torch.ones_like(norm) if max_norm == 0 else max_norm / norm.clamp_min(max_norm)
    scale = scale / loss_scale
    by_dtype: dict[torch.dtype, Tensor] = {}
    for gradient in gradients:
        gradient.mul_(by_dtype.setdefault(gradient.dtype, scale.to(gradient.dtype)))


class _Moments(NamedTuple):
    """The state of one master weight."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """AdamW on master weights in the accumulation dtype, by torch's fused kernel; on a GPU also by tpkernels.adamw_.

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        w = (1 - lr decay) w - lr (m / (1 - beta1^n)) / (sqrt(v / (1 - beta2^n)) + eps)

    Parameters in float32 and float64 are their own masters. A parameter in a narrower dtype has a master copy: the
    optimizer updates the copy, and rounds it into the parameter: on a GPU in the same pass.

    The decision a reader will question: torch.optim.AdamW runs the same kernel, but importing its class imports torch's
    compiler, which costs 2 CPU seconds per start.

    Args:
        parameters: by name; tensors that are updated in place, such as slices of parameters, will do too.
        gradients: by name, of the parameters' shapes, in the accumulation dtype; every step reads them.
        decayed: names of the parameters that weight decay applies to.
        config: learning rate, betas, eps, weight decay.

    Memory: two moments, and a master if the dtype is narrower, each in the accumulation dtype.
    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        decayed: Sequence[str],
        config: OptimConfig,
    ) -> None:
        self._config, self._gradients = config, gradients
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            master = parameter
            if parameter.dtype != gradients[name].dtype:
                master = parameter.detach().to(gradients[name].dtype)
                self._copies[name] = parameter, master
            self.masters[name] = master
        self._moments = {
            name: _Moments(
                torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False),
                torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False),
            )
            for name, master in self.masters.items()
        }
        self._decayed = [name for name in self.masters if name in decayed]
        self._others = [name for name in self.masters if name not in decayed]

    def use(self, config: OptimConfig) -> None:
        """Go on with other betas, eps and weight decay."""
        self._config = config

    @staticmethod
    def states_per_element(master_is_parameter: bool) -> int:
        """Return how many accumulation-dtype tensors a parameter needs: gradient, two moments, maybe a master."""
        return 3 if master_is_parameter else 4

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Return what a checkpoint must hold of one parameter: both moments, and the master if there is one.

        Returns: the tensors themselves, of the parameter's shape, in the accumulation dtype; moments begin as zeros.
        """
        master, moments = self.masters[name], self._moments[name]
        tensors = {"exp_avg": moments.exp_avg, "exp_avg_sq": moments.exp_avg_sq}
        return {**tensors, "master": master} if name in self._copies else tensors

    @torch.no_grad()
    def clear(self) -> None:
        """Make all moments zero, as they are before the first update."""
        for moments in self._moments.values():
            for tensor in moments:
                tensor.zero_()

    @torch.no_grad()
    def set(self, name: str, values: Tensor) -> None:
        """Set a parameter, in its accumulation dtype: the master keeps what rounding would lose."""
        self.masters[name].copy_(values)
        if name in self._copies:
            parameter, master = self._copies[name]
            parameter.copy_(master)

    @torch.no_grad()
    def round_masters(self) -> None:
        """Round all masters into their parameters, after the masters were written to."""
        for parameter, master in self._copies.values():
            parameter.copy_(master)

    @torch.no_grad()
    def step(self, lr: float, update: int, skip: Tensor | None = None) -> None:
        """Update every parameter with the current gradients.

        Args:
            update: the number of this update, the first is 1: it decides the moments' bias correction. A skipped step
                is no update, so that the next one has the same number.
            skip: bool [] on the device. If it is true, no parameter and no moment changes. The host does not wait to
                know it.
        """
        for weight_decay, names in ((self._config.weight_decay, self._decayed), (0.0, self._others)):
            numbers: dict[str, Any] = {
                "lr": lr,
                "beta1": self._config.beta1,
                "beta2": self._config.beta2,
                "eps": self._config.eps,
                "weight_decay": weight_decay,
            }
            # Masters that are rounded into a copy: one kernel updates and rounds, where there is one.
            in_one_pass = [name for name in names if name in self._copies and by_triton(self.masters[name])]
            for name in in_one_pass:
                tensors = (self.masters[name], *self._moments[name], self._gradients[name], self._copies[name][0])
                *state, gradient, parameter = map(_in_memory_order, tensors)
                adamw_(*state, gradient, step=update, **numbers, parameter=parameter, skip=skip)
            # All others together, by torch.
            self._update_by_torch([name for name in names if name not in in_one_pass], numbers, update, skip)

    def _update_by_torch(
        self, names: Sequence[str], numbers: Mapping[str, Any], update: int, skip: Tensor | None
    ) -> None:
        if not names:
            return
        masters = [self.masters[name] for name in names]
        moments = [self._moments[name] for name in names]
        updates_before = torch.full((len(names),), update - 1.0, device=masters[0].device)
        adamw(
            masters,
            [self._gradients[name] for name in names],
            [of_one.exp_avg for of_one in moments],
            [of_one.exp_avg_sq for of_one in moments],
            [],
            list(updates_before.unbind()),  # the fused adamw counts the update itself
            fused=True,
            # As a GradScaler passes it: if this is 1, the kernel changes nothing.
            found_inf=None if skip is None else skip.float(),
            amsgrad=False,
            maximize=False,
            **numbers,
        )
        # Round the masters into their parameters.
        for name in names:
            if name in self._copies:
                parameter, master = self._copies[name]
                parameter.copy_(master)


def _in_memory_order(x: Tensor) -> Tensor:
    """Return the elements of a dense tensor in one dim, in the order in which they lie in memory; a view.

    A parameter, its master, its moments and its gradient have the same strides, so that their elements agree.
    """
    by_stride = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.detach().permute(by_stride).view(-1)
