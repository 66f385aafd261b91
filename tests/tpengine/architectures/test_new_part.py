"""Rung: gloo ranks. A new kind of part is three files: all else knows it from its description.

The part is a test's own (tests/support/architectures/squared.py). It trains through the engine, fast and exact; plan,
costs, memory, flops and bounds add up what it says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.architectures.squared import Squared
from support.engine.exactness import Found, assert_same_bits, merge
from support.engine.exactness import train as train_exactly
from support.engine.parity import Outcome, compare, config_of, train
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.layout.flops import step_flops
from tpengine.layout.parameters import num_matmul_parameters, stage_specs
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.plan import Kind, Recompute
from tpengine.planner import simulate
from tpengine.planner.advice.bounds import Bounds
from tpengine.planner.advice.question import Candidate, Question
from tpengine.planner.advice.sheets import Sheet, memory_lines
from tpengine.planner.machine import MACHINES
from tpengine.planner.modelled.activations import activation_bytes
from tpengine.planner.modelled.costs import action_seconds, model_costs
from tpengine.trust import permit_file

FILE = '''"""Llama with another network."""

from support.architectures.squared import Squared
from tpengine.architectures import llama
from tpengine.architectures.describe import Architecture, Attention, Norm, column, row

TABLE = {name: rule for name, rule in llama.TABLE.items() if ".mlp." not in name}
ARCHITECTURE = Architecture(
    "SquaredForCausalLM",
    {**TABLE, "layers.*.mlp.up": column, "layers.*.mlp.down": row},
    lambda model, layer: {
        "input_layernorm": Norm(), "self_attn": Attention(), "post_attention_layernorm": Norm(), "mlp": Squared(),
    },
    llama.numbers,
)
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FILE)
    permit_file(tmp_path / "own.py")
    return str(tmp_path / "own.py")


def configured(path: str, dp: int = 1, tp: int = 1, pp: int = 1, **settings: str) -> Config:
    base = config_of(dp, tp, pp, tied=False, kv_heads=4, num_layers=2)
    recompute = {"recompute": settings.pop("recompute")} if "recompute" in settings else {}
    return validate(
        replace(
            base,
            model=replace(base.model, architecture=path),
            parallel=replace(base.parallel, **recompute),  # type: ignore[arg-type]
            train=replace(base.train, **settings),  # type: ignore[arg-type]
        ),
        dp * tp * pp,
    )


def trained(config: Config) -> Outcome:
    permit_file(config.model.architecture)
    return train(config)


def trained_exactly(config: Config) -> Found:
    permit_file(config.model.architecture)
    return train_exactly(config)


def test_it_trains_in_a_layout_as_in_one_process(ranks: RankPool, path: str) -> None:
    alone = ranks.run(trained, 1, configured(path))[0]
    assert any(name.endswith("mlp.down.bias") for name in alone[1])
    compare(ranks.run(trained, 2, configured(path, tp=2)), alone)


def test_it_trains_exactly(ranks: RankPool, path: str) -> None:
    alone, laid_out = (configured(path, tp=tp, reduction="exact") for tp in (1, 2))
    want = merge(alone, ranks.run(trained_exactly, 1, alone))
    assert_same_bits(merge(laid_out, ranks.run(trained_exactly, 2, laid_out)), want)


def test_layout_and_flops_know_it(path: str) -> None:
    config = configured(path, dp=2, tp=2)
    (bias,) = (spec for spec in stage_specs(config.model, 2, 0, 1) if spec.name.endswith("down.bias"))
    assert bias.reduce_over == ("dp", "tp")
    buckets = [bucket.layout for bucket in layout_of(config).buckets.values()]
    assert {of.reduce_over for of in buckets if bias.name in of.names} == {("dp", "tp")}
    assert not Squared.may_cut_tokens
    model, train = config.model, config.train
    tokens = train.micro_batch_size * train.num_micro_batches * 2 * train.seq_len
    scores = model.num_layers * 4 * model.hidden_size * train.seq_len * tokens
    assert step_flops(config, causal_half=False) == 3 * (2 * num_matmul_parameters(model) * tokens + scores)


def test_costs_know_its_load_and_its_links(path: str) -> None:
    config = configured(path, tp=2)
    layout = layout_of(config)
    plan = training_plan(config, layout)
    machine = MACHINES["h200"]
    assert simulate(plan, model_costs(config, layout, plan, machine)).makespan > 0
    llama = configured("llama", tp=2)
    even, loaded, other = (
        action_seconds(of, layout, plan, machine, load=load)
        for of, load in ((config, 1.0), (config, 2.0), (llama, 1.0))
    )
    for kind in (Kind.F, Kind.B):
        assert even[kind, 0].exchange > other[kind, 0].exchange
        assert loaded[kind, 0].compute > even[kind, 0].compute
        assert loaded[kind, 0].exchange > even[kind, 0].exchange
    kept = [activation_bytes(config, 2, plan, load)[0].saved for load in (1.0, 2.0)]
    model, item = config.model, 8
    middle = 2 * config.train.micro_batch_size * config.train.seq_len * model.ffn_size // 2 * item
    assert kept[1] - kept[0] == model.num_layers * middle


@pytest.mark.parametrize("recompute", [of.value for of in Recompute])
def test_sheet_and_bounds_know_it(path: str, recompute: str) -> None:
    config, train = configured(path, recompute=recompute), configured(path).train
    sheets = []
    for load in (1.0, 3.0):
        sheet = Sheet.of(config, MACHINES["cpu"], load=load)
        text = "\n".join(memory_lines(sheet))
        assert (f"2 T F e, times {load:g}" in text) == (recompute in ("none", "attention"))
        batch = train.micro_batch_size * train.num_micro_batches
        check_bounds(Question(config, MACHINES["cpu"], 1, batch, load=load), sheet, recompute)
        sheets.append(sheet)
    even, loaded = sheets
    assert loaded.parts.compute > even.parts.compute and loaded.peak_bytes > even.peak_bytes
    assert loaded.memory[0].activations > even.memory[0].activations


def check_bounds(question: Question, sheet: Sheet, recompute: str) -> None:
    train = sheet.config.train
    layout = Candidate(
        1,
        1,
        1,
        "1f1b",
        1,
        train.micro_batch_size,
        train.num_micro_batches,
        0,
        "step",
        recompute,
        "keep",
        "fused",
        40_000,
    )
    bounds = Bounds(question)
    assert 0 < bounds.seconds(layout) <= bounds.played_seconds(layout) * (1 + 1e-9) <= sheet.seconds * (1 + 1e-6)
    assert 0 < bounds.num_bytes(layout) <= sheet.peak_bytes
