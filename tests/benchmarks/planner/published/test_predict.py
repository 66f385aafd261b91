"""Rung: pure. Published runs by hand: rows as people write them, engines by their formulas, plans that repeat."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.planner.published.costs import engine_costs
from benchmarks.planner.published.engine import FLASH_1_ON_AMPERE, FLASH_2_ON_AMPERE, FLASH_2_ON_HOPPER
from benchmarks.planner.published.frameworks import engine_of
from benchmarks.planner.published.lowering import Lowering, lowering_of, split_layers, zb_2p
from benchmarks.planner.published.machines import machine_of, network_bits_per_s
from benchmarks.planner.published.predict import at_its_clock, predicted, step_and_peak, usable_bytes
from benchmarks.planner.published.row import Row
from benchmarks.planner.published.sizes import Sizes
from tpengine.plan import Chunk, Kind, Reduced, TensorSpec, Weights, clock, lower, verify
from tpengine.planner import simulate
from tpengine.planner.machine import MACHINES
from tpengine.planner.modelled.memory import ALLOCATOR_SHARE

# A small GPT on 8 GPUs, as a table has it.
GPT = {
    **{"id": "a", "source": "Megatron-LM", "model": "GPT", "params_b": "", "layers": "8", "hidden": "1024"},
    **{"heads": "16", "kv_heads": "16", "ffn_hidden": "4096", "vocab": "51200", "seq_len": "1024", "gpu": "A100-80"},
    **{"gpus": "8", "tp": "2", "pp": "2", "vpp": "1", "dp": "2", "cp": "1", "sequence_parallel": "no"},
    **{"zero_stage": "0", "micro_batch": "2", "global_batch": "64", "recompute": "none"},
    **{"metric_name": "step_time_s", "metric_value": "1", "notes": "mlp=gelu4h; precision=fp16; net=8x200Gb/s"},
}
FSDP = GPT | {"id": "f", "source": "torchtitan", "tp": "1", "pp": "1", "dp": "8", "zero_stage": "3"}


def row_of(columns: Mapping[str, str] = GPT, **changes: str) -> Row:
    return Row.of({**columns, **changes})


def lowering(row: Row) -> Lowering:
    sizes = Sizes.of(row)
    return lowering_of(row, sizes, engine_of(row, sizes))


ANSWERED: list[tuple[dict[str, str], str]] = [
    ({}, "all-reduce, no sequence parallelism; scores in memory"),
    ({"sequence_parallel": "yes", "gpu": "H100"}, "gather and scatter; cuDNN's attention"),
    ({"recompute": "full"}, "blocks computed again"),
    ({"recompute": "selective"}, "scores computed again"),
    ({"vpp": "2"}, "interleaved"),
    ({"notes": "mlp=gelu4h; schedule=ZB-V; precision=bf16"}, "zbv"),
    ({"notes": "mlp=gelu4h; schedule=ZB-2p; precision=bf16"}, "zb-2p"),
    ({"notes": "mlp=gelu4h; schedule=zb-h1; precision=bf16"}, "zb-h1"),
    ({"notes": "mlp=swiglu; precision=bf16", "kv_heads": "2", "gpu": "MI300X"}, "flash attention"),
    ({"zero_stage": "1", "gpu": "B200"}, "reductions overlap"),
    ({"cp": "2", "dp": "1", "gpu": "H200"}, "ring attention over 2 ranks"),
    (
        {"heads": "", "kv_heads": "", "ffn_hidden": "", "vocab": ""},
        "assumed heads 8; assumed ffn_hidden 4096; assumed kv_heads 8",
    ),
    ({"recompute": ""}, "assumed recompute none"),
    ({**FSDP, "notes": "mlp=swiglu; precision=bf16"}, "FlashAttention 2; kernels of eager torch; a unit is a block"),
    ({**FSDP, "notes": "mlp=swiglu; compile=yes"}, "FSDP; FlashAttention 2; a unit is a block"),
    ({"gpu": "GB200-NVL72", "global_batch": "6,400"}, "cuDNN's attention"),
    ({"source": "Megatron-DeepSpeed"}, "Megatron-DeepSpeed"),
    ({**FSDP, "source": "mosaicml"}, "FSDP; FlashAttention 1 in Triton; kernels of eager torch"),
    ({"vpp": "5"}, "interleaved"),
]


@pytest.mark.parametrize(("changes", "note"), ANSWERED, ids=[note for _, note in ANSWERED])
def test_a_row_is_answered_and_its_options_are_named(changes: dict[str, str], note: str) -> None:
    found = predicted(row_of(**changes))
    assert note in found.notes
    assert found.step_seconds is not None and found.mfu is not None and found.peak_bytes is not None
    assert 0.01 < found.mfu < 0.9 and found.fits is True and found.peak_bytes > 1e9


EMPTY: list[tuple[dict[str, str], str]] = [
    ({"gpu": "TPUv4"}, "gpu must be one whose data sheet is known"),
    ({"gpu": ""}, "gpu must be one whose data sheet is known"),
    ({"layers": ""}, "layers must be a number: got none"),
    ({"layers": "many"}, "layers must be a whole number of at least 1: got 'many'"),
    ({"hidden": "-4"}, "hidden must be a whole number"),
    ({"seq_len": "nan"}, "seq_len must be a number: got none"),
    ({"seq_len": "inf"}, "seq_len must be a whole number"),
    ({"tp": ""}, "tp must be a number: got none"),
    ({"global_batch": "3"}, "global_batch must hold dp * micro_batch"),
    ({"layers": "4000"}, "layers must be at most 1000"),
    ({"dp": "3"}, "tp * pp * dp * cp must be gpus"),
    ({"zero_stage": "some"}, "zero_stage must contain one of"),
    ({"heads": "24"}, "heads must divide hidden"),
    ({"layers": "1"}, "every chunk must have a layer"),
    ({"recompute": "sometimes"}, "recompute must contain one of none"),
    ({"notes": "mlp=gelu4h; precision=fp8"}, "precision must be fp16 or bf16"),
    ({"notes": "mlp=gelu4h; experts=8"}, "the model must be dense"),
    ({"notes": "mlp=gelu4h; schedule=hanayo"}, "schedule must be one of"),
    ({"notes": "mlp=hyena"}, "mlp must contain one of"),
]


@pytest.mark.parametrize(("changes", "reason"), EMPTY, ids=[reason for _, reason in EMPTY])
def test_a_row_that_cannot_be_predicted_says_why(changes: dict[str, str], reason: str) -> None:
    found = predicted(row_of(**changes))
    assert found.step_seconds is found.mfu is found.peak_bytes is found.fits is None
    assert reason in found.notes and "\n" not in found.notes


def test_what_was_measured_is_not_looked_at() -> None:
    other = {"metric_name": "oom", "metric_value": "9", "metric2_name": "mfu_pct", "metric2_value": "99"}
    notes = GPT["notes"] + "; step_s=12; hfu_pct=80; model_tf_uniform=300; step_src=published"
    assert predicted(row_of(**other, notes=notes)) == predicted(row_of())


MANY = [
    row_of(global_batch="640"),
    row_of(global_batch="650", dp="1", gpus="4"),
    row_of(vpp="2", global_batch="648"),
    row_of(pp="4", gpus="16", global_batch="644"),
    row_of(pp="4", gpus="16", layers="10", global_batch="644", notes="mlp=gelu4h; schedule=ZB-2p"),
    row_of(notes="mlp=gelu4h; schedule=zb-h1", global_batch="640"),
    row_of(notes="mlp=gelu4h; schedule=zbv", global_batch="640"),
    row_of(FSDP, global_batch="640"),
]


@pytest.mark.by_default("1", "5", "7")
@pytest.mark.parametrize("row", MANY, ids=range(len(MANY)))
def test_many_micro_batches_are_as_the_whole_plan(row: Row) -> None:
    of, machine, num = lowering(row), machine_of(row), Sizes.of(row).num_micro_batches
    plan = of.plan(num)
    assert plan.num_microbatches == num > 4 * of.layout.pp
    timeline = simulate(plan, engine_costs(of.config, of.layout, plan, machine, of.engine.engine))
    seconds, peak = step_and_peak(of, machine, num)
    assert peak == max(rank.peak_bytes for rank in timeline.ranks)
    if not of.is_asynchronous:
        assert seconds == pytest.approx(timeline.makespan, rel=1e-6)
    else:
        assert 0.8 * timeline.makespan < seconds <= timeline.makespan


def test_what_fits_is_what_a_device_has_less_the_libraries() -> None:
    small, large = (predicted(row_of(gpu=gpu, micro_batch="32", layers="48")) for gpu in ("A100-40", "A100-80"))
    assert small.peak_bytes == large.peak_bytes and small.peak_bytes is not None
    limits = [usable_bytes(MACHINES[name], 1 - ALLOCATOR_SHARE) for name in ("a100-40", "a100")]
    assert limits == pytest.approx([0.94 * size * 2**30 for size in (40, 80)])
    assert limits[0] < small.peak_bytes < limits[1]
    assert (small.fits, large.fits) == (False, True)


@pytest.mark.parametrize(
    ("source", "layers", "least_share", "fits"),
    [("Megatron-LM", 64, 0.88, True), ("Aleph Alpha", 44, 0.88, False), ("Aleph Alpha", 40, 0.83, True)],
)
def test_fragments_take_more_of_scalings_memory(source: str, layers: int, least_share: float, fits: bool) -> None:
    of = predicted(row_of(source=source, gpu="A100-80", micro_batch="32", layers=str(layers)))
    assert of.peak_bytes is not None and least_share < of.peak_bytes / (80 * 2**30) < 0.94
    assert of.fits == fits


def test_faster_links_more_flops_and_less_work_are_never_slower() -> None:
    for row in (row_of(), row_of(FSDP), row_of(sequence_parallel="yes")):
        of, machine = lowering(row), machine_of(row)
        base, peak = step_and_peak(of, machine, 8)
        fast = replace(machine, between=replace(machine.between, bytes_per_s=1e12, ring_bytes_per_s=1e12))
        strong = replace(machine, flops_per_s={name: 2 * rate for name, rate in machine.flops_per_s.items()})
        assert step_and_peak(of, fast, 8)[0] <= base
        assert step_and_peak(of, strong, 8)[0] < base
        assert step_and_peak(of, machine, 4)[0] < base and step_and_peak(of, machine, 4)[1] <= peak


@pytest.mark.parametrize(
    ("num_layers", "num_chunks", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (30, 8, [3, 4, 4, 4, 4, 4, 4, 3]), (10, 4, [2, 3, 3, 2]), (9, 4, [3, 2, 2, 2]), (3, 1, [3])],
)
def test_layers_are_split_as_launchers_do(num_layers: int, num_chunks: int, sizes: list[int]) -> None:
    ranges = split_layers(num_layers, num_chunks)
    assert [end - first for first, end in ranges] == sizes
    assert ranges[0][0] == 0 and ranges[-1][1] == num_layers


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 3), (4, 12), (4, 20), (8, 2), (8, 24)])
def test_zb_2p_keeps_ranks_busy_within_its_memory(num_ranks: int, num_microbatches: int) -> None:
    schedule = zb_2p(num_ranks, num_microbatches)
    spec = TensorSpec((1,), "float16")
    chunks = [
        Chunk(rank, (rank, rank + 1), spec if rank else None, spec if rank < num_ranks - 1 else None)
        for rank in range(num_ranks)
    ]
    plan = lower(schedule, chunks, (), (), num_microbatches, num_ranks, training=True)
    verify(plan)
    unit = {(kind, chunk): 1.0 for kind in (Kind.F, Kind.I, Kind.W) for chunk in range(num_ranks)}
    for rank, lanes in enumerate(clock(schedule.compute, unit).ranks):
        spans = lanes.compute
        assert len(spans) == 3 * num_microbatches
        if num_microbatches >= 3 * num_ranks:
            # No bubble: from its first action to its last a rank only computes.
            assert spans[-1].end - spans[0].start <= 3 * num_microbatches + (rank > 0) * 1e-9
        held = most = 0
        for span in spans:
            held += (span.action.kind is Kind.F) - (span.action.kind is Kind.W)
            most = max(most, held)
        assert most <= 2 * num_ranks


def test_activations_are_korthikantis() -> None:
    """s b h (10 + 24/t + 5 a s / (h t)) without sequence parallelism, s b h / t (34 + 5 a s / h) with it."""
    s, b, h, a, t, layers = 1024, 2, 1024, 16, 2, 4
    for parallel, expected in (("no", 10 + 24 / t + 5 * a * s / (h * t)), ("yes", (34 + 5 * a * s / h) / t)):
        row = row_of(sequence_parallel=parallel)
        of = lowering(row)
        plan = of.plan(4)
        costs = engine_costs(of.config, of.layout, plan, MACHINES["a100"], of.engine.engine)
        assert costs.activations[0].saved == pytest.approx(layers * s * b * h * expected, rel=1e-9)


def test_state_is_18_bytes_per_parameter_and_what_zero_leaves() -> None:
    numel = 12 * 1024**2 * 4 // 2
    for zero, each in (("0", 18.0), ("1", 6 + 12 / 2), ("2", 2 + 16 / 2)):
        of = lowering(row_of(zero_stage=zero, gpu="H100"))
        plan = of.plan(2)
        resident = engine_costs(of.config, of.layout, plan, MACHINES["h100"], of.engine.engine).resident
        tables = (51200 // 2 + 1024) * 1024
        assert resident[0] == pytest.approx((numel + tables) * each, rel=5e-3)
    of = lowering(row_of(FSDP))
    plan = of.plan(2)
    costs = engine_costs(of.config, of.layout, plan, MACHINES["a100"], of.engine.engine)
    # The first unit is the largest, with the table; of gradients two are held at once.
    two = 2 * 4 * (12 * 1024**2 + 1024 * 52224)
    assert costs.resident[0] - two == pytest.approx((12 * 1024**2 * 8 + 1024 * 52224) * 16 / 8, rel=5e-3)
    assert not costs.contributions


def test_units_are_gathered_for_each_use_and_scattered_in_each_backward() -> None:
    plan = lowering(row_of(FSDP)).plan(2)
    assert len(plan.chunks) == 8 and {chunk.rank for chunk in plan.chunks} == {0}
    assert {bucket.weights for bucket in plan.buckets} == {Weights.SLICED}
    assert {bucket.reduced for bucket in plan.buckets} == {Reduced.MICROBATCH}
    actions = plan.actions[0]
    gathered = [gather.index for action in actions for gather in action.gathers]
    assert gathered == [*range(8), *reversed(range(8))] * 2
    assert sum(len(action.reduces) for action in actions) == 16


def test_chunks_of_the_ends_alone_count_them_as_layers() -> None:
    of = lowering(row_of(vpp="5", layers="8"))
    assert of.counts_ends and of.layout.layers == ((0, 0), *((i, i + 1) for i in range(8)), (8, 8))
    plan = of.plan(4)
    assert plan.num_layers == 10 and of.with_blocks(plan).chunks[0].layers == (0, 0)
    compute = engine_costs(of.config, of.layout, of.with_blocks(plan), MACHINES["a100"], of.engine.engine).compute
    assert 0 < compute[Kind.F, 0] < compute[Kind.F, 1]


def test_flash_kernels_by_length_and_heads() -> None:
    """FlashAttention 2 on an H100, forward, causal, heads of 128: 191, 298 and 335 TFLOP/s."""
    for seq, expected in ((512, 191), (2048, 298), (16384, 335)):
        assert 989 * FLASH_2_ON_HOPPER.share(seq, 128, backward=False) == pytest.approx(expected)
    assert FLASH_2_ON_AMPERE.share(8192, 128, backward=True) > FLASH_1_ON_AMPERE.share(8192, 128, backward=True)
    assert FLASH_2_ON_HOPPER.share(8192, 64, backward=False) < FLASH_2_ON_HOPPER.share(8192, 128, backward=False)


def test_attention_runs_at_the_clock_that_the_power_allows() -> None:
    of = engine_of(row_of(FSDP, gpu="H100"), Sizes.of(row_of(FSDP)))
    for sheet, share in (("h100", 1.0), ("h100-500w", (5 / 7) ** (1 / 3)), ("a100", 1.0), ("h200", 1.0)):
        slower = at_its_clock(of, MACHINES[sheet]).engine.flash
        assert slower is not None and of.engine.flash is not None
        assert slower.forward == pytest.approx(share * of.engine.flash.forward)
        assert slower.backward == pytest.approx(share * of.engine.flash.backward)


def test_attention_in_memory_is_the_whole_square() -> None:
    flash, scores = (lowering(row_of(**changes)) for changes in ({"gpu": "H100"}, {}))
    compute_only = replace(
        MACHINES["a100"],
        **{"kernel_s": 0.0, "host_s_per_operator": 0.0, "host_s_per_action": 0.0, "num_processors": 0},
        memory_bytes_per_s=math.inf,
    )
    seconds = [
        engine_costs(of.config, of.layout, of.plan(2), compute_only, of.engine.engine).compute[Kind.F, 0]
        for of in (flash, scores)
    ]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("text", "gbits"),
    [
        ("8x200Gb/s HDR", 200.0),
        ("4 x 200Gb", 100.0),
        ("800Gb/s per node", 100.0),
        ("1600Gb/s RoCE", 200.0),
        ("EFA 3.2Tb/s", 400.0),
        ("400Gb/s NDR", 400.0),
        ("400Gb/s per GPU", 400.0),
        ("8x H100 GPUs, 400Gb/s InfiniBand per GPU", 400.0),
        ("8x V100 GPU, 100Gb/s per node", 12.5),
        ("2 nodes, 400Gb/s/GPU", 400.0),
        ("200Gb/s per card, 16 nodes", 200.0),
        ("200Gb/s per host", 25.0),
        ("8 x HDR 200Gb/s", 200.0),
        ("RoCE, 4 nodes x 8 A100 SXM", 0.0),
        ("", 0.0),
    ],
)
def test_the_network_is_read_from_notes(text: str, gbits: float) -> None:
    assert network_bits_per_s(text.lower(), 8) == gbits * 1e9


@pytest.mark.parametrize(
    "sizes", [{"layers": "1000", "pp": "200", "gpus": "200"}, {"layers": "96", "pp": "8", "vpp": "1000000000"}], ids=str
)
def test_a_pipeline_of_too_many_parts_is_left_empty_at_once(sizes: dict[str, str]) -> None:
    found = predicted(row_of(GPT | {"dp": "", "tp": "1", "global_batch": "2000", "micro_batch": "1"} | sizes))
    assert found.step_seconds is None and "stages must be at most 128" in found.notes
