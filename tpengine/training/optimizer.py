"""What updates a rank's weights: masters and what is kept of each, for every optimizer; and AdamW by fused kernels.

The other optimizers are in elementwise.py. All of them take a rate factor and a decay of each weight by its name: a
weight that has none is not trained, and nothing is kept of it.

Where there are kernels, a step of AdamW is one launch over all tensors, which multiplies gradients by clipping's factor
as it reads them, and rounds masters into their weights. The numbers of a step are a table on the device, one row a
tensor, which one small copy fills. A CPU clips in place, and updates by torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from tpkernels.launch import by_triton
from tpkernels.ops.adamw import AdamWNumbers, adamw_, adamw_numbers

from tpengine.config import OptimConfig, optimizer_kind
from tpengine.distributed.process import to_device

# By a weight's name: the factor of its learning rate, and its weight decay.
Updates = Mapping[str, tuple[float, float]]


class Optimizer(ABC):
    """What every optimizer keeps of the weights of a rank, or of the slices of them that this rank owns.

    Parameters in the accumulation dtype are their own masters. One in a narrower dtype has a master copy, which is
    updated, and rounded into the parameter.

    Args:
        parameters: by name; tensors that are updated in place, such as slices of parameters, will do too.
        gradients: by name, of the parameters' shapes, in the accumulation dtype; every step reads them.
        updates: by name, (factor of the learning rate, weight decay) of each parameter.
        config: betas, eps; name and moments say what is kept.

    Attributes:
        masters: by name, what is updated.
        state_dtypes: by the names that checkpoints use, the dtype of what is kept of each weight; None: its master's.
        reads_factor: `step` multiplies the gradients itself; else they are to be clipped before (clip_).

    Memory: what config.optimizers lists for it, and a master if the dtype is narrower.
    """

    reads_factor: bool = False

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        updates: Updates,
        config: OptimConfig,
    ) -> None:
        self._config, self._gradients, self._updates = config, gradients, updates
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            master = parameter
            if parameter.dtype != gradients[name].dtype:
                master = parameter.detach().to(gradients[name].dtype)
                self._copies[name] = parameter, master
            self.masters[name] = master
        kept = torch.bfloat16 if config.moments == "bfloat16" else None
        self.state_dtypes: dict[str, torch.dtype | None] = dict.fromkeys(optimizer_kind(config).states, kept)
        self._states = {
            name: {
                kind: torch.zeros_like(master, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
                for kind, dtype in self.state_dtypes.items()
            }
            for name, master in self.masters.items()
        }

    def use(self, config: OptimConfig, updates: Updates) -> None:
        """Go on with other betas and eps, and other rates and decays of the same parameters."""
        self._config, self._updates = config, updates

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Return what a checkpoint must hold of one parameter: what is kept of it, and the master if there is one.

        Returns: the tensors themselves, of the parameter's shape; all but the master begin as zeros.
        """
        kept = self._states[name]
        return {**kept, "master": self.masters[name]} if name in self._copies else dict(kept)

    @torch.no_grad()
    def clear(self, names: Iterable[str] | None = None) -> None:
        """Make what is kept of parameters zero, as it is before the first update; masters stay.

        Args: names: of these; None for all.
        """
        for name in self._states if names is None else names:
            for tensor in self._states[name].values():
                tensor.zero_()

    @torch.no_grad()
    def set(self, name: str, values: Tensor) -> None:
        """Set a parameter, in its accumulation dtype: the master keeps what rounding would lose."""
        self.masters[name].copy_(values)
        self._round([name])

    def round_masters(self) -> None:
        """Round all masters into their parameters, after the masters were written to."""
        self._round(self._copies)

    @abstractmethod
    def step(self, lr: float, update: int, skip: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update every parameter with the current gradients.

        Args:
            lr: learning rate, before the parameters' own factors.
            update: the number of this update, the first is 1: what moments are corrected by. A skipped step is no
                update, so that the next one has the same number.
            skip: bool or float64 [] on the device. If it is not zero, no parameter and nothing that is kept changes.
                The host does not wait to know it.
            factor: float64 [] on the device: of the gradients, which stay as they are; only with `reads_factor`. None
                is 1.
        """

    @torch.no_grad()
    def _round(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._copies:
                parameter, master = self._copies[name]
                parameter.copy_(master)


class AdamW(Optimizer):
    """AdamW on master weights in the accumulation dtype: on a CPU by torch's fused kernel, else by tpkernels.adamw_.

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        w = (1 - lr decay) w - lr (m / (1 - beta1^n)) / (sqrt(v / (1 - beta2^n)) + eps)

    The decision a reader will question: torch.optim.AdamW runs the same kernel, but importing its class imports torch's
    compiler, which costs 2 CPU seconds per start.

    Args: as Optimizer.

    Memory: two moments, and a master if the dtype is narrower, each in the accumulation dtype.
    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        updates: Updates,
        config: OptimConfig,
    ) -> None:
        super().__init__(parameters, gradients, updates, config)
        self.reads_factor = any(by_triton(master) for master in self.masters.values())
        # All tensors that a launch can take together: those with copies, and those without.
        kinds = [[name for name in self.masters if (name in self._copies) == narrow] for narrow in (True, False)]
        self._tables = [_TensorTable.of(names, self.masters) for names in kinds if names and self.reads_factor]

    @torch.no_grad()
    def step(self, lr: float, update: int, skip: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update every parameter with the current gradients, as Optimizer.step."""
        config = self._config
        numbers = {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
        if self.reads_factor:
            rows = {
                alike: adamw_numbers(step=update, lr=lr * alike[0], **numbers, weight_decay=alike[1])
                for alike in set(self._updates.values())
            }
            for table in self._tables:
                table.fill([rows[self._updates[name]] for name in table.names])
                self._update_at_once(table, skip, factor)
            return
        assert factor is None, "gradients on a CPU are clipped in place"
        alike: dict[tuple[float, float], list[str]] = {}
        for name in self.masters:
            alike.setdefault(self._updates[name], []).append(name)
        for (lr_factor, weight_decay), names in alike.items():
            self._update_by_torch(names, {"lr": lr * lr_factor, **numbers, "weight_decay": weight_decay}, update, skip)

    def _update_at_once(self, table: _TensorTable, skip: Tensor | None, factor: Tensor | None) -> None:
        """Update the tensors of a table that is filled."""
        adamw_(
            [self.masters[name] for name in table.names],
            [self._states[name]["exp_avg"] for name in table.names],
            [self._states[name]["exp_avg_sq"] for name in table.names],
            [self._gradients[name] for name in table.names],
            table.numbers,
            parameters=[self._copies[name][0] for name in table.names if name in self._copies],
            factor=factor,
            skip=skip,
        )

    def _update_by_torch(
        self, names: Sequence[str], numbers: Mapping[str, Any], update: int, skip: Tensor | None
    ) -> None:
        masters = [self.masters[name] for name in names]
        updates_before = torch.full((len(names),), update - 1.0, device=masters[0].device)
        adamw(
            masters,
            [self._gradients[name] for name in names],
            [self._states[name]["exp_avg"] for name in names],
            [self._states[name]["exp_avg_sq"] for name in names],
            [],
            list(updates_before.unbind()),  # the fused adamw counts the update itself
            fused=True,
            # As a GradScaler passes it: if this is 1, the kernel changes nothing.
            found_inf=None if skip is None else skip.float(),
            amsgrad=False,
            maximize=False,
            **numbers,
        )
        self._round(names)


@dataclass(frozen=True)
class _TensorTable:
    """The numbers of the tensors that a launch takes together.

    Attributes:
        names: of the tensors.
        numbers: float64 [tensors, numbers], on the device, at one place for good.
    """

    names: Sequence[str]
    numbers: Tensor

    @classmethod
    def of(cls, names: Sequence[str], masters: Mapping[str, Tensor]) -> _TensorTable:
        size = len(names), len(AdamWNumbers._fields)
        return cls(names, torch.zeros(size, dtype=torch.float64, device=masters[names[0]].device))

    def fill(self, rows: Sequence[AdamWNumbers]) -> None:
        """Write each tensor's row, by one copy that the host does not wait for."""
        host = torch.tensor(rows, dtype=torch.float64)
        self.numbers.copy_(to_device(host, self.numbers.device), non_blocking=True)
