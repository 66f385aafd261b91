"""Rung: host, interpreter, GPU. Attention's dropout and strides, and its operators: opcheck, compile, refusals.

That nothing is compiled again for another length is shown without a GPU, by what would be launched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.attention_cases import (
    FIRST_HEAD,
    NUM_HEADS,
    STREAM,
    Case,
    operands,
    outcome,
    visible_by_definition,
)
from support.kernels.precision import with_gaps
from support.kernels.rungs import Rung, every_rung, every_rung_and_dtype, every_rung_and_grid
from torch import Tensor
from tpkernels.launch import INTERPRETED, Target, observed
from tpkernels.ops.attention import attention, attention_qkv
from tpkernels.ops.attention.backward import launch_attention_backward
from tpkernels.ops.attention.forward import launch_attention
from tpkernels.ops.attention.host import AttentionDropout
from tpkernels.ops.attention.launch import Options, Sides, Tables
from tpkernels.ops.attention.operator import (
    attention_backward_op,
    attention_op,
    attention_qkv_backward_op,
    attention_qkv_op,
)
from tpkernels.ops.attention.reference import attention_reference
from tpkernels.ops.dropout import keep_at
from tpkernels.ops.rope_tables import rope_tables

DROPOUT = AttentionDropout(STREAM, FIRST_HEAD, NUM_HEADS)


def check_which_are_dropped(device: str, whole: bool) -> None:
    """Values that are unit vectors show each probability in y, slopes that are show it in dv: 0 where dropped."""
    packed = Case(31, 31, 2, 2, 32, query_starts=(0, 14, 31))
    for case in (Case(33, 33, 2, 2, 34, batch=2), packed) if whole else (packed,):
        n, sides = case.queries, case.sides(device)
        q, k, _ = operands(case, torch.float32, device).values()
        unit = torch.eye(n, case.columns, device=device)[None, :, None].expand(q.shape)
        keep = keep_at(STREAM, DROPOUT.rows(q.transpose(1, 2)), 0, n, n)
        # With packed documents a column is a key's place in its document.
        places = torch.cat([torch.arange(keys.stop - keys.start) for _, keys in case.documents()])
        keep = keep[..., places.to(device)] & visible_by_definition(case).to(device)
        options = case.options._replace(rate=STREAM.rate, dropout=(*STREAM.numbers[1:], FIRST_HEAD, NUM_HEADS))
        # On the host plain sequences take another path than the operator.
        ways = (
            lambda q, k, v, sides=sides: attention(q, k, v, query_starts=sides.query_starts, dropout=DROPOUT),
            lambda q, k, v, sides=sides, options=options: attention_op(q, k, v, None, None, *sides, *options.packed)[0],
        )
        for way in ways:
            y, _, _, dv = outcome(way, unit, q, k, unit)
            assert torch.equal(y[..., :n].transpose(1, 2) != 0, keep)
            assert torch.equal(dv[..., :n].permute(0, 2, 3, 1) != 0, keep)


@pytest.mark.by_default("host", "gpu")
@every_rung_and_grid
def test_which_probabilities_are_dropped(rung: Rung, whole: bool) -> None:
    rung(check_which_are_dropped, whole)


def of_heads(heads: slice, window: int | None, dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """What a rank that holds these of the layer's 3 heads gets."""
    dropout = AttentionDropout(STREAM, heads.start, 3)
    dy, *own = (t[:, :, heads] for t in (dy, *inputs))
    return outcome(lambda q, k, v: attention(q, k, v, window=window, dropout=dropout), dy, *own)


def check_cut_over_heads(device: str, whole: bool) -> None:
    """A rank that holds some heads drops what one process would have dropped: equal bits in all of the outcome."""
    q, k, v = operands(Case(20, 20, 3, 3, 16, batch=1 + whole), torch.float32, device).values()
    dy = torch.randn(q.shape, generator=torch.Generator().manual_seed(5)).to(device)
    for window in (None, 9) if whole else (9,):
        first, others, every = (of_heads(slice(*ends), window, dy, q, k, v) for ends in ((0, 1), (1, 3), (0, 3)))
        for part, rest, whole in zip(first, others, every, strict=True):
            assert torch.equal(whole, torch.cat([part, rest], dim=2))


@pytest.mark.by_default("host", "gpu")
@every_rung_and_grid
def test_dropout_of_a_cut_over_heads(rung: Rung, whole: bool) -> None:
    rung(check_cut_over_heads, whole)


def check_strides(device: str, whole: bool) -> None:
    """Views of one tensor, heads first, one KV head for all, gaps between columns, slopes that are one number."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(2, 17, 4, 16, generator=generator).to(device).split([2, 1, 1], dim=2)
    k2, v2 = k.expand(q.shape), v.expand(q.shape)
    dy = torch.randn(q.shape, generator=generator).to(device)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (dy, q, k, v)]
    slopes = [torch.ones((), device=device).expand(q.shape), dy[..., :1].expand(q.shape), dy[:, :1].expand(q.shape)]
    views = [(dy, q, k, v), (dy, q, k2, v2), heads_first, [with_gaps(t) for t in (dy, q, k, v)]]
    views += [(slope, q, k, v) for slope in slopes]
    # A host's product of matrices may add in another order for another layout; a kernel adds in one.
    tolerance = {"rtol": 0.0, "atol": 0.0} if device == "cuda" else {}
    # A part: views of one tensor, and a slope that is one number.
    for i, given in enumerate(views if whole else views[::4]):
        window = 9 if i % 2 else None
        copies = [t.clone(memory_format=torch.contiguous_format) for t in given]
        got, of_copies = (
            outcome(lambda q, k, v, window=window: attention(q, k, v, window=window), *ts) for ts in (given, copies)
        )
        assert got[0].is_contiguous()
        torch.testing.assert_close(got, of_copies, **tolerance)


@pytest.mark.by_default("host", "gpu")
@every_rung_and_grid
def test_any_strides(rung: Rung, whole: bool) -> None:
    rung(check_strides, whole)


def check_tables_and_starts_with_gaps(device: str) -> None:
    qkv = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(device)
    cos, sin = rope_tables(9, 16, device=device)
    starts = torch.tensor([0, 4, 9], device=device)
    dy = torch.ones(9, 32, device=device)
    apart = starts.repeat_interleave(2)[::2], with_gaps(cos), with_gaps(sin)
    dense, with_holes = (
        outcome(lambda qkv, given=given: attention_qkv(qkv, 2, 1, starts=given[0], cos=given[1], sin=given[2]), dy, qkv)
        for given in ((starts, cos, sin), apart)
    )
    assert all(map(torch.equal, dense, with_holes))


@every_rung
def test_tables_and_starts_with_gaps(rung: Rung) -> None:
    rung(check_tables_and_starts_with_gaps)


# Of 5 queries and 7 keys of 4 columns: what `check_op` and gradcheck run.
SMALL = {
    "causal": (Case(5, 7, 2, 1, 4, batch=2), False),
    "window": (Case(5, 7, 2, 1, 4, window=3, causal=False), False),
    "packed": (Case(7, 7, 2, 1, 4, query_starts=(0, 3, 3, 7)), True),
    "dropped": (Case(5, 5, 2, 2, 4, batch=2, dropped=True), True),
    "empty": (Case(0, 0, 2, 1, 4), False),
}
# By default the case with most in it, and the one with nothing.
small = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("packed", "empty") else pytest.mark.slow) for name in SMALL]
)


def small_problem(name: str, dtype: torch.dtype) -> tuple[Case, list[Tensor], Tables, Sides, Options]:
    case, rotated = SMALL[name]
    tables = Tables(*rope_tables(7, 4, dtype=dtype)) if rotated else Tables(None, None)
    options = case.options._replace(interleaved=name == "packed")
    return case, list(operands(case, dtype, "cpu").values()), tables, case.sides("cpu"), options


@small
def test_gradcheck_of_host_path_and_specification(name: str) -> None:
    case, inputs, tables, sides, options = small_problem(name, torch.float64)
    host = lambda q, k, v: attention_op(q, k, v, *tables, *sides, *options.packed)[0]  # noqa: E731
    specification = lambda q, k, v: attention_reference(q, k, v, tables, sides, options)  # noqa: E731
    torch.testing.assert_close(host(*inputs), specification(*inputs))
    if case.queries:
        assert torch.autograd.gradcheck(host, inputs)
        assert torch.autograd.gradcheck(specification, inputs)


@small
def test_opcheck(name: str) -> None:
    case, inputs, tables, sides, options = small_problem(name, torch.float32)
    torch.library.opcheck(attention_op, (*inputs, *tables, *sides, *options.packed))
    values = [t.detach() for t in inputs]
    y, lse = attention_op(*values, *tables, *sides, *options.packed)
    torch.library.opcheck(attention_backward_op, (y, *values, y, lse, *tables, *sides, *options.packed))
    if case.queries != case.keys:
        return
    qkv = torch.cat(values, dim=2).flatten(2).flatten(0, 1)
    rest = ([case.batch, case.heads, case.kv_heads], *tables, sides.query_starts, *options.packed)
    torch.library.opcheck(attention_qkv_op, (qkv.requires_grad_(), *rest))
    y, lse = attention_qkv_op(qkv.detach(), *rest)
    torch.library.opcheck(attention_qkv_backward_op, (y, qkv.detach(), y, lse, *rest))


def test_compiled_as_eager() -> None:
    qkv = torch.randn(2 * 8, 4 * 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cos, sin = rope_tables(16, 6)
    starts = torch.tensor([0, 3, 16])

    def plain(qkv: Tensor) -> Tensor:
        q, k, v = (2 * qkv).view(2, 8, 4, 6).split([2, 1, 1], dim=2)
        return attention(q, k, v)

    def rotated(qkv: Tensor) -> Tensor:
        return attention_qkv(2 * qkv, 2, 1, seq=8, cos=cos, sin=sin, window=3)

    def packed(qkv: Tensor) -> Tensor:
        return attention_qkv(2 * qkv, 2, 1, starts=starts, cos=cos, sin=sin, interleaved=True)

    for function in (plain, rotated, packed):
        eager, compiled = (
            outcome(f, torch.ones_like(function(qkv)), qkv)
            for f in (function, torch.compile(function, backend="aot_eager", fullgraph=True))
        )
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def compiled_for(batch: int, queries: int, keys: int, num_documents: int, seed: int) -> set[tuple[Any, ...]]:
    """What triton keeps compiled kernels by, of all that forward and backward would launch."""
    found = set()

    def look(kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = zip(kernel.params, arguments, strict=False)
        key = tuple(_specialization(value, param.do_not_specialize) for param, value in given)
        found.add((kernel.fn.__name__, key, tuple(options.items())))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, (k, v) = empty(batch, queries, 4, 64), empty(2, batch, keys, 2, 64)
    starts = empty(num_documents + 1, dtype=torch.int32) if num_documents else None
    options = Options(True, queries // 2 + 1, 0.1 * keys, False, 0.3, (seed, seed, seed, seed, seed % 5, 16 + seed % 5))
    problem = (Tables(None, None), Sides(starts, starts), options)
    with observed(Target("cuda", 90), look):
        y, lse = launch_attention(q, k, v, *problem)
        launch_attention_backward(y, q, k, v, y, lse, (q, k, v), *problem)
    return found


def by_tma(t: Tensor, target: str | int = 90, starts: Tensor | None = None) -> set[bool]:
    """Whether forward and backward read t[B, S, 6 heads, E] as q, k and v by TMA."""
    found = set()
    q, k, v = t.split([4, 1, 1], dim=2)
    problem = (Tables(None, None), Sides(starts, starts), Options(True, 0, 0.1, False, 0.0, ()))

    def look(*launch: Any) -> None:
        found.update({launch[-1]["BY_TMA"]} if "BY_TMA" in launch[-1] else {})

    with observed(Target("hip" if isinstance(target, str) else "cuda", target), look):
        y, lse = launch_attention(q, k, v, *problem)
        launch_attention_backward(y, q, k, v, y, lse, (q, k, v), *problem)
    return found


def test_what_is_read_by_tma() -> None:
    """16-bit rows that begin at multiples of 16 bytes, each once, of sequences that end where the tensor ends."""
    pytest.importorskip("triton")
    t = torch.empty(2, 64, 6, 80, dtype=torch.bfloat16, device="meta")
    assert by_tma(t) == by_tma(t, 100) == by_tma(t.transpose(1, 2).contiguous().transpose(1, 2)) == {True}
    one = t[:1].as_strided((1, 64, 6, 80), (7, 480, 80, 1))  # whose first stride says nothing
    assert by_tma(one) == {True}
    assert by_tma(t, 80) == by_tma(t, "gfx942") == by_tma(t.float()) == {False}
    assert by_tma(t[:1], starts=torch.empty(3, dtype=torch.int32, device="meta")) == {False}
    assert (
        by_tma(t[:, :1].expand(2, 64, 6, 80))
        == by_tma(t.flatten(2)[..., 4:].unflatten(2, (-1, 2))[:, :, :6])
        == {False}
    )


def _specialization(value: Any, is_left_alone: bool) -> Any:
    if not isinstance(value, int):
        return (value.dtype, value.storage_offset() * value.itemsize % 16) if isinstance(value, Tensor) else type(value)
    return "integer" if is_left_alone else (value == 1, value % 16 == 0)


@pytest.mark.parametrize("num_documents", [0, 3])
def test_nothing_is_compiled_again_for_other_lengths(num_documents: int) -> None:
    pytest.importorskip("triton")
    batches = (1, 1, 1) if num_documents else (1, 3, 4)
    sizes = zip(batches, (4096, 1, 777), (4096, 16, 1000), (num_documents, 1, 16), (0, 1, 2**31), strict=True)
    first, *others = (
        compiled_for(batch, queries, keys, min(num_documents, 1) * documents, seed)
        for batch, queries, keys, documents, seed in sizes
    )
    assert len(first) == 5 and {name for name, *_ in first} >= {"_attention_kernel", "gradient_kernel"}
    assert others == [first, first]


Q, KV = torch.ones(1, 6, 4, 8), torch.ones(1, 6, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q[0]}, r"takes q\[B, S, H, E\].* got q \(6, 4, 8\) torch.float32, .*: reshape or convert them"),
        ({"q": Q.half()}, "of one floating-point dtype.* got q .* torch.float16, k .* torch.float32"),
        ({"q": Q.long(), "k": KV.long(), "v": KV.long()}, "of one floating-point dtype"),
        ({"v": KV[:, 1:]}, r"v \(1, 5, 2, 8\)"),
        ({"q": Q.expand(3, 6, 4, 8)}, r"q \(3, 6, 4, 8\)"),
        ({"q": Q[:, :, :3]}, r"H a multiple of G: got q \(1, 6, 3, 8\) .*, k \(1, 6, 2, 8\)"),
        ({"k": KV[:, :, :0], "v": KV[:, :, :0]}, r"H a multiple of G: .* k \(1, 6, 0, 8\)"),
        ({"q": Q[..., :7], "k": KV[..., :7], "v": KV[..., :7]}, "even and at most 256: got 7: pad .* to 8"),
        ({name: torch.ones(1, 2, 1, 258) for name in "qkv"}, "at most 256: got 258: .* use more heads"),
        ({"window": 0}, "must hold a query's own key: got 0: use 1 or more, or None"),
        ({"query_starts": torch.tensor([0, 3, 5])}, r"from 0 to 6, .* got \[0, 3, 5\] torch.int64 on cpu: pack"),
        ({"query_starts": torch.tensor([1, 6])}, r"got \[1, 6\]"),
        ({"query_starts": torch.tensor([0, 4, 3, 6])}, r"got \[0, 4, 3, 6\]"),
        ({"query_starts": torch.tensor([0.0, 6.0])}, "int32 or int64 on cpu: got .* torch.float32"),
        ({"query_starts": torch.tensor([0])}, r"got \[0\]"),
        ({"query_starts": torch.tensor([0, 6], device="meta")}, r"on cpu: got \(2,\) torch.int64 on meta"),
        ({"key_starts": torch.tensor([0, 6])}, "packed alike: query_starts and key_starts have 0 and 2 entries"),
        ({"query_starts": torch.tensor([0, 6]), "key_starts": torch.tensor([0, 2, 6])}, "have 2 and 3 entries"),
        (
            {"q": Q.expand(2, 6, 4, 8), "k": KV.expand(2, 6, 2, 8), "v": KV.expand(2, 6, 2, 8)}
            | {"query_starts": torch.tensor([0, 6])},
            "of one sequence's documents.* pack the batch into one sequence",
        ),
        ({"scale": 0.0}, "above 0 and finite: got 0.0: negate q"),
        ({"scale": -1.0}, "got -1.0"),
        ({"scale": float("inf")}, "got inf"),
        ({"dropout": AttentionDropout(STREAM, 5, 8)}, "some of the layer's 8: .* has 4 from 5 on"),
        ({"dropout": AttentionDropout(STREAM, -1, 8), "window": 2}, "some of the layer's 8: .* has 4 from -1 on"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**{"q": Q, "k": KV, "v": KV, **arguments})


COS, SIN = rope_tables(6, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"qkv": torch.ones(6, 4, 4)}, r"\[T, \(H \+ 2G\) \* E\]: got \(6, 4, 4\), H 2, G 1: pass this rank's"),
        ({"num_heads": 3}, "H 3, G 1"),
        ({"num_kv_heads": 0}, "H 2, G 0"),
        ({"qkv": torch.ones(6, 20)}, "even and at most 256: got 5: pad .* to 6"),
        ({"seq": 4}, "whole sequences, .* 6 tokens, seq 4: use seq 6"),
        ({"seq": 3, "starts": torch.tensor([0, 6])}, "one where documents are packed: 6 tokens, seq 3: use seq 6"),
        ({"starts": torch.tensor([0, 5])}, r"starts must be cumulative .* from 0 to 6.* got \[0, 5\]"),
        ({"window": -1}, "got -1"),
        ({"scale": float("nan")}, "above 0 and finite: got nan"),
        ({"cos": COS}, r"must both be constants \[positions, 2\] .*, None\]: use rope.rope_tables"),
        ({"sin": SIN}, "must both be"),
        ({"cos": COS[:, :1], "sin": SIN[:, :1]}, r"got \[\(\(6, 1\), torch.float32\)"),
        ({"cos": COS.double(), "sin": SIN.double()}, "of torch.float32: got .*torch.float64"),
        ({"cos": COS, "sin": SIN[:3]}, r"got \[\(\(6, 2\), torch.float32\), \(\(3, 2\), torch.float32\)\]"),
        ({"cos": COS.clone().requires_grad_(), "sin": SIN}, "constants"),
        ({"cos": COS[:5], "sin": SIN[:5]}, "5 rows, a sequence or document of 6: make longer tables"),
        ({"cos": COS[:3], "sin": SIN[:3], "starts": torch.tensor([0, 2, 6])}, "3 rows, .* of 4"),
        ({"dropout": AttentionDropout(STREAM, 7, 8)}, "has 2 from 7 on"),
    ],
)
def test_qkv_that_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_qkv(**{"qkv": torch.ones(6, 16), "num_heads": 2, "num_kv_heads": 1, **arguments})


def test_longer_tables_than_documents_are_enough() -> None:
    """Tables need a row for each position of the longest document, not of all documents together."""
    qkv = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 2, 6])
    y, whole = (attention_qkv(qkv, 2, 1, starts=starts, cos=COS[:n], sin=SIN[:n]) for n in (4, 6))
    assert torch.equal(y, whole)


def check_windows_beyond_all_keys(device: str, whole: bool) -> None:
    """Equal bits with no window at all, also of a window that 32 bits hold only just, or do not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(1, 33, 2, 16, generator=generator).to(device).requires_grad_() for _ in range(4))
    for causal in (True, False) if whole else (True,):
        outcomes = []
        for window in (66, 2**31 - 1, 2**40) if whole else (66, 2**40):
            y = attention(q, k, v, causal=causal, window=window)
            outcomes.append((y, *torch.autograd.grad(y, (q, k, v), dy)))
        want = attention(q, k, v, causal=causal, scale=0.2500000001)  # not the blocks of the plain host path
        torch.testing.assert_close(outcomes[0][0], want)
        for other in outcomes[1:]:
            assert all(torch.equal(got, first) for got, first in zip(other, outcomes[0], strict=True))


@pytest.mark.by_default("host", "gpu")
@every_rung_and_grid
def test_windows_beyond_all_keys(rung: Rung, whole: bool) -> None:
    rung(check_windows_beyond_all_keys, whole)


def test_behind_the_conversion_of_its_inputs_autocast_changes_nothing() -> None:
    """Scores and sums stay in float32: in a region of another dtype they would be rounded to it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(1, 40, 2, 16, generator=generator).bfloat16().requires_grad_() for _ in range(4))
    outcomes = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = attention(q, k, v, window=20)
            outcomes.append((y, *torch.autograd.grad(y, (q, k, v), dy)))
    assert all(torch.equal(got, want) for got, want in zip(*outcomes, strict=True))


def check_softmax_is_in_float32(device: str, dtype: torch.dtype) -> None:
    """y is at most twice as wrong as one whose scores and softmax are float32, and only its probabilities `dtype`.

    Scores of some 30 rounded to 16 bits would be wrong by a hundredth or more, and the probabilities with them.
    """
    largest = torch.zeros(3, dtype=torch.float64)
    for seed in range(2 if INTERPRETED else 8):  # interpreted, a draw takes seconds
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 130, 2, 64, generator=generator).to(device, dtype) for _ in range(3))
        heads = [t.double().transpose(1, 2) for t in (2 * q, 2 * k, v)]
        exact = (heads[0] @ heads[1].mT / 8).softmax(-1) @ heads[2]
        wide = [t.float() for t in heads]
        p = (wide[0] @ wide[1].mT / 8).softmax(-1)
        careful = (p.to(dtype) @ heads[2].to(dtype)).double()
        careless = (heads[0].to(dtype) @ heads[1].to(dtype).mT / 8).softmax(-1) @ heads[2].to(dtype)
        got = attention(2 * q, 2 * k, v, causal=False).transpose(1, 2)
        errors = [float((y.double() - exact).abs().max()) for y in (got, careful, careless)]
        largest = largest.maximum(torch.tensor(errors, dtype=torch.float64))
    error, allowed, without = largest.tolist()
    assert error <= 2 * allowed < without, (error, allowed, without)


@every_rung_and_dtype
def test_softmax_is_in_float32(rung: Rung, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        rung(check_softmax_is_in_float32, dtype)
