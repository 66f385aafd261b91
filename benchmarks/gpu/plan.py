"""What a GPU is asked, as plain data: every case, what it is worth, and how long it should take. No torch.

First comes what decides (decisive.py), in its order. What is here runs behind it while minutes are left, the worthiest
per second first. Worth is on one scale: 100 is what everything else rests on, 10 answers a question that decides work,
1 is nice to know. Seconds are what an H200 took and a third more; for cases that it has not run they are guesses. A
case may take three times as long before it is ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.decisive import CASES, OPS, ROWS, TESTS, TRAINING, decisive
from benchmarks.gpu.declared import OVERLAPS, Case

# What transformers reads weights with, and its models need.
_THEIRS = ("transformers", "safetensors", "numpy")
_NO_RIVALS = ["torch"]
_SDPA = ["sdpa_flash", "sdpa_flash_deterministic", "sdpa_efficient", "sdpa_cudnn"]
# By names of tests: both ways in bfloat16, and the host's bits; graphs, and a rank that calls wrongly.
_SOME_FUSED = "cuda-2-fused-dtype3 or cuda-2-push-dtype4 or (with_the_host_path and cuda-4)"
_SOME_CALLS = "cuda-2-fused-even or cuda-2-push-odd or (ends_on_all and cuda-4)"
# What the engine calls, and what a layer of another framework does.
_ATTENTION = ["attention", "attention_qkv"]


def cases_for(out: Path, models: Sequence[Path] = ()) -> list[Case]:
    """Return every case.

    Args:
        out: where files besides rows are written.
        models: directories of Hugging Face weights that are compared with transformers, beside the tiny models.
    """
    return [
        *decisive(out),
        *_predictions(out),
        *_tests(),
        *_architectures(models),
        *_matmul(out),
        *_attention(out),
        *_fused(),
        *_operators(),
        *_experts(),
        *_prices(),
        *_planner(),
    ]


def _operators_case(name: str, phase: str, worth: float, seconds: float, **arguments: Any) -> Case:
    return Case(name, phase, worth, seconds, f"{CASES}.kernels.operators:measure", arguments)


def compiling(capability: str) -> Case:
    """Return what runs beside the first cases: the compiler, on half the cores.

    Args:
        capability: of the GPU: "9.0" is sm_90.
    """
    arguments = {"target": f"sm_{capability.replace('.', '')}", "processes": max(1, (os.cpu_count() or 1) // 2)}
    return Case("compile_ahead", "a", 1, 300, f"{CASES}.kernels.ahead:compile_ahead", arguments)


def _training_case(name: str, worth: float, seconds: float, **arguments: Any) -> Case:
    function, exact = f"{CASES}.training:{name}", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment = exact if name == "exact_price" else {}
    more = {"preset": "llama_1b", **arguments}
    return Case(f"train/{name}", "h", worth, seconds, function, more, TRAINING, environment)


def _predictions(out: Path) -> list[Case]:
    """The planner's file of this GPU, and by it the layouts of one rank: predicted, then measured."""
    where, steps = f"{CASES}.predictions", {"out": str(out), "preset": "llama_1b", "seq_len": 2048, "minutes": 2.0}
    return [
        # It compiles what other cases compile ahead.
        Case("planner/machine", "b", 400, 70, f"{where}:machine", {}, TRAINING, limit_seconds=300),
        Case("planner/layouts", "b", 900, 150, f"{where}:layouts", steps, TRAINING),
    ]


def _tests() -> list[Case]:
    """The other tests that skip without a GPU, the fused ones first."""

    def tests(name: str, worth: float, seconds: float, chosen: str, *paths: str, **more: Any) -> Case:
        arguments = {"paths": paths, "chosen": chosen}
        needs = (*TESTS, *more.pop("needs", ()))
        return Case(f"tests/{name}", "c", worth, seconds, f"{CASES}.tests:run", arguments, needs, **more)

    fused = "tests/kernels/fused"
    protocol = f"{CASES}.kernels.protocol"
    return [
        # At the sizes of a model, between ranks of one process.
        tests("pairs", 300, 60, "test_cuda", "tests/benchmarks/overlap/test_co_located.py"),
        # Ranks in processes of their own take the GPU in turns, 30 s a test: so a few that use everything, not all 45.
        tests("fused", 450, 100, _SOME_FUSED, f"{fused}/test_cuda.py"),
        tests("fused_calls", 350, 100, _SOME_CALLS, f"{fused}/test_cuda_calls.py"),
        tests("layouts", 350, 120, "test_cuda", "tests/tpengine/training/layouts/test_cuda.py", needs=TRAINING),
        # One of its tests is that ranks do not share a GPU unless they are told to.
        tests("memory", 30, 60, "cuda", "tests/kernels/symmetric/test_cuda_memory.py", environment={OVERLAPS: "0"}),
        tests("other_dtypes", 150, 90, "[gpu-float", f"{OPS}/attention", f"{OPS}/test_matmul.py", *ROWS),
        tests("other_rows", 50, 25, "[gpu", f"{OPS}/test_embedding.py", f"{OPS}/test_dropout.py"),
        tests("block", 90, 30, "[gpu", f"{fused}/test_block.py", needs=TRAINING),
        Case("pulls", "c", 40, 45, f"{CASES}.kernels.fused:pulls", {"ranks": 4, "calls": 100_000, "seconds": 30.0}),
        Case("pulls/late_processes", "c", 20, 60, f"{protocol}:pulls", {"ranks": 2, "calls": 1000, "late": True}),
    ]


def _architectures(models: Sequence[Path]) -> list[Case]:
    """Tiny models of every architecture, and those that were published: logits as transformers'."""
    where = f"{CASES}.architectures"
    names = [
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gpt2",
        "gemma3",
        "granite",
        "smollm3",
        "phi3",
        "olmo3",
        "ministral3",
        "qwen3_moe",
        "mixtral",
    ]
    published = [
        Case(f"models/{name}", "c", 60, 60, f"{where}:directory", {"name": name, "path": str(path)}, _THEIRS)
        for name, path in _by_name(models).items()
    ]
    return [Case("architectures", "c", 80, 45, f"{where}:tiny", {"architectures": names}, _THEIRS), *published]


def _by_name(models: Sequence[Path]) -> dict[str, Path]:
    """Return the directories by name; the name of a cache's snapshot is a hash, and two above it is the model's."""
    names = [(path.parents[1] if path.parent.name == "snapshots" else path).name for path in models]
    return {name.rpartition("--")[2]: path for name, path in zip(names, models, strict=True)}


def published_models(cache: Path) -> list[Path]:
    """Return the directories of small published models in a cache of Hugging Face's, whole or not.

    Args:
        cache: the folder that holds `models--OWNER--NAME/snapshots/HASH`.
    """
    patterns = ("models--*--Llama-3.2-1B*", "models--*--Qwen3-0.6B*")
    return [path.parent for name in patterns for path in sorted(cache.glob(f"{name}/snapshots/*/config.json"))]


def _matmul(out: Path) -> list[Case]:
    def tiles(model: str, tokens: int, worth: float, seconds: float = 20, **which: Any) -> Case:
        arguments = {"model": model, "tokens": [tokens], "copy": str(out), **which}
        return Case(f"tiles/{model}/{tokens}", "d", worth, seconds, f"{CASES}.kernels.tiles:tune", arguments)

    def against(model: str, worth: float) -> Case:
        sizes = {"models": [model], "seqs": [4096, 8192], "rivals": _NO_RIVALS}
        return _operators_case(f"matmul/{model}", "d", worth, 18, ops=["matmul"], **sizes)

    return [
        tiles("llama3_8b", 4096, 40),
        tiles("llama3_8b", 8192, 40),
        tiles("llama3_70b", 4096, 45, 40),
        tiles("llama3_70b", 8192, 40, 60),
        against("llama3_8b", 60),
        against("llama3_70b", 40),
    ]


def _attention(out: Path) -> list[Case]:
    """Against the backends of torch's attention: nothing is compiled but ours."""

    def choice(model: str, seqs: Sequence[int], worth: float, seconds: float) -> Case:
        arguments = {"model": model, "seqs": list(seqs), "copy": str(out)}
        where = f"{CASES}.kernels.attention:choose"
        return Case(f"attention_choice/{model}", "e", worth, seconds, where, arguments, TRAINING)

    def attention(model: str, seqs: Sequence[int], worth: float, seconds: float) -> Case:
        how: dict[str, Any] = {"ops": ["attention"], "cases": _ATTENTION, "rivals": _SDPA, "rounds": 10}
        return _operators_case(f"attention/{model}", "e", worth, seconds, models=[model], seqs=seqs, **how)

    compiled: dict[str, Any] = {"ops": ["attention"], "cases": ["attention_window"], "rivals": ["flex_attention"]}
    return [
        choice("llama3_70b", (4096, 8192), 30, 15),
        attention("llama3_8b", (4096, 8192), 50, 18),
        attention("llama3_70b", (4096, 8192), 60, 25),
        attention("llama3_8b_whole", (8192,), 30, 40),
        _operators_case("attention/flex", "e", 10, 60, models=["llama3_8b"], seqs=[4096], rounds=10, **compiled),
    ]


def _fused() -> list[Case]:
    """What exchanges are made of, and the host's time of a fused call. No figure here says what fusing brings.

    Ranks that share a GPU have no link to hide, copy by the processors that multiply, and have a part of those each.
    """
    fused = f"{CASES}.kernels.fused"
    sizes = {"model": "llama3_8b", "tokens": 4096, "ranks": 4}
    # Tiles of 8 warps and of 4; K of a rank's out and down projections, and twice that.
    bars = {
        "depths": [512, 1792, 3584],
        "tokens": 4096,
        "hidden": 4096,
        "tiles": [[128, 256, 64, 4, 8, 3], [128, 128, 64, 8, 4, 3]],
    }
    return [
        Case("protocol/open_arena", "f", 90, 15, f"{CASES}.kernels.protocol:open_arena", {"ranks": 2}),
        Case("host/fused", "f", 40, 12, f"{fused}:host", sizes),
        Case("host/graph", "f", 15, 10, f"{fused}:host", {**sizes, "graph": True}),
        Case("host/alone", "f", 15, 10, f"{fused}:host_alone"),
        Case("own_bars", "f", 25, 40, f"{fused}:own_bars", {**bars, "ranks": 4}),
        Case("what_copies", "f", 25, 12, f"{fused}:what_copies", sizes),
        Case("publish", "f", 20, 8, f"{fused}:publish", {"tokens": [512, 2048, 8192], "hidden": 4096}),
    ]


def _operators() -> list[Case]:
    """The operators of a block and the optimizer's, which decide most, then the others; a process for each group."""
    groups = {
        "block": (["norm", "activation", "rope"], 100, 40),
        "ends": (["cross_entropy", "linear_cross_entropy", "adamw"], 100, 40),
        "others": (["embedding", "dropout"], 8, 20),
    }
    return [
        _operators_case(f"operators/{name}", "g", worth, seconds, ops=ops, models=["llama3_8b"], seqs=[4096], rounds=10)
        for name, (ops, worth, seconds) in groups.items()
    ]


def _experts() -> list[Case]:
    """Experts as in Qwen3-30B-A3B, in 200 s: right first, then their products beside torch's and Liger's.

    And rows that kernels bring to them, by ranks that share the GPU.
    """

    def tests(name: str, worth: float, seconds: float, chosen: str, *paths: str, needs: Sequence[str] = ()) -> Case:
        arguments = {"paths": paths, "chosen": chosen}
        return Case(f"tests/{name}", "c", worth, seconds, f"{CASES}.tests:run", arguments, (*TESTS, *needs))

    products = ["grouped_matmul", "grouped_matmul_dgrad", "grouped_wgrad", "grouped_swiglu"]
    sizes: dict[str, Any] = {"ops": ["experts"], "models": ["qwen3_30b_a3b"], "seqs": [32768], "rounds": 10}
    rivals = ["torch", "liger"]
    return [
        tests("experts", 500, 80, "[gpu", f"{OPS}/experts"),
        tests("expert_rows", 300, 60, "equal_bits and cuda-2", "tests/kernels/fused/test_bounded_rows.py"),
        tests(
            "row_buffers",
            250,
            60,
            "computed_again and cuda and not blocks and not pp",
            "tests/tpengine/training/layouts/test_row_buffers.py",
            needs=TRAINING,
        ),
        _operators_case("experts/products", "g", 400, 60, cases=products, rivals=rivals, **sizes),
        _operators_case("experts/whole", "g", 350, 60, cases=["experts"], rivals=rivals, **sizes),
    ]


def _prices() -> list[Case]:
    return [
        _training_case("exact_price", 80, 20, steps=4, layers=4),
        _training_case("zero_stages", 40, 120, ranks=2, steps=3, layers=1),
    ]


def _planner() -> list[Case]:
    planner = f"{CASES}.planner"
    return [
        Case("planner/launches", "i", 20, 8, f"{planner}:launches"),
        Case("planner/copies", "i", 20, 8, f"{planner}:copies", {"sizes_bytes": [1 << n for n in range(12, 31, 3)]}),
        Case("planner/matmul_rates", "i", 30, 10, f"{planner}:matmul_rates", {"sizes": [512, 2048, 8192]}),
    ]
