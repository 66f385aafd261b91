"""What a GPU is asked, as plain data: every case, what it is worth, and how long it should take. No torch.

Worth is on one scale: 100 is what everything else rests on, 10 answers a question that decides work, 1 is nice to know.
Seconds are guesses until a first run: a case may take three times as long before it is ended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.declared import Case

_CASES = "benchmarks.gpu.cases"
# What every test imports, and what the trainer does; neither needs what the command line does.
_TESTS = ("pytest", "hypothesis", "xdist")
_TRAINING = ("numpy",)
_RANKS = (2, 4, 8)
_MODELS = ("llama3_8b", "llama3_70b")
_NO_RIVALS = ["torch"]


def cases_for(out: Path) -> list[Case]:
    """Return every case; `out` is where files besides rows are written."""
    return [
        *_smoke(),
        *_tests(),
        *_matmul(out),
        *_attention(),
        *_fused(),
        *_operators(),
        *_training(),
        *_planner(),
    ]


def _operators_case(name: str, phase: str, worth: float, seconds: float, **arguments: Any) -> Case:
    return Case(name, phase, worth, seconds, f"{_CASES}.operators:measure", arguments)


def compiling(capability: str) -> Case:
    """Return what runs beside the first cases: the compiler, on half the cores.

    Args:
        capability: of the GPU: "9.0" is sm_90.
    """
    arguments = {"target": f"sm_{capability.replace('.', '')}", "processes": max(1, (os.cpu_count() or 1) // 2)}
    return Case("compile_ahead", "a", 1, 300, f"{_CASES}.ahead:compile_ahead", arguments)


def _smoke() -> list[Case]:
    """Every family of kernels once, small; then what several processes need to exchange at all.

    Most of the time goes to the compiler.
    """
    small: Mapping[str, Any] = {"models": ["llama3_8b"], "seqs": [512], "rounds": 1, "rivals": _NO_RIVALS}
    families = {
        "rows": (["norm", "activation", "rope", "dropout", "embedding", "adamw"], 30),
        "matmul": (["matmul"], 40),
        "attention": (["attention"], 50),
        "loss": (["cross_entropy", "linear_cross_entropy"], 20),
    }
    cases = [
        _operators_case(f"smoke/{name}", "a", 200, seconds, ops=ops, **small)
        for name, (ops, seconds) in families.items()
    ]
    fused = {"model": "llama3_8b", "tokens": [512], "ranks": 2, "rounds": 1}
    return [
        *cases,
        Case("smoke/open_arena", "a", 200, 15, f"{_CASES}.protocol:open_arena", {"ranks": 2}),
        Case("smoke/fused", "a", 300, 60, f"{_CASES}.fused:overlap", fused),
    ]


def _tests() -> list[Case]:
    """The tests that skip without a GPU, the fused ones first."""

    def tests(name: str, worth: float, seconds: float, chosen: str, *paths: str, needs: tuple[str, ...] = ()) -> Case:
        arguments = {"paths": paths, "chosen": chosen}
        return Case(f"tests/{name}", "b", worth, seconds, f"{_CASES}.tests:run", arguments, (*_TESTS, *needs))

    fused, ops = "tests/kernels/fused", "tests/kernels/ops"
    rows = [f"{ops}/test_{name}.py" for name in ("norm", "adamw", "rope", "activation", "embedding", "dropout")]
    protocol = f"{_CASES}.protocol"
    return [
        tests("fused", 200, 90, "[cuda", f"{fused}/test_cuda.py"),
        tests("fused_calls", 120, 90, "[cuda", f"{fused}/test_cuda_calls.py"),
        tests("matmul", 50, 60, "[gpu or tuned_tile", f"{ops}/test_matmul.py", f"{ops}/test_tuned.py"),
        tests("attention", 50, 60, "[gpu", f"{ops}/attention"),
        tests("rows", 50, 60, "[gpu", *rows),
        tests("losses", 30, 40, "[gpu", f"{ops}/cross_entropy"),
        tests("memory", 30, 30, "cuda", "tests/kernels/symmetric/test_cuda_memory.py"),
        tests("block", 30, 30, "[cuda", f"{fused}/test_block.py", needs=_TRAINING),
        tests("layouts", 110, 120, "test_cuda", "tests/tpengine/training/layouts/test_cuda.py", needs=_TRAINING),
        Case("pulls", "b", 40, 45, f"{_CASES}.fused:pulls", {"ranks": 4, "calls": 100_000, "seconds": 30.0}),
        Case("pulls/late_processes", "b", 20, 60, f"{protocol}:pulls", {"ranks": 2, "calls": 1000, "late": True}),
    ]


def _matmul(out: Path) -> list[Case]:
    tuned = [
        Case(
            f"tiles/{model}/{tokens}",
            "c",
            worth,
            70,
            f"{_CASES}.tiles:tune",
            {"model": model, "tokens": [tokens], "copy": str(out)},
        )
        for model, tokens, worth in (
            ("llama3_8b", 4096, 110),
            ("llama3_8b", 8192, 80),
            ("llama3_70b", 4096, 45),
            ("llama3_70b", 8192, 40),
        )
    ]
    against = [
        _operators_case(
            f"matmul/{model}", "c", worth, 40, ops=["matmul"], models=[model], seqs=[4096, 8192], rivals=_NO_RIVALS
        )
        for model, worth in zip(_MODELS, (60, 40), strict=True)
    ]
    return [*tuned, *against]


def _attention() -> list[Case]:
    return [
        _operators_case(
            f"attention/{model}/{seq}", "d", worth, 40, ops=["attention"], models=[model], seqs=[seq], rounds=10
        )
        for model, seq, worth in (
            ("llama3_8b", 4096, 60),
            ("llama3_8b", 8192, 60),
            ("llama3_70b", 8192, 40),
            ("llama3_70b", 4096, 30),
            ("llama3_8b_whole", 8192, 30),
            ("llama_1b", 2048, 30),
        )
    ]


def _fused() -> list[Case]:
    overlap, fused = f"{_CASES}.fused:overlap", f"{_CASES}.fused"
    measured = [
        Case(
            f"fused/{model}/ranks_{ranks}/tokens_{tokens}",
            "e",
            worth * (2 if ranks == 4 else 1),
            45,
            overlap,
            {"model": model, "tokens": [tokens], "ranks": ranks},
        )
        for model, worth in zip(_MODELS, (25, 12), strict=True)
        for ranks in _RANKS
        for tokens in (4096, 16384, 512)
    ]
    sizes = {"model": "llama3_8b", "tokens": 4096, "ranks": 4}
    # Tiles of 8 warps and of 4; K of a rank's out and down projections, and twice that.
    bars = {
        "depths": [512, 1792, 3584],
        "tokens": 4096,
        "hidden": 4096,
        "tiles": [[128, 256, 64, 4, 8, 3], [128, 128, 64, 8, 4, 3]],
    }
    return [
        *measured,
        Case("host/fused", "e", 40, 20, f"{fused}:host", sizes),
        Case("host/graph", "e", 15, 20, f"{fused}:host", {**sizes, "graph": True}),
        Case("host/alone", "e", 15, 25, f"{fused}:host_alone"),
        Case("own_bars", "e", 25, 40, f"{fused}:own_bars", {**bars, "ranks": 4}),
        Case("what_copies", "e", 25, 20, f"{fused}:what_copies", sizes),
        Case("publish", "e", 20, 15, f"{fused}:publish", {"tokens": [512, 2048, 8192], "hidden": 4096}),
    ]


def _operators() -> list[Case]:
    return [
        _operators_case(f"operators/{op}", "f", worth, 40, ops=[op], models=["llama3_8b"], seqs=[4096], rounds=10)
        for op, worth in (
            ("norm", 20),
            ("activation", 20),
            ("cross_entropy", 20),
            ("adamw", 20),
            ("rope", 10),
            ("linear_cross_entropy", 10),
            ("embedding", 5),
            ("dropout", 3),
        )
    ]


def _training() -> list[Case]:
    def training(name: str, phase: str, worth: float, seconds: float, **arguments: Any) -> Case:
        function, exact = f"{_CASES}.training:{name}", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        environment = exact if name == "exact_price" else {}
        more = {"preset": "llama_1b", **arguments}
        return Case(f"train/{name}", phase, worth, seconds, function, more, _TRAINING, environment)

    return [
        training("own_step", "g", 200, 90, steps=8),
        training("against_torch", "g", 250, 180, steps=8),
        training("exact_price", "h", 20, 60, steps=4, layers=4),
        training("zero_stages", "h", 25, 120, ranks=2, steps=3, layers=1),
    ]


def _planner() -> list[Case]:
    planner = f"{_CASES}.planner"
    return [
        Case("planner/launches", "i", 20, 10, f"{planner}:launches"),
        Case("planner/copies", "i", 10, 15, f"{planner}:copies", {"sizes_bytes": [1 << n for n in range(12, 31, 3)]}),
        Case("planner/matmul_rates", "i", 10, 40, f"{planner}:matmul_rates", {"sizes": [512, 2048, 8192]}),
    ]
