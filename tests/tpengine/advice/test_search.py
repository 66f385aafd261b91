"""Rung: pure. Advice against a search that leaves nothing out; bounds against plans; what must not be slower."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from tpengine.advice.bounds import Bounds
from tpengine.advice.candidates import Candidate, candidates, shapes
from tpengine.advice.question import Question
from tpengine.advice.search import search
from tpengine.advice.sheet import Sheet, estimate
from tpengine.commands.arguments import parse_config
from tpengine.config import Config, ModelConfig, TrainConfig
from tpengine.simulate.machine import MACHINES, Machine

LARGE = ModelConfig(hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_size=8192, vocab_size=32768)


def question_of(
    num_ranks: int, batch: int, machine: Machine = MACHINES["h200"], model: ModelConfig = LARGE, **fixed: Any
) -> Question:
    base = Config(model=model, train=TrainConfig(seq_len=2048, dtype="bfloat16"))
    return Question(base, machine, num_ranks, batch, fixed)


def every(question: Question) -> list[Candidate]:
    return [layout for shape in shapes(question) for layout in candidates(question, shape)]


def simulated(layout: Candidate, question: Question) -> tuple[float, float] | None:
    """Step and peak of the plan that would run; None where no run is legal."""
    try:
        sheet = Sheet.of(layout.config(question), question.machine)
    except ValueError:
        return None
    return sheet.seconds, sheet.peak_bytes


@pytest.mark.parametrize(
    "question",
    [
        question_of(2, 8),
        question_of(4, 8, replace(MACHINES["h200"], memory_bytes=12_000_000_000), schedule="1f1b"),
        pytest.param(question_of(4, 16, MACHINES["a100-40"]), marks=pytest.mark.slow),
        pytest.param(question_of(8, 16, replace(MACHINES["h200"], ranks_per_node=2), zero=1), marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks, little memory", "4 of 40 GB", "8 on 4 nodes"],
)
def test_nothing_is_faster_than_the_first_row(question: Question) -> None:
    found = search(question, num_rows=3, limit_seconds=1e9)
    assert found.gap is None and found.rows
    layouts = every(question)
    assert found.num_layouts == len(layouts) and found.num_simulated < len(layouts) / 4
    bounds = Bounds(question)
    assert found.num_fitting == sum(bounds.num_bytes(layout) <= question.memory_limit for layout in layouts)
    steps = {layout: simulated(layout, question) for layout in layouts}
    fitting = {layout: step[0] for layout, step in steps.items() if step and step[1] <= question.memory_limit}
    # The order is that of plans with few micro-batches, whose last reductions are a little less hidden.
    assert found.rows[0].sheet.seconds <= 1.01 * min(fitting.values())
    families: dict[tuple[int, int, int], float] = {}
    for layout, seconds in fitting.items():
        families[layout.family] = min(seconds, families.get(layout.family, seconds))
    for row, best in zip(found.rows, sorted(families.values()), strict=False):
        assert row.sheet.seconds <= 1.01 * best
        assert row.sheet.seconds == fitting[row.layout]


def drawn(number: int) -> tuple[Candidate, Question]:
    """Draw a model, a machine and one of its layouts."""
    rng = random.Random(number)
    heads = rng.choice([4, 8, 16])
    model = ModelConfig(
        hidden_size=heads * rng.choice([32, 64, 128]),
        num_layers=rng.randint(1, 12),
        num_heads=heads,
        num_kv_heads=rng.choice([1, 2, 4]),
        ffn_size=128 * rng.randint(2, 32),
        vocab_size=rng.choice([256, 5000, 50000]),
        tie_embeddings=rng.random() < 0.3,
    )
    machine = replace(MACHINES[rng.choice(list(MACHINES))], ranks_per_node=rng.choice([2, 8]))
    train = TrainConfig(seq_len=rng.choice([64, 256, 1024]), dtype=rng.choice(["float32", "bfloat16"]))
    question = Question(Config(model=model, train=train), machine, rng.choice([1, 2, 4, 8]), rng.choice([1, 8, 16, 24]))
    chosen = list(shapes(question))
    if not chosen:
        return drawn(number + 1_000_000)
    return rng.choice(list(candidates(question, rng.choice(chosen)))), question


@pytest.mark.parametrize(
    "numbers", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_bounds_and_estimates_of_drawn_layouts(numbers: range) -> None:
    """A bound is never above the plan's figures; parts add up; an estimate is near."""
    tried = 0
    for number in numbers:
        layout, question = drawn(number)
        try:
            sheet = Sheet.of(layout.config(question), question.machine)
        except ValueError:
            continue
        tried += 1
        bounds = Bounds(question)
        assert bounds.seconds(layout) <= sheet.seconds * (1 + 1e-9), (number, layout)
        assert bounds.num_bytes(layout) <= sheet.peak_bytes, (number, layout)
        assert bounds.least_seconds(layout.tp, layout.pp, layout.dp, layout.micro_batch_size) <= sheet.seconds
        assert sheet.parts.step == pytest.approx(sheet.seconds, rel=1e-6)
        assert estimate(layout, question).seconds == pytest.approx(sheet.seconds, rel=0.1), (number, layout)
        assert 0.0 < sheet.share_of_peak() <= 1.0
    assert tried > len(numbers) / 2


def fastest_seconds(machine: Machine) -> float:
    return search(question_of(4, 8, machine), num_rows=1, limit_seconds=1e9).rows[0].sheet.seconds


# Of one machine, by its name: the search is what costs.
_USUAL: dict[str, float] = {}


def usual_seconds(machine: Machine) -> float:
    if machine.name not in _USUAL:
        _USUAL[machine.name] = fastest_seconds(machine)
    return _USUAL[machine.name]


@pytest.mark.parametrize(
    "better",
    [
        {"memory_bytes": 10**12},
        {"flops_per_s": {"bfloat16": 5e15}},
        pytest.param({"memory_bytes_per_s": 1e14}, marks=pytest.mark.slow),
        pytest.param({"host_s_per_operator": 0.0, "host_s_per_action": 0.0}, marks=pytest.mark.slow),
        pytest.param(
            {"within": replace(MACHINES["h100"].within, bytes_per_s=1e12, ring_bytes_per_s=1e12)},
            marks=pytest.mark.slow,
        ),
        {"between": replace(MACHINES["h100"].between, bytes_per_s=1e11, ring_bytes_per_s=1e11)},
    ],
    ids=lambda better: next(iter(better)),
)
def test_a_better_machine_is_never_slower(better: dict[str, Any]) -> None:
    machine = replace(MACHINES["h100"], ranks_per_node=2, memory_bytes=24_000_000_000)
    assert fastest_seconds(replace(machine, **better)) <= usual_seconds(machine)


def test_the_smallest_questions_have_answers() -> None:
    one = replace(LARGE, num_layers=1)
    for num_ranks, batch in ((1, 1), (2, 1), (2, 2)):
        found = search(question_of(num_ranks, batch, model=one))
        assert found.rows and all(row.sheet.seconds > 0 for row in found.rows)
    assert not search(question_of(1, 1, replace(MACHINES["h200"], memory_bytes=10**9))).rows


def test_a_search_whose_time_is_up_says_what_it_has_not_seen() -> None:
    ticks = itertools.count()
    question = question_of(8, 64, micro_batch_size=2, zero=1)
    found = search(question, num_rows=3, limit_seconds=5, clock=lambda: float(next(ticks)))
    assert found.rows and found.gap is not None
    assert found.gap <= search(question, num_rows=3, limit_seconds=1e9).rows[-1].sheet.seconds


def test_every_layout_that_is_printed_is_one_that_a_run_accepts() -> None:
    question = question_of(4, 16, MACHINES["a100-40"])
    for row in search(question, num_rows=5, limit_seconds=1e9).rows:
        flags = ["--preset", "llama_1b", "--train.seq-len", "2048", *row.layout.flags().split()]
        config = parse_config(flags, 4)
        assert config.parallel == row.layout.config(question).parallel
        assert config.train.num_micro_batches * config.train.micro_batch_size * (config.parallel.dp or 1) == 16


def test_settings_that_are_fixed_stay() -> None:
    fixed = {"tp": 2, "pp": 2, "zero": 3, "residency": "use", "recompute": "block", "micro_batch_size": 2}
    question = question_of(8, 32, **fixed)
    layouts = every(question)
    assert layouts
    for layout in layouts:
        assert all(getattr(layout, name) == value for name, value in fixed.items())


def test_a_setting_that_no_run_accepts_does_not_hide_the_next() -> None:
    """Exact mode refuses to gather again, which is tried between two settings that it accepts."""
    base = Config(model=LARGE, train=TrainConfig(seq_len=2048, dtype="bfloat16", reduction="exact"))
    machine = MACHINES["h200"]
    fixed = {"tp": 2, "micro_batch_size": 8, "zero": 0}
    whole = Question(base, machine, 2, 16, fixed | {"recompute": "none", "gathered": "keep"})
    enough = search(whole, num_rows=1, limit_seconds=1e9).rows[0].sheet.peak_bytes
    base = replace(base, parallel=replace(base.parallel, memory_limit=int(0.9 * enough)))
    found = search(Question(base, machine, 2, 16, fixed), num_rows=1, limit_seconds=1e9)
    assert any("gathered" in message for message in found.refused)
    assert found.rows and found.rows[0].layout.recompute != "none" and found.rows[0].layout.gathered == "keep"


@pytest.mark.parametrize("tp", [1, 2])
def test_exact_mode_has_a_price_that_is_a_part(tp: int) -> None:
    """The other parts are those of the fast step with the same layout; bounds hold with the price in it."""
    fixed = {"tp": tp, "pp": 2, "schedule": "1f1b", "micro_batch_size": 1, "recompute": "none", "gathered": "keep"}
    question = question_of(2 * tp, 8, **fixed, zero=0, tp_comm="fused")
    layout = every(question)[0]
    fast = Sheet.of(layout.config(question), question.machine)
    exact_base = replace(question.base, train=replace(question.base.train, reduction="exact"))
    question = replace(question, base=exact_base)
    exact = Sheet.of(layout.config(question), question.machine)
    assert fast.parts.exact == 0.0 and exact.parts.exact > 0.05 * fast.seconds
    assert exact.parts.compute == pytest.approx(fast.parts.compute)
    assert exact.parts.step == pytest.approx(exact.seconds)
    assert Bounds(question).seconds(layout) <= exact.seconds
