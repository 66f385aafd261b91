"""Rung: pure. The cost model against flops written out by hand, and what each choice must change."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tpengine.architectures.part import Packed
from tpengine.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig, validate
from tpengine.config.settings import ModelDetails
from tpengine.distributed.nccl_limits import buffer_bytes
from tpengine.layout.parameters import num_parameters
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.plan import Kind
from tpengine.planner import Costs, simulate
from tpengine.planner.costs import ring_time
from tpengine.planner.machine import CPU_CORE, MACHINES, Curve, Link, Machine, Measured
from tpengine.planner.machine.measured import PRODUCTS
from tpengine.planner.modelled.activations import activation_bytes
from tpengine.planner.modelled.caches import prepared_bytes, touched_bytes
from tpengine.planner.modelled.costs import action_seconds, bytes_per_rank, model_costs
from tpengine.planner.modelled.memory import memory_of

SMALL = ModelConfig(hidden_size=32, num_layers=8, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=61)


def machine_of(flops: float = math.inf, link: float = math.inf, latency: float = 0.0, **rates: Any) -> Machine:
    """Return a machine that takes time for nothing but what is given."""
    of = Link(link, latency, link)
    choices: dict[str, Any] = dict(
        name="by hand",
        source="a test",
        is_asynchronous=True,
        flops_per_s={"float32": flops, "bfloat16": flops},
        matmul=Curve.flat(1.0),
        attention=Curve.flat(1.0),
        memory_bytes_per_s=math.inf,
        memory=Curve.flat(1.0),
        kernel_s=0.0,
        host_s_per_operator=0.0,
        host_s_per_action=0.0,
        ranks_per_node=8,
        within=of,
        between=of,
    )
    return Machine(**(choices | rates))


# A flop takes a second and nothing else any time.
FLOPS_ONLY = machine_of(1.0)
H200 = MACHINES["h200"]
TRAIN = TrainConfig(seq_len=16, micro_batch_size=2, num_micro_batches=8)


def config_of(train: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **parallel: Any) -> Config:
    sizes = {"tp": 1, "pp": 1, "dp": 1} | parallel
    config = Config(
        model=replace(SMALL, **(model or {})), parallel=ParallelConfig(**sizes), train=replace(TRAIN, **(train or {}))
    )
    return validate(config, sizes["tp"] * sizes["pp"] * sizes["dp"])


def costs_of(config: Config, machine: Machine = CPU_CORE) -> Costs:
    layout = layout_of(config)
    return model_costs(config, layout, training_plan(config, layout), machine)


def forward_flops(num_layers: int, is_first: bool, is_last: bool) -> int:
    t, s, d, f, v = 2 * 16, 16, 32, 48, 64
    heads, kv_heads, e = 4, 2, 8
    matmuls = 2 * t * d * (heads + 2 * kv_heads) * e + 2 * t * heads * e * d + 2 * t * d * 2 * f + 2 * t * f * d
    attention = 2 * 2 * t * s * heads * e // 2
    rest = 4 * t * d + 5 * t * d + 3 * t * (heads + kv_heads) * e + 5 * t * f
    head = 4 * t * d + 2 * t * d * v + 4 * t * v
    return num_layers * (matmuls + attention + rest) + is_last * head


def test_forward_is_its_flops() -> None:
    whole = costs_of(config_of(), FLOPS_ONLY)
    assert whole.compute[Kind.F, 0] == forward_flops(8, True, True)
    config = config_of(pp=2)
    cut = costs_of(config, FLOPS_ONLY)
    for chunk, (first, last) in enumerate(layout_of(config).layers):
        assert cut.compute[Kind.F, chunk] == forward_flops(last - first, chunk == 0, chunk == 1)
    assert cut.compute[Kind.F, 0] + cut.compute[Kind.F, 1] == whole.compute[Kind.F, 0]


def test_the_halves_are_the_backward_and_each_matmul_is_in_both() -> None:
    costs = costs_of(config_of(), FLOPS_ONLY).compute
    assert costs[Kind.B, 0] == costs[Kind.I, 0] + costs[Kind.W, 0]
    t, d, f, v = 32, 32, 48, 64
    matmuls = 8 * (2 * t * d * 64 + 2 * t * 32 * d + 2 * t * d * 3 * f) + 2 * t * d * v
    # Besides them the weight half adds the embedding's gradient up.
    assert costs[Kind.W, 0] == matmuls + t * d
    assert matmuls < costs[Kind.I, 0] < 1.5 * matmuls


def test_what_is_computed_again_is_paid_in_backward() -> None:
    none, attention, block, full = (
        costs_of(config_of(recompute=again), FLOPS_ONLY).compute for again in ("none", "attention", "block", "full")
    )
    head = forward_flops(0, True, True)
    for kind in (Kind.B, Kind.I):
        assert full[kind, 0] - none[kind, 0] == none[Kind.F, 0]
        assert block[kind, 0] - none[kind, 0] == none[Kind.F, 0] - head
        assert 0 < attention[kind, 0] - none[kind, 0] < block[kind, 0] - none[kind, 0]
    for costs in (attention, block, full):
        assert (costs[Kind.F, 0], costs[Kind.W, 0]) == (none[Kind.F, 0], none[Kind.W, 0])


def test_gathering_again_is_paid_on_links() -> None:
    """A message takes a second: a block has 4 each way; a gather of 2 inputs, and of 2 gradients for W, comes again."""
    machine = machine_of(latency=1.0)
    kept = costs_of(config_of(tp=2), machine).compute
    again = costs_of(config_of(tp=2, gathered="again"), machine).compute
    assert kept[Kind.F, 0] == again[Kind.F, 0] == kept[Kind.I, 0] == again[Kind.I, 0] == 4 * 8 + 2
    assert (kept[Kind.B, 0], again[Kind.B, 0]) == (34, 34 + 2 * 8 + 1)
    assert (kept[Kind.W, 0], again[Kind.W, 0]) == (0, 4 * 8 + 1)


def test_plain_exchanges_stand_beside_compute_and_fused_ones_behind_it() -> None:
    """Fused: each product takes the longer of both; what has no exchange, norms and attention, takes its own time."""
    machine = machine_of(1e6, 1e4)
    fused, plain = (costs_of(config_of(tp=2, tp_comm=how), machine).compute[Kind.F, 0] for how in ("fused", "plain"))
    compute = costs_of(config_of(tp=2), machine_of(1e6)).compute[Kind.F, 0]
    links = 34 * (16 * 32 * 4) / 1e4
    t, d, packed, f, v = 32, 32, 32, 24, 32
    products = 8 * (2 * t * d * packed + 2 * t * 16 * d + 2 * t * d * 2 * f + 2 * t * f * d) + 2 * t * d * v
    assert plain == pytest.approx(compute + links)
    assert fused == pytest.approx(links + compute - products / 1e6) and links > compute


def test_the_parts_of_an_action_add_up() -> None:
    """A slow host shows only as far as it takes longer than its operators; on a CPU it is added to them."""
    config = config_of(tp=2, recompute="block")
    layout = layout_of(config)
    plan = training_plan(config, layout)
    slow = machine_of(1e6, 1e4, host_s_per_operator=10.0, host_s_per_action=1.0)
    parts = action_seconds(config, layout, plan, slow)
    for key, seconds in parts.items():
        whole = seconds.compute + seconds.again + seconds.exchange + seconds.host
        assert model_costs(config, layout, plan, slow).compute[key] == seconds.total == pytest.approx(whole)
    # Forward: in a block 4 products, 2 norms, rope, attention and the activation; lookup, head, norm and loss.
    assert parts[Kind.F, 0].total == pytest.approx(1.0 + 10.0 * (8 * 9 + 4))
    assert parts[Kind.B, 0].again > 0.0 == parts[Kind.F, 0].again
    cpu = action_seconds(config, layout, plan, replace(slow, is_asynchronous=False))
    assert cpu[Kind.F, 0].host == pytest.approx(1.0 + 10.0 * (8 * 9 + 4))


def test_a_window_is_fewer_pairs() -> None:
    whole, cut = (
        costs_of(config_of(model={"architecture": "mistral", "details": ModelDetails(windows=windows)}), FLOPS_ONLY)
        for windows in ((), (4, 0) * 4)
    )
    pairs, heads, e = 2 * (16 * 16 // 2 - (10 + 12 * 4)), 4, 8
    assert whole.compute[Kind.F, 0] - cut.compute[Kind.F, 0] == 4 * 4 * pairs * heads * e


def test_replicas_are_in_the_reductions() -> None:
    for dp in (1, 2, 4, 64):
        config = config_of(dp=dp, tp=2)
        layout = layout_of(config)
        costs = costs_of(config)
        norms = [index for index, bucket in layout.buckets.items() if bucket.layout.reduce_over == ("dp", "tp")]
        assert norms and set(norms) <= costs.reductions.keys()
        for index, seconds in costs.reductions.items():
            num_ranks = dp * (2 if index in norms else 1)
            num_bytes = 4 * layout.buckets[index].layout.numel
            assert 0.0 < seconds == pytest.approx(ring_time(num_bytes, num_ranks, 0.65e9, 20e-6))


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["shared memory", "kernels"])
def test_a_slice_of_its_own_is_also_copied_into_the_buffer_through_shared_memory(is_asynchronous: bool) -> None:
    bytes_per_s = 1e9
    machine = machine_of(link=bytes_per_s, is_asynchronous=is_asynchronous, memory_bytes_per_s=bytes_per_s)
    stays, comes_and_goes = (costs_of(config_of(dp=4, zero=zero), machine) for zero in (2, 3))
    assert stays.gathers and stays.gathers.keys() == comes_and_goes.gathers.keys()
    for index, seconds in stays.gathers.items():
        slice_bytes = comes_and_goes.weights[index] / 4
        assert seconds == pytest.approx(3 * slice_bytes / bytes_per_s)
        # Read and written once.
        copied = 0.0 if is_asynchronous else 2 * slice_bytes / bytes_per_s
        assert comes_and_goes.gathers[index] - seconds == pytest.approx(copied)


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["shared memory", "kernels"])
def test_exact_mode_puts_the_blocks_that_it_gathers_into_their_places(is_asynchronous: bool) -> None:
    bytes_per_s = 1e9
    machine = machine_of(link=bytes_per_s, is_asynchronous=is_asynchronous, memory_bytes_per_s=bytes_per_s)
    stays, comes_and_goes = (costs_of(config_of({"reduction": "exact"}, dp=4, zero=zero), machine) for zero in (2, 3))
    assert stays.gathers == pytest.approx(comes_and_goes.gathers)
    for index, seconds in stays.gathers.items():
        num_bytes = comes_and_goes.weights[index]
        copied = num_bytes + (0 if is_asynchronous else num_bytes / 4)
        assert seconds == pytest.approx((0.75 * num_bytes + 2 * copied) / bytes_per_s)


CONFIGS: list[dict[str, Any]] = [
    {},
    {"pp": 4, "tp": 2, "dp": 2},
    {"pp": 2, "schedule": "interleaved", "train": {"dtype": "bfloat16"}},
    {"pp": 2, "schedule": "zbv", "model": {"tie_embeddings": True}},
    {"pp": 2, "model": {"tie_embeddings": True}, "train": {"dtype": "float64"}},
    {"pp": 2, "dp": 2, "train": {"reduction": "exact"}},
    {"tp": 4, "model": {"num_kv_heads": 1}},
]


@pytest.mark.parametrize("choices", CONFIGS, ids=str)
def test_a_rank_holds_its_share_all_the_time(choices: dict[str, Any]) -> None:
    config = config_of(**choices)
    shares = bytes_per_rank(config, layout_of(config))
    assert costs_of(config).resident == tuple(held for _, held in shares)
    pp, tp = config.parallel.pp or 1, config.parallel.tp or 1
    # Norms, copies of a tied end and padding come on top of an equal share.
    copies = config.model.vocab_size * config.model.hidden_size * config.model.tie_embeddings
    whole = num_parameters(config.model)
    assert len(shares) == pp and whole <= tp * sum(numel for numel, _ in shares) <= 1.5 * (whole + copies)


def test_the_states_are_the_optimizers() -> None:
    """Bytes of a weight, its gradient, a master where the dtype is narrower, and what the optimizer keeps."""
    for dtype, own in (("float32", 4 + 4), ("bfloat16", 2 + 4 + 4)):
        for name, moments, states in (
            ("adamw", "float32", 8),
            ("adamw", "bfloat16", 4),
            ("lion", "float32", 4),
            ("sgd", "bfloat16", 2),
            ("torch.RMSprop", "float32", 8),
        ):
            config = config_of(train={"dtype": dtype})
            config = replace(config, optim=OptimConfig(name=name, moments=moments))  # type: ignore[arg-type]
            ((numel, held),) = bytes_per_rank(config, layout_of(config))
            assert held == numel * (own + states), name


def test_an_update_takes_what_its_optimizer_says() -> None:
    """AdamW's kernel reads and writes each tensor once; other optimizers take a pass for each operation."""
    seconds = {}
    for optim in (OptimConfig(), OptimConfig(name="sgd"), OptimConfig(name="lion", moments="bfloat16")):
        config = replace(config_of(), optim=optim)
        seconds[optim.name] = costs_of(config, machine_of(memory_bytes_per_s=1.0)).step
    ((numel, _),) = bytes_per_rank(config_of(), layout_of(config_of()))
    assert seconds["adamw"] == numel * 28
    assert seconds["sgd"] == numel * (3 * 4 * 7 + 2 * 4)
    assert seconds["lion"] == numel * (3 * 4 * 11 + 2 * 2)


@pytest.mark.parametrize("machine", [CPU_CORE, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_every_schedule_can_be_simulated(schedule: str, machine: Machine) -> None:
    peaks = {}
    for recompute in ("none", "attention", "block", "full"):
        config = config_of(pp=4, tp=2, dp=2, schedule=schedule, recompute=recompute)
        layout = layout_of(config)
        plan = training_plan(config, layout)
        costs = model_costs(config, layout, plan, machine)
        timeline = simulate(plan, costs)
        assert 0.0 < timeline.bubble < 1.0
        assert costs.activations == activation_bytes(config, 2, plan)
        peaks[recompute] = max(rank.peak_bytes for rank in timeline.ranks)
        assert peaks[recompute] > max(costs.resident)
    if schedule not in ("zb-h1", "zbv"):
        # Where the weight half waits, what it needs is kept all the same.
        assert peaks["none"] > peaks["attention"] > peaks["block"]
        assert peaks["none"] > peaks["full"]


def test_a_faster_machine_is_faster_at_everything() -> None:
    """Of a model that keeps it busy: a small one waits for the host, and may take longer than on a CPU."""
    large = dict(hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=8192, vocab_size=32000)
    config = config_of(pp=2, tp=2, dp=2, train={"seq_len": 2048}, model=large)
    slow, fast = (costs_of(config, machine) for machine in (CPU_CORE, H200))
    assert all(fast.compute[key] < seconds for key, seconds in slow.compute.items())
    assert all(fast.reductions[key] < seconds for key, seconds in slow.reductions.items())
    for name in ("latency", "ties", "clip", "step"):
        assert 0.0 < getattr(fast, name) < getattr(slow, name)


@pytest.mark.parametrize("windows", [(), (4, 0) * 4])
def test_attention_costs_the_pairs_that_it_computes(windows: tuple[int, ...]) -> None:
    """A flop takes a second: F and B differ between two packings by the flops of the pairs, B by 2.5 times as many."""
    config = config_of(model=dict(architecture="mistral", details=ModelDetails(windows=windows)))
    layout = layout_of(config)
    plan = training_plan(config, layout)
    few, many = Packed(((2,) * 16,)), Packed(((16, 16), (3, 13, 16)))
    costs = [model_costs(config, layout, plan, FLOPS_ONLY, packed=of).compute for of in (few, many)]
    more = sum(
        4 * config.model.hidden_size * (many.pairs(window or None) - few.pairs(window or None))
        for window in (windows or (0,) * config.model.num_layers)
    )
    assert more > 0
    for kind, times in ((Kind.F, 1.0), (Kind.B, 2.5)):
        assert costs[1][kind, 0] - costs[0][kind, 0] == pytest.approx(times * more, rel=1e-12)


def test_a_rank_touches_weights_with_their_copies_gradients_and_what_a_micro_batch_keeps() -> None:
    def touched(machine: Machine = H200, train: dict[str, Any] | None = None, **of: Any) -> int:
        config = config_of(train=train, **of)
        layout = layout_of(config)
        return touched_bytes(config, layout, training_plan(config, layout), machine)

    config = config_of()
    (numel, _), kept = bytes_per_rank(config, layout_of(config))[0], costs_of(config).activations[0].saved
    assert touched() == numel * (4 + 4) + kept
    # Matrices that are multiplied with few rows have no copies; with many, two of each in the place of the weight.
    assert touched(CPU_CORE) == touched()
    many = {"seq_len": 8192}
    copied = prepared_bytes(config_of(train=many), layout_of(config_of(train=many)), 0, CPU_CORE)
    assert touched(CPU_CORE, many) - touched(train=many) == copied / 2 > 0
    # What is computed or gathered twice is touched all the same, and a tied embedding on one rank once.
    assert touched(recompute="block") == touched() and touched(tp=2, gathered="again") == touched(tp=2)
    vee = {"pp": 2, "schedule": "zbv", "chunks_per_rank": 2}
    apart, tied = (touched(model={"tie_embeddings": of, "vocab_size": 6000}, **vee) for of in (False, True))
    assert apart - tied == pytest.approx(6000 * 32 * 8, rel=0.01)
    # Chunks of a rank add up; of ranks the one counts that has most.
    once, twice = touched(pp=2), touched(pp=2, schedule="interleaved", chunks_per_rank=2)
    assert touched() / 2 < once < touched() and twice == pytest.approx(once, rel=0.1)


def test_a_model_that_fits_into_caches_is_computed_faster_than_from_memory() -> None:
    cold, warm = (Measured({kind: {1: Curve.flat(rate)} for kind in PRODUCTS}) for rate in (1e9, 4e9))
    measured = machine_of(measured={"float32": cold})
    with_caches = replace(measured, cached={"float32": warm}, cold_share=Curve(((1e5, 0.01), (1e9, 1.0))))
    forward = (Kind.F, 0)
    for train, least, most in (({}, 1.5, 4.0), ({"seq_len": 4096, "micro_batch_size": 64}, 1.0, 1.1)):
        config = config_of(train=train)
        ratio = costs_of(config, measured).compute[forward] / costs_of(config, with_caches).compute[forward]
        assert least <= ratio <= most


def test_products_take_what_the_slowest_of_the_layouts_ranks_takes() -> None:
    spread = replace(FLOPS_ONLY, chip_spread=0.02)
    for parallel in ({}, {"dp": 4}, {"tp": 2, "pp": 2, "dp": 2}):
        config = config_of(**parallel)
        ratio = costs_of(config, spread).compute[Kind.F, 0] / costs_of(config, FLOPS_ONLY).compute[Kind.F, 0]
        num_ranks = math.prod(parallel.values())
        assert ratio == pytest.approx(1 / spread.slowest_of(num_ranks).peak("float32")), parallel
        assert (ratio > 1.0) == (num_ranks > 1)


@pytest.mark.parametrize(
    ("axes", "pairs"),
    [
        # Ranks are numbered by stage, replica, tp rank; a pair of stages lies on several nodes if one replica's does.
        ({"tp": 2, "pp": 4, "dp": 1}, set()),
        ({"tp": 2, "pp": 8, "dp": 1}, {(3, 4)}),
        ({"tp": 1, "pp": 4, "dp": 3}, {(1, 2), (2, 3)}),
        ({"tp": 1, "pp": 2, "dp": 8}, {(0, 1)}),
        ({"tp": 1, "pp": 8, "dp": 2, "schedule": "zbv"}, {(3, 4)}),
        ({"tp": 1, "pp": 3, "dp": 4, "schedule": "interleaved"}, {(1, 2), (0, 2)}),
    ],
    ids=str,
)
def test_stages_of_several_nodes_pay_the_network(axes: dict[str, Any], pairs: set[tuple[int, int]]) -> None:
    large = {"num_layers": 16, "num_heads": 4, "num_kv_heads": 4}
    slow = replace(machine_of(1e9, link=1e9), between=Link(1e3, 0.5, 1e3))
    config = config_of(model=large, **axes)
    costs = costs_of(config, slow)
    both = pairs | {(other, one) for one, other in pairs}
    assert costs.links == dict.fromkeys(both, (0.5, 1e3))
    layout = layout_of(config)
    plan = training_plan(config, layout)
    within = replace(costs, links={})
    # Each boundary is passed twice by every micro-batch; what is not hidden is at least one passage of the network.
    more = simulate(plan, costs).makespan - simulate(plan, within).makespan
    rows = config.train.micro_batch_size * config.train.seq_len // layout.tp
    assert more == 0.0 if not pairs else more >= 0.5 + 4 * rows * config.model.hidden_size / 1e3


def test_replicas_of_one_stage_may_lie_on_two_nodes() -> None:
    """Three replicas on nodes of eight: ranks 6, 7 and 8 hold stage 2, which one link of the network connects."""
    slow = replace(machine_of(1e9, link=1e9), between=Link(1e3, 0.0, 1e3))
    config = config_of(model={"num_layers": 8}, tp=1, pp=4, dp=3)
    layout = layout_of(config)
    plan, costs = training_plan(config, layout), costs_of(config, slow)
    slowed = {plan.chunks[b.chunks[0]].rank for b in plan.buckets if costs.reductions[b.index] > 1.0}
    assert slowed == {2}
    assert (
        slow.link(3, 1, range(6, 7)) == slow.between and slow.link(3, 1) == slow.link(3, 1, range(3, 4)) == slow.within
    )
    # Ends of a pipeline of three stages: the first replica's are ranks 0 and 6, the last one's 2 and 8.
    assert slow.link(2, 6, range(3)) == slow.between and slow.link(2, 6) == slow.within


@pytest.mark.parametrize(("tp", "ep", "rings"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2)])
def test_what_routers_count_travels_once_a_step(tp: int, ep: int, rings: int) -> None:
    """Of 2 layers 4 experts' tokens, crossing rows, 16 losses, and rows over: 8 bytes each, around dp 2; with ep tp."""
    details = ModelDetails(num_experts=4, experts_per_token=2, expert_ffn_size=16)
    sizes = {"architecture": "qwen3_moe", "num_layers": 2, "details": details}
    config = config_of(model=sizes, tp=tp, dp=2, ep=ep)
    layout = layout_of(config)
    plan = training_plan(config, layout)
    (counts,) = plan.counts
    costs = model_costs(config, layout, plan, machine_of(link=1.0))
    assert costs.reductions[counts.index] == rings * ring_time(8 * (2 * (4 + 1 + 16) + 1), 2, 1.0)
    (lanes,) = simulate(plan, replace(costs, compute=dict.fromkeys(costs.compute, 1.0))).ranks
    (sums,) = [span for span in lanes.reductions if span.action.index == counts.index]
    (clip,) = [span for span in lanes.compute if span.action.kind is Kind.CLIP]
    assert sums.end <= clip.start and sums.end - sums.start == pytest.approx(costs.reductions[counts.index])


def test_few_processors_of_nccl_cost_bandwidth_and_its_buffers_memory() -> None:
    """Of a group that has a limit (distributed/nccl_limits.py): half the network's rate is half the time's part."""
    config = config_of(tp=2, pp=2, dp=2)
    limited = machine_of(link=1e9, nccl_bytes_per_s_per_processor=1e8)
    free = replace(limited, nccl_bytes_per_s_per_processor=0.0)
    costs, faster = costs_of(config, limited), costs_of(config, free)
    # Two processors of a direction, eight of replicas.
    assert costs.bytes_per_time == 2e8 and faster.bytes_per_time == 1e9
    assert costs.reductions.keys() == faster.reductions.keys()
    slower = {costs.reductions[bucket] / faster.reductions[bucket] for bucket in costs.reductions}
    # Weights that tp cuts are summed over dp, norms over dp x tp, with two.
    assert {round(ratio, 9) for ratio in slower} == {1e9 / 8e8, 1e9 / 2e8}
    held = buffer_bytes(layout_of(config))
    assert [one - other for one, other in zip(costs.resident, faster.resident, strict=True)] == [held, held]
    # With tp 1 no kernel waits beside sums, which take what they want.
    alone = config_of(tp=1, pp=1, dp=4)
    assert costs_of(alone, limited).reductions == costs_of(alone, free).reductions


def test_the_sheet_of_memory_counts_communicators_on_gpus_alone() -> None:
    config = config_of(tp=2, pp=2, dp=2)
    layout = layout_of(config)
    plan = training_plan(config, layout)
    for machine, expected in ((MACHINES["h100"], buffer_bytes(layout)), (CPU_CORE, 0)):
        for memory in memory_of(config, layout, plan, machine):
            assert memory.communicators == expected
            assert memory.kinds().get("NCCL's buffers (estimate)", 0) == expected <= memory.peak
