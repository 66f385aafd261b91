"""Rung: pure. Advice against a search that leaves nothing out; bounds against plans; what must not be slower."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpengine.commands.arguments import parse_config
from tpengine.config import Config, ModelConfig, ParallelConfig, TrainConfig
from tpengine.config.settings import ModelDetails
from tpengine.layout.step_plan import lowered
from tpengine.plan import make_schedule, verify
from tpengine.plan.schedule_file import format_schedule
from tpengine.planner import simulate
from tpengine.planner.advice.bounds import Bounds
from tpengine.planner.advice.changes import ChangedQuestion, changes
from tpengine.planner.advice.question import Candidate, Question, candidates, shapes
from tpengine.planner.advice.search import CLOSE, SearchResult, search, smaller
from tpengine.planner.advice.sheets import Sheet
from tpengine.planner.machine import MACHINES, Curve, Machine, Measured
from tpengine.planner.machine.measured import PRODUCTS
from tpengine.planner.modelled.costs import model_costs

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
        sheet = Sheet.of(layout.config(question), question.machine, builds=lowered)
    except ValueError:
        return None
    return sheet.seconds, sheet.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [
        pytest.param(question_of(2, 8), marks=pytest.mark.slow),
        question_of(4, 8, replace(MACHINES["h200"], memory_bytes=12_000_000_000), schedule="1f1b", tp_comm="fused"),
        pytest.param(question_of(4, 16, MACHINES["a100-40"]), marks=pytest.mark.slow),
        pytest.param(question_of(8, 16, replace(MACHINES["h200"], ranks_per_node=2), zero=1), marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks, little memory", "4 of 40 GB", "8 on 4 nodes"],
)
def test_nothing_is_faster_than_the_first_row(question: Question) -> None:
    question = replace(question, fixed={**question.fixed, "bucket_bytes": 25_000_000})
    found = search(question, num_rows=3, limit_seconds=1e9)
    assert found.gap is None and found.rows
    layouts = every(question)
    assert found.num_layouts == len(layouts) and found.num_simulated < len(layouts) / 4
    bounds = Bounds(question)
    assert found.num_fitting == sum(bounds.num_bytes(layout) <= question.memory_limit for layout in layouts)
    steps = {layout: step for layout in layouts if (step := simulated(layout, question))}
    fitting = {layout: step[0] for layout, step in steps.items() if step[1] <= question.memory_limit}
    assert (1 - CLOSE) * found.rows[0].sheet.seconds <= min(fitting.values())
    families: dict[tuple[int, int, int], float] = {}
    for layout, seconds in fitting.items():
        families[layout.family] = min(seconds, families.get(layout.family, seconds))
    for row, best in zip(found.rows, sorted(families.values()), strict=False):
        assert (1 - CLOSE) * row.sheet.seconds <= best
        assert row.sheet.seconds == fitting[row.layout]
    if question.machine.memory_bytes < 20e9:
        check_nearest(found, steps, question.memory_limit)


def check_nearest(found: SearchResult, steps: Mapping[Candidate, tuple[float, float]], limit: float) -> None:
    """Of all layouts that do not fit, and would be faster than the first row, none is nearer to fitting."""
    best, nearest = found.rows[0].sheet.seconds, found.too_large
    assert nearest is not None and nearest.seconds < best
    assert nearest.num_bytes <= min(held for seconds, held in steps.values() if held > limit and seconds < 0.99 * best)
    assert steps[nearest.layout] == (nearest.seconds, nearest.num_bytes)
    rank, memory = nearest.memory
    assert memory.peak == int(nearest.num_bytes) and memory.compute_action and rank < nearest.layout.pp
    # What is said to make it fit is a layout that fits, and takes as much longer as is said.
    assert nearest.remedy is not None
    words, longer = nearest.remedy
    changed = [
        layout for layout, (seconds, held) in steps.items() if held <= limit and seconds - nearest.seconds == longer
    ]
    assert any(all(word in layout.words() for word in words.split()) for layout in changed)


def with_caches(machine: Machine) -> Machine:
    """The machine, whose products and norms are measured: from memory, and twice as fast from caches."""
    cold, warm = (
        Measured({kind: {64: Curve.flat(rate)} for kind in PRODUCTS}, {"norm": Curve.flat(rate / 20)})
        for rate in (1e11, 2e11)
    )
    return replace(
        machine,
        measured={dtype: cold for dtype in machine.flops_per_s},
        cached={dtype: warm for dtype in machine.flops_per_s},
        cold_share=Curve(((1e6, 0.1), (1e9, 1.0))),
    )


def drawn(number: int) -> tuple[Candidate, Question]:
    """Draw a model, a machine and one of its layouts."""
    rng = random.Random(number)
    heads, num_layers = rng.choice([4, 8, 16]), rng.randint(1, 12)
    windows = tuple(rng.choice([0, 32, 128]) for _ in range(num_layers)) if rng.random() < 0.2 else ()
    model = ModelConfig(
        hidden_size=heads * rng.choice([32, 64, 128]),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=rng.choice([1, 2, 4]),
        ffn_size=128 * rng.randint(2, 32),
        vocab_size=rng.choice([256, 5000, 50000]),
        tie_embeddings=rng.random() < 0.3,
        architecture="mistral" if windows else "llama",
        details=ModelDetails(windows=windows),
    )
    machine = replace(MACHINES[rng.choice(list(MACHINES))], ranks_per_node=rng.choice([2, 8]))
    if rng.random() < 0.2:
        recorded = {kind: rng.uniform(0.5, 3.0) for kind in ("F", "B", "I", "W", "STEP")}
        machine = replace(machine, recorded=recorded)
    if random.Random(-number).random() < 0.2:
        machine = with_caches(machine)
    train = TrainConfig(
        seq_len=rng.choice([64, 256, 1024]),
        dtype=rng.choice(["float32", "bfloat16"]),
        reduction="exact" if rng.random() < 0.2 else "fast",
    )
    # Bounds hold for buckets of any size.
    parallel = ParallelConfig(bucket_bytes=rng.choice([100_000, 25_000_000, 1_000_000_000]))
    question = Question(
        Config(model=model, train=train, parallel=parallel),
        machine,
        rng.choice([1, 2, 4, 8]),
        rng.choice([1, 8, 16, 24]),
    )
    chosen = list(shapes(question))
    if not chosen:
        return drawn(number + 1_000_000)
    return rng.choice(list(candidates(question, rng.choice(chosen)))), question


def better_machines(machine: Machine) -> dict[str, Machine]:
    """The machine with one thing better, by what that is."""
    twice = {
        name: replace(link, bytes_per_s=2 * link.bytes_per_s, ring_bytes_per_s=2 * link.ring_bytes_per_s)
        for name, link in (("within", machine.within), ("between", machine.between))
    }
    flops = {dtype: 1.5 * rate for dtype, rate in machine.flops_per_s.items()}
    return {
        "links within": replace(machine, within=twice["within"]),
        "links between": replace(machine, between=twice["between"]),
        "flops": replace(machine, flops_per_s=flops),
        "memory's rate": replace(machine, memory_bytes_per_s=2 * machine.memory_bytes_per_s),
        "memory": replace(machine, memory_bytes=2 * machine.memory_bytes),
    }


def relabelled(sheet: Sheet, rng: random.Random) -> float:
    """The step of the same plan with the pipeline's ranks numbered otherwise."""
    plan, costs = sheet.plan, model_costs(sheet.config, sheet.layout, sheet.plan, sheet.machine)
    numbers = rng.sample(range(plan.num_ranks), plan.num_ranks)
    chunks = tuple(replace(chunk, rank=numbers[chunk.rank]) for chunk in plan.chunks)
    by_number = {number: rank for rank, number in enumerate(numbers)}
    of_ranks = [by_number[number] for number in range(plan.num_ranks)]
    moved = replace(plan, chunks=chunks, actions=tuple(plan.actions[rank] for rank in of_ranks))
    resident = tuple(costs.resident[rank] for rank in of_ranks)
    links = {(numbers[source], numbers[to]): link for (source, to), link in costs.links.items()}
    return simulate(moved, replace(costs, resident=resident, links=links)).makespan


# 10,000 in all.
DRAWS = [
    range(50),
    *(pytest.param(range(first, first + 1990), marks=pytest.mark.slow) for first in range(50, 10000, 1990)),
]


@pytest.mark.parametrize("numbers", DRAWS, ids=lambda numbers: f"{numbers.start} to {numbers.stop}")
def test_properties_of_drawn_layouts(numbers: range) -> None:
    """A bound is never above the plan's figures; parts add up; what is better is not slower; numbers do not matter."""
    tried = 0
    for number in numbers:
        layout, question = drawn(number)
        try:
            sheet = Sheet.of(layout.config(question), question.machine)
        except ValueError:
            continue
        tried += 1
        rng, bounds, seconds = random.Random(number), Bounds(question), sheet.seconds
        assert bounds.seconds(layout) <= seconds * (1 + 1e-9), (number, layout)
        assert bounds.num_bytes(layout) <= sheet.peak_bytes, (number, layout)
        assert bounds.played_seconds(layout) <= seconds * (1 + 1e-9), (number, layout)
        assert bounds.held_bytes(layout) <= sheet.peak_bytes, (number, layout)
        tp, pp, dp, size = layout.tp, layout.pp, layout.dp, layout.micro_batch_size
        assert bounds.least_seconds(tp, pp, dp, size) <= seconds * (1 + 1e-9), (number, layout)
        key = tp, size, layout.recompute, layout.gathered, layout.tp_comm, layout.ep
        assert bounds.group_seconds(pp, dp, key) <= seconds * (1 + 1e-9), (number, layout)
        assert sheet.parts.step == pytest.approx(seconds, rel=1e-6)
        # A recorded run may have been faster than the machine says.
        assert 0.0 < sheet.share_of_peak() <= 1.0 or question.machine.recorded
        assert relabelled(sheet, rng) == pytest.approx(seconds, rel=1e-12), (number, layout)
        what, machine = rng.choice(list(better_machines(question.machine).items()))
        faster = simulate(sheet.plan, model_costs(sheet.config, sheet.layout, sheet.plan, machine))
        assert faster.makespan <= seconds * (1 + 1e-12), (number, layout, what)
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
    "numbers", [range(2), pytest.param(range(2, 60), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_answers_to_drawn_questions(numbers: range) -> None:
    """Rows fit, their plans are verified, and a better machine has no slower answer; bounds are the only judges."""
    for number in numbers:
        _, question = drawn(number)
        found = search(question, num_rows=2, limit_seconds=1e9)
        for row in found.rows:
            verify(row.sheet.plan)
            assert row.sheet.peak_bytes <= question.memory_limit
            assert row.sheet.seconds == Sheet.of(row.layout.config(question), question.machine).seconds
        for what, machine in better_machines(question.machine).items():
            other = search(replace(question, machine=machine), num_rows=1, limit_seconds=1e9)
            if found.rows:
                assert (1 - CLOSE) * other.rows[0].sheet.seconds <= found.rows[0].sheet.seconds, (number, what)


@pytest.mark.by_default("flops_per_s")
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


def test_larger_buckets_where_ranks_wait_for_gathers() -> None:
    """Weights that are gathered for each use wait less in few large pieces; what a question says stays."""
    machine = replace(MACHINES["h200"], ranks_per_node=1)
    question = question_of(4, 8, machine, tp=1, pp=1, zero=3, residency="use", schedule="1f1b")
    layout, sheet = (row := search(question, num_rows=1, limit_seconds=1e9).rows[0]).layout, row.sheet
    assert layout.bucket_bytes == sheet.config.parallel.bucket_bytes > 25_000_000
    assert f"--parallel.bucket-bytes {layout.bucket_bytes}" in layout.flags(question)
    usual = Sheet.of(replace(layout, bucket_bytes=0).config(question), machine)
    assert sheet.seconds < 0.998 * usual.seconds
    fixed = replace(question, fixed={**question.fixed, "bucket_bytes": 1_000_000})
    assert search(fixed, num_rows=1, limit_seconds=1e9).rows[0].sheet.config.parallel.bucket_bytes == 1_000_000


def test_several_values_of_a_setting_are_searched() -> None:
    several = question_of(4, 8, zero=(1, 2), schedule=("1f1b", "zbv"), pp=(1, 2))
    found = list(every(several))
    assert {layout.zero for layout in found if layout.dp > 1} == {1, 2} and {layout.pp for layout in found} == {1, 2}
    # One replica has nothing to shard.
    assert {layout.zero for layout in found if layout.dp == 1} == {0}
    assert {layout.schedule for layout in found if layout.pp == 2} == {"1f1b", "zbv"}


def test_values_of_a_setting_have_one_answer_in_any_order() -> None:
    """A stage with more exchanges is looked at only where one with fewer does not fit, however they were named."""
    for one, other in (
        ({"zero": (3, 1)}, {"zero": (1, 3)}),
        ({"zero": 3, "residency": ("use", "step")}, {"zero": 3, "residency": ("step", "use")}),
    ):
        first, second = (
            search(question_of(4, 8, tp=1, pp=1, tp_comm="fused", micro_batch_size=1, **fixed), num_rows=1).rows[0]
            for fixed in (one, other)
        )
        assert first == second


def test_a_files_schedule_is_bounded_below_its_plan(tmp_path: Path) -> None:
    """How many chunks a rank has in it is not known before it is read; each holds its gathered weights alone."""
    path = tmp_path / "mine.txt"
    path.write_text(format_schedule(make_schedule("interleaved", 2, 2, 2)))
    asked = question_of(16, 16, pp=2, tp=1, schedule=str(path), zero=3, recompute="block", micro_batch_size=1)
    # So short that states are most of what is held.
    question = replace(asked, base=replace(asked.base, train=replace(asked.base.train, seq_len=64)))
    bounds = Bounds(question)
    for layout in every(question):
        found = simulated(layout, question)
        assert found is not None and bounds.num_bytes(layout) <= found[1] and bounds.seconds(layout) <= found[0]


def test_bounds_of_more_ranks_are_not_taken_over() -> None:
    """The more chips wait for each other, the slower is the slowest: such a bound could be above the plan."""
    few, many = question_of(2, 8), question_of(8, 8)
    layout = every(few)[0]
    Bounds(many).seconds(every(many)[0])
    assert Bounds(few, Bounds(many)).seconds(layout) == Bounds(few).seconds(layout)
    assert Bounds(few, Bounds(many))._chunks is not Bounds(many)._chunks


def test_changes_without_a_layout_or_without_time_are_not_told() -> None:
    """A quarter of the batch that no number of replicas divides; a limit of memory that was asked for shrinks too."""

    def tried(question: Question, limit_seconds: float = 1e9) -> list[ChangedQuestion]:
        return list(changes(question, search(question, num_rows=1).rows[0], limit_seconds))

    one = {"tp": 1, "micro_batch_size": 1, "recompute": "none", "zero": 1}
    assert not any(change.words.startswith("batch") for change in tried(question_of(8, 16, pp=1, **one)))
    changed = tried(question_of(8, 16, schedule="1f1b", **one))
    assert any(change.words.startswith("batch") for change in changed) and all(change.is_certain for change in changed)
    # Without time nothing is known, and nothing is said.
    assert not tried(question_of(8, 16, schedule="1f1b", **one), limit_seconds=-1.0)
    open_question = question_of(2, 8, tp_comm="fused", micro_batch_size=1, gathered="keep")
    best = search(open_question, num_rows=1).rows[0]
    parallel = replace(open_question.base.parallel, memory_limit=int(best.sheet.peak_bytes) + 1)
    limited = replace(open_question, base=replace(open_question.base, parallel=parallel))
    assert any(change.wins and change.words.endswith("less memory") for change in tried(limited))


def test_a_remedy_may_be_any_setting_that_holds_less() -> None:
    question = question_of(4, 8)
    kept = Candidate(1, 1, 4, "1f1b", 1, 1, 2, 3, "step", "attention", "keep", "fused")
    assert {words for words, _ in smaller(question, kept)} == {"recompute block", "recompute full", "zero 3 use"}
    used = question_of(4, 8, residency="use")
    assert {"zero 2", "zero 3 use"} <= {words for words, _ in smaller(used, replace(kept, zero=1))}


def test_the_smallest_questions_have_answers() -> None:
    one = replace(LARGE, num_layers=1)
    windowed = replace(one, architecture="qwen3", details=ModelDetails(windows=(32,)))
    for num_ranks, batch, model in ((1, 1, one), (2, 1, one), (2, 2, one), (1, 1, windowed)):
        found = search(question_of(num_ranks, batch, model=model))
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
        flags = ["--preset", "llama_1b", "--train.seq-len", "2048", *row.layout.flags(question).split()]
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
