"""What a run decides by its ranks' memory where the configuration leaves it open, before a process group exists."""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.work_experts import expert_rows_arena_bytes

from tpengine.config import Config
from tpengine.dtypes import dtype_bytes
from tpengine.layout.step_plan import Layout
from tpengine.plan import Residency


@dataclass(frozen=True)
class Decided:
    """The decisions of a run, for all its phases.

    Attributes:
        residency: how long gathered weights stay, the same on all ranks; None: as layout_of has it.
        row_load: for how many times the mean a rank's experts have buffers that kernels bring rows to; 0 for none: rows
            travel at their exact number. Ranks take the least that one of them has decided.
    """

    residency: Residency | None = None
    row_load: float = 0.0


def expert_rows_bytes(config: Config) -> int:
    """Return the symmetric memory of a rank in which kernels move a micro-batch's rows of experts in one piece."""
    model, train, tp = config.model, config.train, config.parallel.tp or 1
    tokens = train.micro_batch_size * train.seq_len // tp
    return expert_rows_arena_bytes(tokens, model.details.experts_per_token, model.hidden_size, dtype_bytes(train.dtype))


def rows_memory_bytes(config: Config, layout: Layout) -> int:
    """Return the same where a layout has buffers for these rows, else 0."""
    return expert_rows_bytes(config) if layout.row_load else 0
