"""Rung: host, interpreter, GPU. Learning-rate schedule, clipping, and AdamW with and without masters."""

from __future__ import annotations

import pytest
import torch
from support.kernels.rungs import Rung
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw
from tpkernels.launch import by_triton

from tpengine.config import OptimConfig
from tpengine.training.clipping import clip_
from tpengine.training.gradient_norm import squares_of_blocks
from tpengine.training.learning_rate import learning_rate
from tpengine.training.optimizer import AdamW


def test_learning_rate_warms_up_and_ends_at_the_minimum() -> None:
    config = OptimConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 20) for step in range(20)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[19] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=0), 0, 1) == 1.0


def test_clipping_matches_torch() -> None:
    torch.manual_seed(0)
    for max_norm in (0.1, 1e6, 0.0):
        ours = [torch.randn(5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
        theirs = [Parameter(g.clone()) for g in ours]
        for p in theirs:
            p.grad = p.detach().clone()
        norm = torch.cat([squares_of_blocks(gradient) for gradient in ours]).sum().sqrt()
        clip_(ours, norm, max_norm)
        want = torch.nn.utils.clip_grad_norm_(theirs, max_norm if max_norm else 1e300)
        assert norm.item() == pytest.approx(want.item(), rel=1e-14)
        for mine, other in zip(ours, theirs, strict=True):
            # torch adds 1e-6 to the norm it divides by
            torch.testing.assert_close(mine, other.grad, rtol=2e-6, atol=0)


def test_masters_follow_float32_and_are_rounded_into_bfloat16() -> None:
    torch.manual_seed(0)
    start = torch.randn(64).bfloat16()
    narrow, wide = {"w": Parameter(start.clone())}, {"w": Parameter(start.float())}
    gradients = {"w": torch.zeros(64)}
    config = OptimConfig(lr=1e-3)
    narrow_optim, wide_optim = (AdamW(p, gradients, {"w": (1.0, 0.1)}, config) for p in (narrow, wide))
    for update in range(1, 21):
        gradients["w"].normal_()
        narrow_optim.step(1e-3, update)
        wide_optim.step(1e-3, update)
    assert torch.equal(narrow["w"], wide["w"].bfloat16())
    assert torch.equal(narrow_optim.masters["w"], wide["w"])


def test_each_parameter_has_its_own_decay() -> None:
    parameters = {name: Parameter(torch.ones(2)) for name in ("matrix", "norm")}
    gradients = {name: torch.zeros(2) for name in parameters}
    AdamW(parameters, gradients, {"matrix": (1.0, 0.5), "norm": (1.0, 0.0)}, OptimConfig()).step(0.1, 1)
    assert parameters["norm"].tolist() == [1, 1]
    torch.testing.assert_close(parameters["matrix"].detach(), torch.full((2,), 0.95))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_skipped_step_changes_nothing_and_counts_as_none(dtype: torch.dtype) -> None:
    """Two optimizers, of which one also meets gradients that are not finite: they stay equal to the last bit."""
    torch.manual_seed(0)
    start, wide = torch.randn(33, 7).to(dtype), torch.promote_types(dtype, torch.float32)
    parameters = [{"w": Parameter(start.clone())} for _ in range(2)]
    gradients = [{"w": torch.zeros(33, 7, dtype=wide)} for _ in range(2)]
    one, other = (AdamW(p, g, {"w": (1.0, 0.1)}, OptimConfig()) for p, g in zip(parameters, gradients, strict=True))
    yes, no = torch.tensor(True), torch.tensor(False)

    def compare() -> None:
        assert torch.equal(parameters[0]["w"], parameters[1]["w"])
        assert torch.equal(one.masters["w"], other.masters["w"])
        for name, tensor in one.state_of("w").items():
            assert torch.equal(tensor, other.state_of("w")[name]), name

    for update, poison in enumerate((torch.nan, torch.inf), 1):
        gradients[1]["w"].fill_(poison)
        other.step(1e-2, update, yes)
        assert torch.equal(parameters[1]["w"], parameters[0]["w"])
        for both in gradients:
            both["w"].copy_(torch.arange(33 * 7.0).view(33, 7) / 100)
        one.step(1e-2, update)
        other.step(1e-2, update, no)
        compare()
    assert not torch.equal(parameters[0]["w"], start)


def updated_by_torch(state: list[Tensor], gradient: Tensor, factor: float, decay: float, update: int) -> None:
    """torch's fused AdamW on one tensor and its moments, with OptimConfig's settings and a rate of factor * 1e-2."""
    config, steps = OptimConfig(), torch.tensor(update - 1.0, device=gradient.device)
    given = {
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
        "weight_decay": decay,
        "lr": 1e-2 * factor,
    }
    master, exp_avg, exp_avg_sq = ([tensor] for tensor in state)
    adamw(master, [gradient], exp_avg, exp_avg_sq, [], [steps], fused=True, amsgrad=False, maximize=False, **given)


def check_at_once(device: str, dtype: torch.dtype) -> None:
    """Weights in the layouts that parameters have: steps, skipped steps, clipping and rounded copies are torch's."""
    torch.manual_seed(0)
    starts = {"matrix": torch.randn(33, 7), "transposed": torch.randn(7, 33).T, "vector": torch.randn(5)}
    starts["moved"] = torch.randn(3)
    starts = {name: start.to(device, dtype) for name, start in starts.items()}
    held = {name: Parameter(start.clone()) for name, start in starts.items()}
    wide = torch.promote_types(dtype, torch.float32)
    gradients = {name: torch.zeros_like(parameter, dtype=wide) for name, parameter in held.items()}
    # (factor of the rate, weight decay): two with the same, two with others.
    updates = {"matrix": (1.0, 0.1), "transposed": (1.0, 0.1), "vector": (0.5, 0.0), "moved": (1.0, 0.0)}
    ours = AdamW(held, gradients, updates, OptimConfig())
    torchs = {
        name: [start.to(wide), *(torch.zeros_like(start, dtype=wide) for _ in "mv")] for name, start in starts.items()
    }
    skip, applied = (torch.tensor(number, dtype=torch.float64, device=device) for number in (1, 0))
    factor = torch.tensor(0.3, dtype=torch.float64, device=device) if ours.reads_factor else None
    assert ours.reads_factor == by_triton(held["matrix"])
    for update in range(1, 5):
        # A step that is skipped changes nothing, whatever the gradients are.
        for gradient in gradients.values():
            gradient.fill_(torch.inf)
        before = {name: parameter.clone() for name, parameter in held.items()}
        ours.step(1e-2, update, skip, factor)
        assert all(torch.equal(before[name], parameter) for name, parameter in held.items())
        # A weight's memory may be another than in the step before.
        held["moved"].data = held["moved"].data.clone()
        for name, gradient in gradients.items():
            gradient.normal_()
            given = gradient * (1 if factor is None else factor.to(wide))
            updated_by_torch(torchs[name], given, *updates[name], update)
        ours.step(1e-2, update, applied, factor)
    for name, parameter in held.items():
        assert parameter.stride() == starts[name].stride()
        state = ours.state_of(name)
        master = state.get("master", parameter.detach())
        for tensor, right in zip((master, state["exp_avg"], state["exp_avg_sq"]), torchs[name], strict=True):
            torch.testing.assert_close(tensor, right, rtol=1e-6, atol=1e-7)
        assert torch.equal(parameter, master.to(dtype))


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        ("host", torch.bfloat16),
        ("interpreter", torch.float16),
        ("interpreter", torch.float32),
        ("gpu", torch.bfloat16),
        ("gpu", torch.float32),
    ],
    indirect=["rung"],
)
def test_all_weights_are_updated_at_once(rung: Rung, dtype: torch.dtype) -> None:
    """Interpreted and on a GPU all tensors are clipped, updated and rounded in one pass."""
    rung(check_at_once, dtype)
