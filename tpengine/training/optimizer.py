"""AdamW over the flat gradients, clipping, and the loss scale of 16-bit training.

Where there are kernels, a step is one launch over all tensors, which multiplies gradients by clipping's factor as it
reads them, and rounds masters into their weights. The numbers of a step are a table on the device, one row a tensor,
which one small copy fills. A CPU clips in place, and updates by torch.

The loss scale is what the loss is multiplied by, so that small gradients do not become zero. float16 has 5 bits of
exponent: gradients below 6e-8 are zero. So backward starts from scale * loss, and the gradients, which are added up in
float32, are divided by the scale before they are clipped. A gradient that overflows makes the step's norm infinite or
NaN on all ranks alike: the step is skipped, and the scale halves. After GROWTH_STEPS updates in a row it doubles. All
scales are powers of two, so that they change no bit of what neither overflows nor vanishes.

bfloat16 has float32's exponent and needs none: there the scale is 1 and stays 1.
Source: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from tpkernels.launch import by_triton
from tpkernels.ops.adamw import AdamWNumbers, adamw_, adamw_numbers

from tpengine.config import OptimConfig
from tpengine.distributed.process import to_device

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
# Below 1 a scale would take away what it is there to keep.
FLOOR, CEILING = 1.0, 2.0**32


class LossScale:
    """The scale of one run, equal on all ranks: it follows from which steps were skipped.

    Args:
        dtype: of weights and activations, by name.

    Attributes:
        value: what the next step's loss is multiplied by.
    """

    def __init__(self, dtype: str) -> None:
        self._moves = dtype == "float16"
        self.value = FIRST_SCALE if self._moves else 1.0
        self._num_updates = 0

    @property
    def can_fall(self) -> bool:
        """Whether a gradient that overflows may fit after the scale has halved."""
        return self._moves and self.value > FLOOR

    @property
    def is_at_floor(self) -> bool:
        """Whether the scale has halved as often as it may."""
        return self._moves and self.value <= FLOOR

    def after_update(self) -> None:
        """Count a step that was applied."""
        if not self._moves:
            return
        self._num_updates += 1
        if self._num_updates == GROWTH_STEPS:
            self._num_updates = 0
            self.value = min(2 * self.value, CEILING)

    def after_overflow(self) -> None:
        """Halve the scale: a step's gradient was not finite."""
        self._num_updates = 0
        if self.can_fall:
            self.value /= 2

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"value": self.value, "updates": self._num_updates}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on with what a checkpoint holds; one of a run without a scale holds None, and changes nothing."""
        if state is not None and self._moves:
            self.value, self._num_updates = float(state["value"]), int(state["updates"])


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
    """AdamW on master weights in the accumulation dtype: on a CPU by torch's fused kernel, else by tpkernels.adamw_.

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

    Attributes:
        reads_factor: `step` multiplies the gradients itself; else they are to be clipped before (clip_).

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
        self.reads_factor = any(by_triton(master) for master in self.masters.values())
        # All tensors that a launch can take together: those with copies, and those without.
        kinds = [[name for name in self.masters if (name in self._copies) == narrow] for narrow in (True, False)]
        self._tables = [_TensorTable.of(names, self.masters, decayed) for names in kinds if names and self.reads_factor]

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
    def step(self, lr: float, update: int, skip: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update every parameter with the current gradients.

        Args:
            update: the number of this update, the first is 1: it decides the moments' bias correction. A skipped step
                is no update, so that the next one has the same number.
            skip: bool or float64 [] on the device. If it is not zero, no parameter and no moment changes. The host does
                not wait to know it.
            factor: float64 [] on the device: of the gradients, which stay as they are; only with `reads_factor`. None
                is 1.
        """
        config = self._config
        numbers = {"lr": lr, "beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
        if self.reads_factor:
            rows = [adamw_numbers(step=update, **numbers, weight_decay=decay) for decay in (config.weight_decay, 0.0)]
            for table in self._tables:
                self._update_at_once(table, rows, skip, factor)
            return
        assert factor is None, "gradients on a CPU are clipped in place"
        for weight_decay, names in ((config.weight_decay, self._decayed), (0.0, self._others)):
            self._update_by_torch(names, {**numbers, "weight_decay": weight_decay}, update, skip)

    def _update_at_once(
        self, table: _TensorTable, rows: Sequence[AdamWNumbers], skip: Tensor | None, factor: Tensor | None
    ) -> None:
        """Update the tensors of a table, whose rows have these numbers where weights decay and where they do not."""
        table.fill(rows)
        moments = [self._moments[name] for name in table.names]
        adamw_(
            [self.masters[name] for name in table.names],
            [of_one.exp_avg for of_one in moments],
            [of_one.exp_avg_sq for of_one in moments],
            [self._gradients[name] for name in table.names],
            table.numbers,
            parameters=[self._copies[name][0] for name in table.names if name in self._copies],
            factor=factor,
            skip=skip,
        )

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


@dataclass(frozen=True)
class _TensorTable:
    """The numbers of the tensors that a launch takes together.

    Attributes:
        names: of the tensors.
        numbers: float64 [tensors, numbers], on the device, at one place for good.
        row_of: int64 [tensors], on the host: 0 where a weight decays, 1 where it does not.
    """

    names: Sequence[str]
    numbers: Tensor
    row_of: Tensor

    @classmethod
    def of(cls, names: Sequence[str], masters: Mapping[str, Tensor], decayed: Collection[str]) -> _TensorTable:
        size = len(names), len(AdamWNumbers._fields)
        numbers = torch.zeros(size, dtype=torch.float64, device=masters[names[0]].device)
        return cls(names, numbers, torch.tensor([int(name not in decayed) for name in names]))

    def fill(self, rows: Sequence[AdamWNumbers]) -> None:
        """Write each tensor's row, by one copy that the host does not wait for."""
        host = torch.tensor(rows, dtype=torch.float64)[self.row_of]
        self.numbers.copy_(to_device(host, self.numbers.device), non_blocking=True)
