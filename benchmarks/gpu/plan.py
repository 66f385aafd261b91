"""What a GPU is asked, as plain data: every case, what it is worth, and how long it should take. No torch.

Worth is on one scale: 100 is what everything else rests on, 10 answers a question that decides work, 1 is nice to know.
Seconds are guesses until a first run: a case may take three times as long before it is ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.declared import Case

_CASES = "benchmarks.gpu.cases"
# What the tests import, and the trainer.
_TESTS = ("pytest", "hypothesis", "xdist", "tyro", "tomli_w")
_TRAINING = ("tomli_w",)
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


def _smoke() -> list[Case]:
    """Every family of kernels once, small; then what several processes need to exchange at all."""
    small: Mapping[str, Any] = {"models": ["llama3_8b"], "seqs": [512], "rounds": 1, "rivals": _NO_RIVALS}
    families = {
        "rows": ["norm", "activation", "rope", "dropout", "embedding", "adamw"],
        "matmul": ["matmul"],
        "attention": ["attention"],
        "loss": ["cross_entropy", "linear_cross_entropy"],
    }
    cases = [_operators_case(f"smoke/{name}", "a", 100, 12, ops=ops, **small) for name, ops in families.items()]
    fused = {"model": "llama3_8b", "tokens": [512], "ranks": 2, "rounds": 1}
    return [
        *cases,
        Case("smoke/open_arena", "a", 100, 15, f"{_CASES}.protocol:open_arena", {"ranks": 2}),
        Case("smoke/fused", "a", 100, 20, f"{_CASES}.fused:overlap", fused),
    ]


def _tests() -> list[Case]:
    """The tests that skip without a GPU, the fused ones first."""

    def tests(name: str, worth: float, seconds: float, chosen: str, *paths: str) -> Case:
        return Case(
            f"tests/{name}", "b", worth, seconds, f"{_CASES}.tests:run", {"paths": paths, "chosen": chosen}, _TESTS
        )

    fused, ops = "tests/kernels/fused", "tests/kernels/ops"
    return [
        tests("fused", 100, 60, "[cuda", f"{fused}/test_cuda.py"),
        tests("fused_calls", 80, 60, "[cuda", f"{fused}/test_cuda_calls.py"),
        tests("matmul", 40, 40, "[gpu", f"{ops}/test_matmul.py"),
        tests("attention", 40, 50, "[gpu", f"{ops}/attention"),
        tests("operators", 40, 50, "[gpu", *(f"{ops}/test_{n}.py" for n in ("norm", "adamw", "rope", "activation"))),
        tests("losses", 30, 40, "[gpu", f"{ops}/cross_entropy", f"{ops}/test_embedding.py", f"{ops}/test_dropout.py"),
        tests("memory", 30, 30, "cuda", "tests/kernels/symmetric/test_cuda_memory.py"),
        tests("layouts", 50, 120, "test_cuda", "tests/tpengine/training/layouts/test_cuda.py"),
        Case("pulls", "b", 40, 45, f"{_CASES}.fused:pulls", {"ranks": 4, "calls": 100_000, "seconds": 30.0}),
        Case(
            "pulls/late_processes", "b", 30, 60, f"{_CASES}.protocol:pulls", {"ranks": 2, "calls": 1000, "late": True}
        ),
    ]


def _matmul(out: Path) -> list[Case]:
    tuned = [
        Case(
            f"tiles/{model}",
            "c",
            worth,
            120,
            f"{_CASES}.tiles:tune",
            {"model": model, "tokens": [4096, 8192], "copy": str(out)},
        )
        for model, worth in zip(_MODELS, (90, 60), strict=True)
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
            30,
            overlap,
            {"model": model, "tokens": [tokens], "ranks": ranks},
        )
        for model, worth in zip(_MODELS, (25, 12), strict=True)
        for ranks in _RANKS
        for tokens in (4096, 16384, 512)
    ]
    sizes = {"model": "llama3_8b", "tokens": 4096, "ranks": 4}
    return [
        *measured,
        Case("host/fused", "e", 40, 20, f"{fused}:host", sizes),
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
        function = f"{_CASES}.training:{name}"
        return Case(f"train/{name}", phase, worth, seconds, function, {"preset": "llama_1b", **arguments}, _TRAINING)

    return [
        training("own_step", "g", 100, 90, steps=8),
        training("against_torch", "g", 80, 150, steps=8),
        training("exact_price", "h", 20, 60, steps=4, layers=4),
        training("zero_stages", "h", 20, 120, ranks=2, steps=4, layers=4),
    ]


def _planner() -> list[Case]:
    planner = f"{_CASES}.planner"
    return [
        Case("planner/launches", "i", 20, 10, f"{planner}:launches"),
        Case("planner/copies", "i", 10, 15, f"{planner}:copies", {"sizes_bytes": [1 << n for n in range(12, 31, 3)]}),
        Case("planner/matmul_rates", "i", 10, 40, f"{planner}:matmul_rates", {"sizes": [512, 2048, 8192]}),
    ]
