"""Rung: pure, gloo ranks. The whole batch's valid targets divide a step's loss, and autocast stays as it was.

What only a GPU checks: counts that lie on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.modules import DataParallel, Pipeline
from tpengine.pipeline.executor import Trace

MICRO, ROWS, CLASSES, IGNORED = 3, 4, 5, -100
DTYPE = torch.float64


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def batch() -> tuple[Tensor, Tensor]:
    """Return the batch of 2 replicas; one micro-batch has no valid target, the others have 1 to 4."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * MICRO * ROWS, 6, dtype=DTYPE, generator=generator)
    targets = torch.randint(CLASSES, (2 * MICRO, ROWS), generator=generator)
    for number, row in enumerate(targets):
        row[: (0, 3, 4, 1, 2, 0)[number]] = IGNORED
    return inputs, targets.flatten()


def valid(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def summed_and_counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return summed(logits, targets), valid(targets)


def in_one_process(num_replicas: int) -> tuple[float, dict[str, Tensor]]:
    model = model_of()
    inputs, targets = (tensor[: num_replicas * MICRO * ROWS] for tensor in batch())
    loss = nn.functional.cross_entropy(model(inputs), targets, ignore_index=IGNORED)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(pp: int, dp: int, pairs: bool, counted: bool = True) -> tuple[float, float, list[float]]:
    """Error of this rank's gradients, error of the mean loss over replicas; losses of the replicas."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([replica * pp + stage for stage in range(pp)]) for replica in range(dp)]
    stages = [dist.new_group([replica * pp + stage for replica in range(dp)]) for stage in range(pp)]
    replica, stage = divmod(rank, pp)
    replicas = Communicator(stages[stage])
    pipe = Pipeline(
        model_of(),
        batch()[0][:ROWS],
        summed_and_counted if pairs else summed,
        num_micro_batches=MICRO,
        group=pipelines[replica],
        count=valid,
        replicas=replicas if counted else None,
    )
    data = DataParallel(pipe.stage, replicas)
    inputs, targets = (tensor.chunk(2)[replica] for tensor in batch())
    for _ in range(2):
        with data.no_sync():
            loss = pipe.step(inputs if pipe.is_first else None, targets if pipe.is_last else None)
        data.finish()
        gradients = {name: p.grad.clone() for name, p in pipe.stage.named_parameters() if p.grad is not None}
        pipe.stage.zero_grad()
    want_loss, want = in_one_process(dp)
    error = max(float((g - want[name]).abs().max() / want[name].abs().max()) for name, g in gradients.items())
    losses = replicas.all_gather(torch.tensor([loss], dtype=DTYPE)).tolist()
    return error, abs(sum(losses) / dp - want_loss), losses


@pytest.mark.parametrize(("pp", "dp", "pairs"), [(2, 1, True), (1, 2, False), (2, 2, True), (2, 2, False)])
def test_uneven_numbers_of_valid_targets_give_one_process_gradient(
    ranks: RankPool, pp: int, dp: int, pairs: bool
) -> None:
    outcomes = ranks.run(trained, pp * dp, pp, dp, pairs)
    for error, loss_error, losses in outcomes:
        assert error < 1e-12 and loss_error < 1e-12, outcomes
        assert losses == outcomes[0][2]


def test_replicas_that_are_not_counted_together_are_another_gradient(ranks: RankPool) -> None:
    """The comparison can fail: each replica divides by its own number."""
    assert min(error for error, _, _ in ranks.run(trained, 2, 1, 2, False, False)) > 1e-3


def mean_of_means(_: int) -> float:
    pipe = Pipeline(model_of(), batch()[0][:ROWS], nn.CrossEntropyLoss(), num_micro_batches=MICRO)
    inputs, targets = batch()
    return pipe.step(inputs[: MICRO * ROWS], targets[: MICRO * ROWS].clamp_min(0))


def test_a_mean_weighs_all_micro_batches_the_same(ranks: RankPool) -> None:
    inputs, targets = (tensor[: MICRO * ROWS] for tensor in batch())
    want = nn.functional.cross_entropy(model_of()(inputs), targets.clamp_min(0)).item()
    assert ranks.run(mean_of_means, 2, 0) == [pytest.approx(want, rel=1e-12)] * 2


def refused(what: str) -> str:
    inputs, targets = (tensor[: MICRO * ROWS] for tensor in batch())
    keywords: dict[str, Any] = {"count": valid}
    loss: Callable[[Tensor, Tensor], Any] = summed_and_counted
    match what:
        case "no count":
            keywords = {}
        case "no valid target":
            targets = torch.full_like(targets, IGNORED)
        case "count fails":
            keywords = {"count": lambda targets: [valid(targets), valid(targets)]}
        case "no scalar":
            keywords, loss = {}, nn.CrossEntropyLoss(reduction="none")
        case "no tensor":
            loss = lambda logits, targets: {"loss": summed(logits, targets)}  # noqa: E731
        case "loss fails":
            targets = targets.double()
        case "other numbers":
            keywords = {"count": len}
        case "replicas without count":
            keywords = {"replicas": Communicator(None)}
        case "count on one rank" if dist.get_rank() == 1:
            keywords = {}
    trace = Trace()
    try:
        pipe = Pipeline(model_of(), inputs[:ROWS], loss, num_micro_batches=MICRO, trace=trace, **keywords)
        pipe.step(inputs, targets)
    except ValueError as error:
        assert what == "other numbers" or not trace.events, "refused after the first pass"
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no count", "a loss that returns (sum, number of valid targets) is divided by their number"),
        ("no valid target", "a step needs at least one valid target: count says 0"),
        ("count fails", "count must return the number of valid targets: it failed on targets [4]"),
        ("no scalar", "loss must return a scalar: got shape [4]: return its mean"),
        ("no tensor", "loss must return a scalar: got dict: return its sum, or (sum, number of valid targets)"),
        ("loss fails", "the loss must take an output and its target: on float64[4,5] and [4] it fails"),
        ("other numbers", "loss and count must find the same valid targets: their numbers differ by 7"),
        ("replicas without count", "replicas need count, the number of valid targets: 1 replicas, no count"),
        ("count on one rank", "rank 1 has 'count none, 1 replicas' where rank 0 has 'count given, 1 replicas'"),
    ],
)
def test_mistakes_are_one_line_on_every_rank(ranks: RankPool, what: str, message: str) -> None:
    first, last = ranks.run(refused, 2, what)
    assert message in last and "\n" not in last, last
    assert message in first or first == "every rank's batch must fit: ranks [1] refused theirs: see their message"


def refused_elsewhere(_: int) -> str:
    """Two pipelines of one rank; one gets no batch that fits."""
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    pipe = Pipeline(
        model_of(),
        batch()[0][:ROWS],
        summed,
        num_micro_batches=MICRO,
        group=groups[rank],
        count=valid,
        replicas=Communicator(dist.group.WORLD),
    )
    inputs, targets = batch()
    with pytest.raises(ValueError) as error:
        pipe.step(inputs[: MICRO * ROWS - rank], targets[: MICRO * ROWS])
    return str(error.value)


def test_a_batch_refused_in_one_replica_stops_the_others(ranks: RankPool) -> None:
    first, second = ranks.run(refused_elsewhere, 2, 0)
    assert first == "every replica's batch must fit: another replica refused its own: see its message"
    assert "inputs must hold num_micro_batches times the sample's rows" in second


def miscounted_elsewhere(_: int) -> str:
    """Two pipelines of one rank; the loss of one finds other targets than `count`."""
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    replicas = Communicator(dist.group.WORLD)
    inputs, targets = (tensor[: MICRO * ROWS] for tensor in batch())
    pipe = Pipeline(
        model_of(),
        inputs[:ROWS],
        lambda logits, targets: (summed(logits, targets), valid(targets) + rank),
        num_micro_batches=MICRO,
        group=groups[rank],
        count=valid,
        replicas=replicas,
    )
    data = DataParallel(pipe.stage, replicas)
    try:
        with data.no_sync():
            pipe.step(inputs, targets)
        data.finish()
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_loss_that_counts_otherwise_in_one_replica_stops_all(ranks: RankPool) -> None:
    for said in ranks.run(miscounted_elsewhere, 2, 0):
        assert said.startswith("loss and count must find the same valid targets: their numbers differ by 3 over")


def under_autocast(constructed: bool, stepped: str) -> str:
    """Train and evaluate, with autocast at construction or not, and where rank `stepped` names it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    x = torch.randn(8, 6)
    is_on = stepped in ("all", str(dist.get_rank()))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=constructed):
        pipe = Pipeline(
            model, x[:2], lambda y, t: nn.functional.mse_loss(y.float(), t), num_micro_batches=4, cut=[1, 2]
        )
    said = []
    for call in (lambda: pipe.step(x, x[:, :1]), lambda: pipe.forward(x)):
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
                call()
        except ValueError as error:
            said.append(str(error))
    assert len(set(said)) <= 1
    gradients = [p.grad is not None and bool(p.grad.isfinite().all()) for p in pipe.stage.parameters()]
    return said[0] if said else f"trained: {all(gradients)}"


def test_autocast_at_steps_alone_or_at_construction_alone_is_refused_before_anything_runs(ranks: RankPool) -> None:
    now = "autocast must be as it was when the pipeline was made: then off, now torch.bfloat16: construct"
    assert all(now in said for said in ranks.run(under_autocast, 2, False, "all"))
    then = "then torch.bfloat16, now off"
    assert all(then in said for said in ranks.run(under_autocast, 2, True, "none"))
    first, second = ranks.run(under_autocast, 2, False, "1")
    assert first.endswith("ranks [1] refused theirs: see their message") and now in second


def test_autocast_around_construction_and_steps_works(ranks: RankPool) -> None:
    assert ranks.run(under_autocast, 2, True, "all") == ["trained: True"] * 2
    assert ranks.run(under_autocast, 2, False, "none") == ["trained: True"] * 2
