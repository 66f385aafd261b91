"""Cases of single operators: each family once, `benchmarks.run kernels` and `compile`, in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases.clock import device_here, write
from benchmarks.harness.timing import PASSED
from benchmarks.kernels import command as kernels
from benchmarks.kernels.cases.cases import OURS, Shape, cases_of
from benchmarks.kernels.check import FEWEST_DRAWS, check
from benchmarks.launches import compile as compiling


def smoke(rows: Path, families: Mapping[str, str], model: str, seq: int) -> int:
    """Compare our results and gradients with their references, and time nothing; return 1 if one is wrong.

    Args:
        rows: gets a row for each that is wrong, and one that says how many are right.
        families: names of cases of `benchmarks.run kernels`, and the operator of each.
        model: per-rank shapes.
        seq: tokens of a sequence.
    """
    device = device_here()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = Shape(kernels.MODELS_BY_NAME[model], seq, dtype, device.type)
    num_wrong = 0
    for name, op in families.items():
        # Said before it runs: after an illegal access nothing of this process runs.
        print(name, flush=True)
        (case,) = [case for case in cases_of(op, shape) if case.name == name]
        wrong = check(case, shape, {OURS: case.contestants[OURS]}, most_draws=FEWEST_DRAWS).wrong
        if wrong:
            num_wrong += 1
            write(rows, f"smoke/{name}", {}, f"failed: {wrong[OURS]}")
    fields = {"num_right": len(families) - num_wrong, "num_cases": len(families)}
    write(rows, "smoke/families", fields, f"failed: {num_wrong} families are wrong" if num_wrong else PASSED)
    return int(num_wrong > 0)


def measure(
    rows: Path,
    ops: Sequence[str],
    models: Sequence[str],
    seqs: Sequence[int],
    rounds: int = 20,
    rivals: Sequence[str] | None = None,
    direction: Sequence[Any] | None = None,
    cases: Sequence[str] | None = None,
    batch: int = 1,
) -> int:
    """Check and measure operators as `benchmarks.run kernels` does; return 1 if a result is wrong."""
    options = kernels.Options(
        op=tuple(ops),
        cases=None if cases is None else tuple(cases),
        models=tuple(models),
        seqs=tuple(seqs),
        batch=batch,
        rounds=rounds,
        rivals=kernels.Options.rivals if rivals is None else tuple(rivals),
        direction=kernels.Options.direction if direction is None else tuple(direction),
        out=rows,
    )
    return kernels.main(options)


def compile_for(rows: Path, ops: Sequence[str], target: str = "sm_90") -> int:
    """Compile what operators launch; return 1 if a kernel spills or does not compile."""
    return compiling.main(compiling.Options(op=tuple(ops), target=(target,), jobs=1, out=rows))
