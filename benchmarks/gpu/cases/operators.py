"""Cases of single operators: `benchmarks.run kernels` and `compile`, in a process of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import compile as compiling
from benchmarks.kernels import command as kernels


def measure(
    rows: Path,
    ops: Sequence[str],
    models: Sequence[str],
    seqs: Sequence[int],
    rounds: int = 20,
    rivals: Sequence[str] | None = None,
    direction: Sequence[Any] | None = None,
) -> int:
    """Check and measure operators as `benchmarks.run kernels` does; return 1 if a result is wrong."""
    options = kernels.Options(
        op=tuple(ops),
        models=tuple(models),
        seqs=tuple(seqs),
        rounds=rounds,
        rivals=kernels.Options.rivals if rivals is None else tuple(rivals),
        direction=kernels.Options.direction if direction is None else tuple(direction),
        out=rows,
    )
    return kernels.main(options)


def compile_for(rows: Path, ops: Sequence[str], target: str = "sm_90") -> int:
    """Compile what operators launch; return 1 if a kernel spills or does not compile."""
    return compiling.main(compiling.Options(op=tuple(ops), target=(target,), jobs=1, out=rows))
