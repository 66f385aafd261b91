"""Rung: pure. Whose attention is taken, on GPUs that are faked: by rule, by a file, by what was asked for; refusals.

That torch's is faster, and that cuDNN and flash run, only a GPU shows (tests/tpengine/layers/test_torch_attention.py).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from tpkernels.again import same_choices
from tpkernels.launch import Target
from tpkernels.ops.attention import choice
from tpkernels.ops.attention.choice import Gpu, Problem, choose, chosen_backend
from tpkernels.ops.matmul import tuned
from tpkernels.ops.matmul.host import has_onednn
from tpkernels.ops.matmul.tuned import TunedAttention, TunedFile, written

SIZES = (64, 4, 2, 16)
ON_CPU = Problem(torch.device("cpu"), torch.float32, *SIZES)
ON_GPU = Problem(torch.device("cuda", 0), torch.bfloat16, 2048, 32, 8, 64)
H200 = Gpu("NVIDIA H200", Target("cuda", 90), 91501)


@pytest.fixture(autouse=True)
def _no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look for files in an empty directory, and forget what was read before and after."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned.forget()
    choice.forget()
    yield
    tuned.forget()
    choice.forget()


Faked = Callable[..., None]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    """Have the device be a GPU; `agrees` says which of torch's backends take heads of a size, `winner` what its file
    says of ON_GPU.
    """

    def fake(
        gpu: Gpu | None, agrees: Callable[[str, int], bool] = lambda backend, size: size <= 128, winner: str = ""
    ) -> None:
        def timed(*of: Any) -> TunedAttention | None:
            dtype, found = str(of[1]).removeprefix("torch."), (winner, 310.0, 420.0, "2026-11-23", None)
            return TunedAttention(*of[2:], dtype, *found) if winner and of == ON_GPU[:6] else None

        def asked(backend: str, device: object, dtype: object, heads: int, kv_heads: int, head_size: int) -> bool:
            return agrees(backend, head_size)

        choice.forget()
        monkeypatch.setattr(choice, "tuned_attention", timed)
        monkeypatch.setattr(choice, "gpu_of", functools.cache(lambda device: gpu))
        monkeypatch.setattr(choice, "_torch_agrees", functools.cache(asked))
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    return fake


def won(winner: str, problem: Problem) -> None:
    """Write the file of a CPU."""
    sizes, dtype = problem[2:6], str(problem.dtype).removeprefix("torch.")
    one = TunedAttention(*sizes, dtype, winner, 310.0, 420.0, "2026-11-23", None)
    file = TunedFile("cpu", "2026-11-23", None, "2.13", None, [], [one])
    tuned.path_for("cpu").write_bytes(written(file))
    tuned.forget()
    choice.forget()


@pytest.mark.parametrize("arch", [90, 100, 103])
@pytest.mark.parametrize(
    "change",
    [{}, {"dtype": torch.float16}, {"seq": 512}, {"head_size": 128}, {"heads": 4, "kv_heads": 4, "seq": 8192}],
    ids=str,
)
def test_by_rule_torchs_is_taken(faked: Faked, arch: int, change: dict[str, Any]) -> None:
    faked(H200._replace(target=Target("cuda", arch)))
    assert choose(ON_GPU._replace(**change)) == ("cudnn", f"by rule for sm_{arch}")


def test_heads_are_as_wide_as_torch_says(faked: Faked) -> None:
    wide = ON_GPU._replace(head_size=256)
    faked(H200, lambda backend, size: backend == "cudnn")
    assert choose(wide).backend == "cudnn"
    faked(H200)
    assert choose(wide) == (
        None,
        "torch.backends.cuda.can_use_cudnn_attention refuses heads of 256 on NVIDIA H200",
    )


@pytest.mark.parametrize(
    ("gpu", "change", "reason"),
    [
        (None, {}, "on cuda"),  # as a GPU of AMD's
        (H200._replace(name="NVIDIA A100", target=Target("cuda", 80)), {}, "NVIDIA A100 is of another kind than sm_90"),
        (H200._replace(target=Target("cuda", 120)), {}, "of another kind"),
        (H200, {"seq": 511}, "511 tokens are fewer than 512"),
        (H200, {"dtype": torch.float32}, "for 16 bits, and the dtype is float32"),
        (H200, {"drops": True}, "by a mask of its own"),
        (H200, {"drops": True, "windowed": True}, "by a mask of its own"),
        (H200._replace(cudnn=91400), {}, "needs cuDNN 9.15.0, and torch has 9.14.0"),
        (H200._replace(cudnn=0), {}, "needs cuDNN 9.15.0, and torch has none"),
        (H200, {"packed": True, "head_size": 60}, "heads of 60"),
    ],
)
def test_by_rule_ours_is_taken(faked: Faked, gpu: Gpu | None, change: dict[str, Any], reason: str) -> None:
    faked(gpu)
    taken = choose(ON_GPU._replace(**change))
    assert taken.backend is None and reason in taken.reason


@pytest.mark.parametrize("change", [{"windowed": True}, {"packed": True}, {"windowed": True, "packed": True}], ids=str)
def test_windows_and_documents_need_what_varlen_attn_has(
    faked: Faked, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.10, 2.11 and 2.12: the first has no window, and no scale; the second no groups of heads."""
    faked(H200)
    grouped, alone = (ON_GPU._replace(kv_heads=kv_heads, **change) for kv_heads in (8, 32))

    def of_2_10(query, key, value, is_causal=False): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    def of_2_11(query, key, value, *, scale=None, window_size=(-1, -1)): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    def of_2_12(query, *, scale=None, window_size=(-1, -1), enable_gqa=False): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202

    found = []
    for function in (of_2_10, of_2_11, of_2_12):
        monkeypatch.setattr(choice, "varlen_attn", function)
        choice.forget()
        found.append((choose(grouped).backend, choose(alone).backend))
    assert found == [(None, None), (None, "varlen"), ("varlen", "varlen")]
    monkeypatch.setattr(choice, "varlen_attn", of_2_11)
    choice.forget()
    assert choose(grouped).reason == f"varlen_attn of torch {torch.__version__} has no enable_gqa"


def test_a_torch_without_flash_attention_leaves_windows_to_ours(faked: Faked, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(H200)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    taken = choose(ON_GPU._replace(windowed=True, kv_heads=32))
    assert taken == (None, f"torch {torch.__version__} was built without FlashAttention")


def test_torch_is_asked_for_a_call_with_gradients_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda of: torch.is_grad_enabled())
    choice.forget()
    with torch.inference_mode():
        assert choice._torch_agrees("cudnn", torch.device("cpu"), torch.bfloat16, 4, 2, 64)
    choice.forget()


def test_this_torchs_varlen_attn_is_known() -> None:
    assert {"scale", "window_size"} <= set(inspect.signature(choice.varlen_attn).parameters)


def test_a_file_overrules_the_rule(faked: Faked) -> None:
    faked(H200, winner="ours")
    assert choose(ON_GPU) == (None, "the fastest by h200.json of 2026-11-23")
    # Of sizes that were not timed, and of windows, the rule.
    assert choose(ON_GPU._replace(heads=16)).backend == "cudnn"
    assert choose(ON_GPU._replace(windowed=True, kv_heads=32)).backend == "varlen"
    faked(H200, winner="flash")
    assert choose(ON_GPU) == ("flash", "310 us instead of 420 by h200.json of 2026-11-23")
    faked(H200, lambda backend, size: backend == "cudnn", winner="flash")
    assert choose(ON_GPU) == ("cudnn", "by rule for sm_90")  # flash, which was timed, does not run here
    faked(H200._replace(name="NVIDIA A100", target=Target("cuda", 80)), winner="cudnn")
    assert choose(ON_GPU).backend == "cudnn"


def test_a_file_is_read() -> None:
    assert choose(ON_CPU) == (None, "on cpu")
    won("math", ON_CPU)
    assert choose(ON_CPU) == ("math", "310 us instead of 420 by cpu.json of 2026-11-23")
    assert choose(ON_CPU._replace(heads=2)).backend is None


def test_a_damaged_file_is_refused() -> None:
    (tuned.FOLDER / "cpu.json").write_text("{}")
    with pytest.raises(ValueError, match="tuned tiles must have format 4"):
        choose(ON_CPU)


def test_ours_is_taken_where_it_is_asked_for_or_torch_must_be_deterministic(faked: Faked) -> None:
    faked(H200)
    assert choose(ON_GPU, "ours") == (None, "as asked for")
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(ON_GPU) == (None, "torch is to be deterministic")
        with pytest.raises(ValueError, match="torch is to be deterministic"):
            choose(ON_GPU, "torch")
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose(ON_GPU).backend == "cudnn"


def test_what_was_asked_for_is_taken_from_torch_where_it_computes_the_same(faked: Faked) -> None:
    """On any GPU of NVIDIA's, for any length."""
    faked(Gpu("NVIDIA A100", Target("cuda", 80), 91501), lambda backend, size: backend == "flash" or size <= 128)
    assert choose(ON_GPU._replace(seq=16), "torch").backend == "cudnn"
    assert choose(ON_GPU._replace(head_size=256), "torch").backend == "flash"
    assert choose(ON_GPU._replace(windowed=True, kv_heads=32, seq=16), "torch").backend == "varlen"


@pytest.mark.parametrize(
    ("gpu", "problem", "reason"),
    [
        (None, ON_CPU, "it is for GPUs of NVIDIA, and the device is cpu"),
        (H200, ON_GPU._replace(dtype=torch.float32), "it is for 16 bits, and the dtype is float32"),
        (H200, ON_GPU._replace(drops=True), "it drops probabilities by a mask of its own, not by position"),
        (H200, ON_GPU._replace(packed=True, head_size=60), "FlashAttention is for heads of 8, 16, ... 256"),
        (H200, ON_GPU._replace(head_size=512), "can_use_cudnn_attention refuses heads of 512 on NVIDIA H200"),
        (H200._replace(cudnn=91000), ON_GPU, "it needs cuDNN 9.15.0, and torch has 9.10.0"),
    ],
)
def test_torchs_is_refused_by_name(faked: Faked, gpu: Gpu | None, problem: Problem, reason: str) -> None:
    faked(gpu, lambda backend, size: backend == "cudnn" and size <= 256)
    with pytest.raises(ValueError) as refused:
        choose(problem, "torch")
    message = str(refused.value)
    assert reason in message and "\n" not in message
    assert message.startswith("attention torch must be what torch computes alike: ")
    assert message.endswith(": use attention auto, or ours")


def test_what_is_computed_again_is_chosen_as_the_first_time(faked: Faked) -> None:
    """Torch made deterministic between forward and backward: both take what forward took, nested too."""
    faked(H200)
    seen: list[str | None] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(chosen_backend(ON_GPU))
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        seen.append(chosen_backend(ON_GPU._replace(seq=64)))
        return checkpoint(inner, x, use_reentrant=False, context_fn=same_choices)

    x = torch.ones(2, requires_grad=True)
    y = checkpoint(outer, x, use_reentrant=False, context_fn=same_choices)
    torch.use_deterministic_algorithms(True)
    try:
        y.sum().backward()
        assert chosen_backend(ON_GPU) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen[:2] == [None, "cudnn"] and len(seen) > 3
    assert all(backend == "cudnn" for backend in seen if backend is not None) and seen.count("cudnn") == len(seen) - 2


def test_a_compiler_is_given_the_choice_and_traces_no_file() -> None:
    """Whole in one graph: had the look-up been traced, Path.exists would break it."""
    won("math", ON_CPU)

    def chosen(x: torch.Tensor) -> torch.Tensor:
        problem = Problem(x.device, x.dtype, *SIZES)
        return x + (1 if chosen_backend(problem) == "math" else 2) + has_onednn()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dynamic in (False, True):
            compiled = torch.compile(chosen, backend="eager", fullgraph=True, dynamic=dynamic)
            assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), 1.0 + has_onednn()))
            torch._dynamo.reset()
