"""Rung: pure. Advice for models with experts: how many ranks share them, and what uneven routing costs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tpengine.cli import main
from tpengine.config import Config, ParallelConfig, validate
from tpengine.config.presets import tiny_moe
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.planner.advice.bounds import Bounds
from tpengine.planner.advice.question import Question, candidates, shapes
from tpengine.planner.advice.recorded import load_recorded
from tpengine.planner.advice.search import search
from tpengine.planner.advice.sheets import Sheet, memory_lines
from tpengine.planner.machine import MACHINES
from tpengine.planner.modelled.costs import model_costs
from tpengine.planner.modelled.exchanged import exchanged

H100 = replace(MACHINES["h100"], ranks_per_node=8, num_nodes=1)


def shared(tp: int, dp: int, ep: int, **parallel: int) -> Config:
    config = replace(tiny_moe(), parallel=replace(ParallelConfig(tp, 1, dp), ep=ep, **parallel))  # type: ignore[arg-type]
    return validate(config, tp * dp)


def test_every_share_is_searched_and_bounds_hold_of_each() -> None:
    """Also where replicas of experts are fewer than those of attention, or none, and where the load is uneven."""
    model = tiny_moe()
    for load in (1.0, 1.7):
        question = Question(model, H100, 4, 4, {"recompute": "none", "gathered": "keep", "tp_comm": "fused"}, load=load)
        bounds, seen = Bounds(question), set()
        every = [layout for shape in shapes(question) if shape[1] == 1 for layout in candidates(question, shape)]
        for layout in [one for one in every if one.residency == "step" or one.zero < 3]:
            sheet = Sheet.of(layout.config(question), H100, load=load)
            seen.add((layout.tp, layout.dp, layout.ep, layout.zero))
            assert bounds.seconds(layout) <= bounds.played_seconds(layout) * (1 + 1e-9), layout
            assert bounds.played_seconds(layout) <= sheet.seconds * (1 + 1e-6), layout
            assert bounds.num_bytes(layout) <= sheet.peak_bytes and bounds.held_bytes(layout) <= sheet.peak_bytes, (
                layout
            )
        assert {(tp, dp, ep) for tp, dp, ep, _ in seen} == {
            *((1, 4, ep) for ep in (1, 2, 4)), *((2, 2, ep) for ep in (1, 2, 4)), *((4, 1, ep) for ep in (1, 4)),
        }  # fmt: skip


def test_experts_that_no_other_rank_holds_are_not_exchanged_nor_cut() -> None:
    config = shared(1, 4, 4, zero=3)
    layout = layout_of(config)
    plan = training_plan(config, layout)
    costs = model_costs(config, layout, plan, H100)
    alone = {index for index, bucket in layout.buckets.items() if layout.num_replicas(bucket.layout) == 1}
    assert alone and len(alone) < len(layout.buckets)
    assert (
        not alone & costs.gathers.keys() and not alone & costs.weights.keys() and not alone & costs.contributions.keys()
    )
    counts = {bucket.index for bucket in plan.counts}
    assert costs.reductions.keys() == layout.buckets.keys() - alone | counts
    assert all(seconds > 0 for seconds in costs.reductions.values())


def test_an_uneven_load_takes_longer_and_holds_more_where_ranks_share_experts() -> None:
    for ep, grows in ((2, True), (1, False)):
        even, uneven = (Sheet.of(shared(2, 1, ep), H100, load=load) for load in (1.0, 1.5))
        assert (uneven.seconds > even.seconds) == (uneven.peak_bytes > even.peak_bytes) == grows


def test_bytes_to_experts_are_those_of_rows_that_leave_their_rank() -> None:
    config = shared(2, 1, 2)
    plan, model, train = training_plan(config, layout_of(config)), config.model, config.train
    own = train.micro_batch_size * train.seq_len // 2
    rows = own * model.details.experts_per_token
    # Half of the rows go to the other rank and come back, in every layer.
    found = exchanged(config, plan)
    assert found.num_ranks == 2
    assert found.forward == found.backward == model.num_layers * 2 * rows * model.hidden_size * 4 // 2
    assert exchanged(config, plan, load=1.5).forward == 1.5 * found.forward


def test_the_recorded_load_is_the_mean_of_layers_and_the_median_of_steps(tmp_path: Path) -> None:
    assert load_recorded(tmp_path) is None
    rows = [{"step": n, "expert_load/0": 1.0 + n, "expert_load/3": 3.0 + n, "expert_tokens/0": 9} for n in (1, 2, 3)]
    lines = [*rows, {"step": 4, "step_seconds": 0.1}, {"step": 5, "expert_load/0": float("nan")}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    assert load_recorded(tmp_path) == 4.0


def test_the_commands_say_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["--model", "tiny_moe", "--machine", "h100:4"]
    main(
        ["plan", *asked, "--ranks", "4", "--tp", "2", "--dp", "2", "--ep", "4", "--moe-load", "1.5", "--explain-memory"]
    )
    out = capsys.readouterr().out
    assert "tp 2 pp 1 dp 2 ep 4" in out and "--parallel.ep 4" in out
    assert "4 ranks share the 8 experts" in out and "1.50 times the mean, 38% of all rows" in out
    assert "experts' rows and outputs" in out and "held only while an action of chunk 0 runs, at a load of 1.5:" in out
    picture = tmp_path / "plan.svg"
    main(["schedule", *asked, "--ep", "4", "--pp", "1", "--moe-load", "1.5", "--draw", str(picture)])
    assert "4 ranks share the 8 experts" in capsys.readouterr().out
    assert "ep 4" in picture.read_text() and "1.50 times the mean" in picture.read_text()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["plan", "--model", "tiny", "--machine", "h100:1", "--moe-load", "2"],
            "--moe-load is of a model with experts",
        ),
        (["plan", "--model", "tiny_moe", "--machine", "h100:1", "--moe-load", "0.5"], "a number of at least 1"),
        (["plan", "--model", "tiny_moe", "--machine", "h100:4", "--ep", "3"], "use ep 2 or 4"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], command: list[str], said: str) -> None:
    assert main(command) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_what_is_fixed_is_kept() -> None:
    question = Question(tiny_moe(), H100, 4, 4, {"ep": 2, "pp": 1, "schedule": "1f1b"})
    found = search(question, num_rows=3, tells_all=False)
    assert {(row.layout.tp, row.layout.ep) for row in found.rows} == {(1, 2), (2, 2)}
    assert all("--parallel.ep 2" in row.layout.flags(question) for row in found.rows)
    assert next(shapes(replace(question, fixed={"ep": 3})), None) is None


@pytest.mark.parametrize("recompute", ["none", "attention", "block", "full"])
@pytest.mark.parametrize(("tp", "ep", "load"), [(2, 4, 1.5), (2, 1, 1.0), (1, 4, 1.0)])
def test_the_lines_of_a_sheet_add_up(recompute: str, tp: int, ep: int, load: float) -> None:
    """What a block keeps is its lines' sum, and every formula with its numbers put in is the bytes behind it."""
    base = tiny_moe()
    details = replace(base.model.details, shared_expert_size=64, gates_shared_expert=True)
    layout = replace(ParallelConfig(tp, 1, 4 // tp), ep=ep, recompute=recompute)  # type: ignore[arg-type]
    config = validate(replace(base, model=replace(base.model, details=details), parallel=layout), 4)
    sheet = Sheet.of(config, H100, load=load)
    lines = list(memory_lines(sheet))
    own = lines[next(at for at, line in enumerate(lines) if line.startswith("a block keeps")) + 1 :]
    kept = own[: next(at for at, line in enumerate(own) if line.startswith("  together")) + 1]
    *parts, together = [int(line.split()[-1].replace(",", "")) for line in kept]
    assert sum(parts) == together and (together > 0 or recompute == "full")
    formulas = [re.fullmatch(r"  \S.* = ([^=]+?) +([\d,]+)", line) for line in lines]
    worked_out = [(found[1].replace(" x ", " * "), found[2]) for found in formulas if found]
    assert worked_out or recompute == "full"
    for numbers, said in worked_out:
        assert eval(numbers) == int(said.replace(",", "")), numbers
    state = sheet.memory[0].state
    named = ("weights", "gradients", "masters", "moments")
    held = {line.split()[0]: int(line.split()[-1].replace(",", "")) for line in lines if line.startswith("  ")}
    assert sum(held.get(name, 0) for name in named) == state.total
