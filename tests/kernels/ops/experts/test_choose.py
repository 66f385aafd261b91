"""Rung: host, interpreter, GPU. The choice of experts against its specification in float64, ties, NaN, equal bits.

Only a GPU shows the compiled kernels' numbers, and its own exp.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CountMutations
from support.kernels.compiled import CACHE_VARIABLE, modules_of
from support.kernels.precision import check_errors, unwritten_is_nan
from support.kernels.routing_cases import ROUTINGS
from support.kernels.rungs import Rung, every_rung, every_rung_and_grid
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.launch import INTERPRETED
from tpkernels.ops.experts.choose import (
    ChoiceRule,
    check_choice,
    choose,
    choose_backward,
    choose_backward_op,
    choose_forward,
    choose_op,
    choose_reference,
)

RULES = {
    "softmax": ChoiceRule(4),
    "softmax, normalised": ChoiceRule(4, normalize=True),
    "softmax, groups": ChoiceRule(3, scale=2.5, num_groups=4, top_groups=2),
    "sigmoid": ChoiceRule(4, "sigmoid"),
    "sigmoid, normalised": ChoiceRule(4, "sigmoid", True, 2.5),
    "sigmoid, groups": ChoiceRule(4, "sigmoid", True, 2.5, 4, 2),
}
ALL = slice(None)
# Tokens, experts, k: of those, what fits a rule's groups.
SIZES = [(0, 8, 4), (1, 8, 1), (37, 12, 3), (70, 60, 8), (300, 128, 8)]
PART = [(0, 8, 4), (37, 12, 3)]
# Interpreted, a program takes 20 ms, and 4,096 tokens of 128 experts are 512 programs: of one rule and routing.
LARGE = [(4096, 128, 8)]
INTERPRETED_SIZES = [(1, 1, 1), (20, 2, 2), (100, 128, 8)]
WHOLE = [(t, e, k) for t in (0, 1, 100, 4096) for e in (1, 2, 8, 60, 128) for k in (1, 2, 5, 8) if k <= e]


def fitted(rule: ChoiceRule, experts: int, k: int) -> ChoiceRule:
    """The rule for these sizes, without groups that do not fit."""
    grouped = (
        rule.num_groups > 1 and experts % rule.num_groups == 0 and experts // rule.num_groups >= max(2, -(-k // 2))
    )
    return rule._replace(k=k) if grouped else rule._replace(k=k, num_groups=1, top_groups=1)


def drawn_bias(experts: int, seed: int) -> Tensor:
    return torch.randn(experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 10


def outcome(function: Callable[..., tuple[Tensor, ...]], logits: Tensor, *rest: object) -> list[Tensor]:
    """Experts, weights, counts, and dlogits for given dweights; whatever is not written is NaN."""
    leaf = logits.detach().requires_grad_()
    with unwritten_is_nan():
        experts, weights, counts = function(leaf, *rest)
        slopes = torch.linspace(-1, 2, weights.numel(), dtype=weights.dtype, device=weights.device)
        (dlogits,) = torch.autograd.grad(weights, leaf, slopes.view(weights.shape))
    return [experts, weights.detach(), counts, dlogits]


def check_against_the_specification(device: str, sizes: list[tuple[int, int, int]]) -> None:
    for tokens, num_experts, k in sizes:
        for seed, (name, rule) in enumerate(RULES.items()):
            if sizes == LARGE and name != "softmax, normalised":
                continue
            # Interpreted, a launch takes 40 ms: each routing once.
            for routing in [[*ROUTINGS][seed % 5]] if INTERPRETED and sizes != INTERPRETED_SIZES else [*ROUTINGS]:
                logits = ROUTINGS[routing](tokens, num_experts, seed).to(device)
                rule = fitted(rule, num_experts, k)
                bias = drawn_bias(num_experts, seed).to(device) if "groups" in name else None
                what = f"{name}, {routing}, {tokens, num_experts, k}"
                want = outcome(choose_reference, logits, bias, rule)
                got = outcome(lambda z, b, rule: choose(z, bias=b, **rule._asdict()), logits, bias, rule)
                assert got[0].dtype == got[2].dtype == torch.int32 and got[1].dtype == torch.float64
                assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2]), what
                for a, b in ((got[1], want[1]), (got[3], want[3])):
                    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=what)


@every_rung_and_grid
def test_as_specified_in_float64(rung: Rung, whole: bool) -> None:
    rung(check_against_the_specification, SIZES if whole else PART)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rung", "sizes"),
    [("host", WHOLE), ("interpreter", INTERPRETED_SIZES), ("interpreter", LARGE)],
    indirect=["rung"],
    ids=["host", "interpreter", "interpreter-large"],
)
def test_all_sizes_are_as_specified(rung: Rung, sizes: list[tuple[int, int, int]]) -> None:
    rung(check_against_the_specification, sizes)


def check_errors_in_float32(device: str) -> None:
    """Of float32; 16 bits are computed in float32."""
    for name, rule in RULES.items():

        def draw(seed: int) -> dict[str, Tensor]:
            return {"logits": ROUTINGS["uniform"](50, 16, seed).to(device, torch.float32).requires_grad_()}

        def weights(logits: Tensor, rule: ChoiceRule = rule) -> Tensor:
            return choose(logits, **rule._asdict()).weights

        def by_specification(logits: Tensor, rule: ChoiceRule = rule) -> Tensor:
            return choose_reference(logits, None, rule).weights

        check_errors(name, weights, by_specification, draw, draws=2 if INTERPRETED else 8)
        half = draw(0)["logits"].half()
        pair = [choose(logits, **rule._asdict()) for logits in (half, half.float())]
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True)) and pair[0].weights.dtype == torch.float32


@every_rung
def test_errors_are_at_most_twice_torchs(rung: Rung) -> None:
    rung(check_errors_in_float32)


def check_ties(device: str) -> None:
    """Equal scores go to the lower expert, equal groups to the lower group, on either side of the last choice."""
    equal = torch.zeros(3, 12, device=device)
    for scoring in ("softmax", "sigmoid"):
        for k in (1, 5, 12):
            experts = choose(equal, k, scoring=scoring).experts
            assert torch.equal(experts.cpu(), torch.arange(k, dtype=torch.int32).expand(3, k))
        grouped = choose(equal, 5, scoring=scoring, num_groups=4, top_groups=2).experts
        assert torch.equal(grouped.cpu(), torch.arange(5, dtype=torch.int32).expand(3, 5))
    some = torch.tensor([[0.0, 1, 0, 2, 1, 1, 0, 2]], device=device)
    assert choose(some, 4).experts.tolist() == [[3, 7, 1, 4]]
    # Group 1 and group 2 tie behind group 3.
    by_group = torch.tensor([[0.0, 1, 2, 1, 1, 2, 3, 0]], device=device)
    assert choose(by_group, 3, num_groups=4, top_groups=2).experts.tolist() == [[6, 2, 3]]
    # The bias decides whom, not with which weight.
    bias = torch.tensor([0.0, 0, 0, -1, 0, 0, 0, -1], device=device)
    chosen = choose(some, 2, bias=bias, scoring="sigmoid")
    assert chosen.experts.tolist() == [[1, 4]]
    torch.testing.assert_close(chosen.weights, torch.ones(1, 2, device=device).sigmoid())


@every_rung
def test_ties_go_to_the_lower_expert(rung: Rung) -> None:
    rung(check_ties)


def ties_are_noticed(directory: str) -> list[str]:
    """Ties by another order than that of experts: which changes check_ties does not notice, on host and interpreted."""
    module: Any = importlib.import_module("tpkernels.ops.experts.choose")
    kernels: Any = importlib.import_module("tpkernels.ops.experts.choose_kernel")

    def last(keys: Tensor, k: int) -> Tensor:
        return keys.shape[1] - 1 - keys.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :k]

    def by_launch(rest: str) -> Any:
        source, old = Path(kernels.__file__).read_text(), "tl.min(tl.where(m_largest, o_column[None, :], 2147483647)"
        assert source.count(old) == 1
        return modules_of({"choose": source.replace(old, rest)})["choose"].launch_choose

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, directory)
        if INTERPRETED:
            changes = {
                "launch_choose": {
                    "the last": by_launch("tl.max(tl.where(m_largest, o_column[None, :], -1)"),
                    "whichever comes first from the middle": by_launch(
                        "tl.min(tl.where(m_largest, (o_column[None, :] + 2) % 8, 2147483647)"
                    ),
                }
            }
        else:
            any_of = {"the last": last, "whatever topk takes": lambda keys, k: keys.topk(k, dim=1).indices}
            changes = {"_best": any_of}
        unnoticed = []
        for function, each in changes.items():
            for name, change in each.items():
                with pytest.MonkeyPatch.context() as inner:
                    inner.setattr(module, function, change)
                    try:
                        check_ties("cpu")
                    except AssertionError:
                        continue
                    unnoticed.append(name)
    return unnoticed


def test_ties_by_another_order_are_noticed(
    interpreters: RankPool, count_mutations: CountMutations, tmp_path: Path
) -> None:
    unnoticed = [*ties_are_noticed(str(tmp_path)), *interpreters.run(ties_are_noticed, 1, str(tmp_path))[0]]
    count_mutations("ties of scores", 4 - len(unnoticed), 4)
    assert not unnoticed


def check_nan(device: str) -> None:
    """The choice stays inside, each expert once, as the specification has it; a NaN becomes a weight."""
    for rule in RULES.values():
        for what in ("one", "row", "all", "infinity"):
            logits = ROUTINGS["uniform"](20, 12, 0).to(device)
            if what == "infinity":
                logits[3] = torch.inf
                logits[5] = -torch.inf
            else:
                rows, columns = {"one": (slice(3, 4), slice(7, 8)), "row": (slice(3, 4), ALL), "all": (ALL, ALL)}[what]
                logits[rows, columns] = torch.nan
            for bias in (None,) if INTERPRETED else (None, drawn_bias(12, 0).to(device)):
                chosen = choose_forward(logits, bias, rule)
                want = choose_reference(logits, bias, rule)
                assert chosen.experts.min() >= 0 and chosen.experts.max() < 12
                assert all(len(set(row)) == rule.k for row in chosen.experts.tolist())
                assert torch.equal(chosen.experts, want.experts) and torch.equal(chosen.counts, want.counts)
                torch.testing.assert_close(chosen.weights, want.weights, equal_nan=True)
                is_bad = chosen.weights.isnan().any(1)
                if what != "infinity":
                    assert torch.equal(is_bad, logits.isnan().any(1))


@every_rung
def test_nan_stays_inside_and_is_seen(rung: Rung) -> None:
    rung(check_nan)


def check_independence(device: str, dtype: torch.dtype) -> None:
    """Any tokens alone have the bits that they have among others, forward and backward, and again the same."""
    # A program has 16 tokens of 60 experts.
    for num_experts in (60,) if INTERPRETED else (3, 8, 60):
        for name, rule in RULES.items():
            rule = fitted(rule, num_experts, min(rule.k, num_experts))
            logits = (3 * ROUTINGS["uniform"](40, num_experts, 0)).to(device, dtype)
            bias = drawn_bias(num_experts, 0).to(device, dtype)
            dweights = ROUTINGS["uniform"](40, rule.k, 1).to(device, dtype)

            def both(
                some: slice,
                logits: Tensor = logits,
                bias: Tensor = bias,
                rule: ChoiceRule = rule,
                dweights: Tensor = dweights,
            ) -> list[Tensor]:
                chosen = choose_forward(logits[some], bias, rule)
                return [*chosen[:2], choose_backward(dweights[some], logits[some], *chosen[:2], rule)]

            whole = both(slice(None))
            for first, end in ((0, 40), (35, 36), (0, 33))[INTERPRETED:]:
                for a, b in zip(both(slice(first, end)), whole, strict=True):
                    assert torch.equal(a, b[first:end]), (name, num_experts, first, end)


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        ("host", torch.float32),
        ("host", torch.float64),
        ("interpreter", torch.float32),
        pytest.param("interpreter", torch.float64, marks=pytest.mark.slow),
        ("gpu", torch.float32),
    ],
    indirect=["rung"],
)
def test_a_tokens_bits_do_not_depend_on_the_others(rung: Rung, dtype: torch.dtype) -> None:
    rung(check_independence, dtype)


@pytest.mark.parametrize("name", RULES)
def test_gradcheck(name: str) -> None:
    logits = ROUTINGS["uniform"](5, 12, 0).requires_grad_()
    rule, bias = RULES[name], drawn_bias(12, 0)
    assert torch.autograd.gradcheck(lambda z: choose(z, bias=bias, **rule._asdict()).weights, logits)


@pytest.mark.parametrize("tokens", [5, pytest.param(0, marks=pytest.mark.slow)])
def test_opcheck(tokens: int) -> None:
    logits, bias = ROUTINGS["uniform"](tokens, 12, 0).float(), drawn_bias(12, 0).float()
    torch.library.opcheck(choose_op, (logits.clone().requires_grad_(), bias, *RULES["sigmoid, groups"]))
    rule = RULES["softmax"]
    experts, weights, _ = choose_forward(logits, None, rule)
    torch.library.opcheck(choose_backward_op, (weights, logits, experts, weights, *rule[1:4]))


@pytest.mark.parametrize(
    ("rule", "bias", "message"),
    [
        (ChoiceRule(9), None, "k is 9, E 8: pass a k of at most 8"),
        (ChoiceRule(0), None, "1 <= k <= E"),
        (ChoiceRule(2, "relu"), None, "scoring is 'relu', scale 1.0: pass one of these"),
        (ChoiceRule(2, scale=0.0), None, "a finite scale above 0: .* scale 0.0"),
        (ChoiceRule(2, num_groups=3), None, "8 experts in 3 groups: pass a num_groups that divides 8"),
        (ChoiceRule(2, num_groups=8), None, "at least two: 8 experts in 8 groups"),
        (ChoiceRule(3, num_groups=4, top_groups=1), None, "k is 3, top_groups 1 of 4 groups of 2: .* from 2 to 4"),
        (ChoiceRule(2, num_groups=2, top_groups=3), None, "top_groups 3 of 2 groups of 4: .* from 1 to 2"),
        (ChoiceRule(2), torch.ones(7), r"bias is \(7,\) torch.float32, experts are 8: pass bias\[8\]"),
        (ChoiceRule(2), torch.ones(8).int(), "a floating-point number per expert"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule: ChoiceRule, bias: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_choice(8, bias, rule)


@pytest.mark.parametrize("logits", [torch.ones(3), torch.ones(3, 4).int()])
def test_logits_that_are_no_matrix_are_refused(logits: Tensor) -> None:
    with pytest.raises(ValueError, match=r"choose takes logits\[T, E\] of floating-point numbers: they are \(3"):
        choose(logits, 1)
