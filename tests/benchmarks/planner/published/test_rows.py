"""Rung: pure. Rows as people write them for each engine, and what their engines keep, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest
from tpkernels.work import Work

from benchmarks.planner.published.chunk import engine_seconds
from benchmarks.planner.published.costs import engine_costs
from benchmarks.planner.published.engine import Engine
from benchmarks.planner.published.frameworks import engine_of, recomputation_of
from benchmarks.planner.published.lowering import lowering_of
from benchmarks.planner.published.machines import machine_of
from benchmarks.planner.published.predict import predicted, slowed_once
from benchmarks.planner.published.row import Row
from benchmarks.planner.published.sizes import Sizes
from tpengine.layout.parameters import chunk_specs
from tpengine.plan import Kind
from tpengine.planner import Costs
from tpengine.planner.machine import MACHINES, Machine

# Llama 3.1 8B in torchtitan, and a Llama 2 7B in Megatron-LM.
TITAN = {
    **{"id": "t", "source": "pytorch/torchtitan", "model": "Llama-3.1-8B", "layers": "32", "hidden": "4096"},
    **{"heads": "32", "kv_heads": "8", "ffn_hidden": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100"},
    **{"gpus": "8", "tp": "1", "pp": "1", "dp": "8", "zero_stage": "FSDP", "micro_batch": "2", "global_batch": "16"},
    **{"recompute": "selective", "notes": "mlp=swiglu; precision=bf16; compile=yes"},
}
MEGATRON = TITAN | {
    **{"source": "Megatron-LM", "model": "Llama-2-7B", "kv_heads": "32", "ffn_hidden": "11008", "vocab": "32000"},
    **{"seq_len": "4096", "tp": "2", "dp": "4", "zero_stage": "1", "sequence_parallel": "yes", "micro_batch": "1"},
    **{"recompute": "none", "notes": "mlp=swiglu; precision=bf16"},
}
PIPELINE = MEGATRON | {"pp": "2", "dp": "2", "zero_stage": "0"}


def costs_of(columns: Mapping[str, str], **changes: str) -> tuple[Sizes, Costs]:
    row = Row.of({**columns, **changes})
    sizes = Sizes.of(row)
    of = lowering_of(row, sizes, engine_of(row, sizes))
    plan = of.plan(sizes.num_micro_batches)
    return sizes, engine_costs(of.config, of.layout, of.with_blocks(plan), machine_of(row), of.engine.engine)


WRITTEN = [
    (TITAN, {"zero_stage": "3"}),
    (TITAN, {"zero_stage": "fully sharded (FSDP2)"}),
    (TITAN, {"zero_stage": "", "tp": "", "pp": "", "dp": ""}),
    (TITAN, {"recompute": "op"}),
    (TITAN, {"recompute": "", "notes": "mlp=swiglu; precision=bf16; compile=yes; ac=op"}),
    (TITAN, {"notes": "mlp=SwiGLU (silu); precision=amp_bf16;compile = yes ; moe=no"}),
    (TITAN, {"seq_len": "8k", "vocab": "128,256", "global_batch": "16.0", "gpus": " 8 "}),
    (MEGATRON, {"zero_stage": "distributed optimizer", "sequence_parallel": "True"}),
    (MEGATRON, {"zero_stage": "ZeRO-1", "dp": "", "cp": "", "vpp": "-"}),
    (MEGATRON, {"recompute": "No", "notes": "mlp=swiglu; precision=bfloat16 mixed"}),
    (MEGATRON, {"notes": ""}),
    (MEGATRON, {"gpus": "8 GPUs", "seq_len": "4096 tokens", "global_batch": "16 (sequences)", "micro_batch": "~1"}),
    (MEGATRON, {"recompute": "disabled", "sequence_parallel": "yes (Megatron)", "vpp": "0", "cp": "0"}),
    (MEGATRON, {"recompute": "-", "tp": "2.0", "vpp": "n/a", "kv_heads": "unknown", "heads": "32 heads"}),
    (MEGATRON, {"notes": "mlp=swiglu; precision=bf16 (no fp8); schedule=-; net=NVLink 600 GB/s"}),
    (PIPELINE, {"notes": "mlp=swiglu; precision=bf16; schedule=1F1B (non-interleaved)"}),
    (PIPELINE, {"notes": "mlp=swiglu; precision=bf16; schedule=PipeDream-Flush"}),
    (PIPELINE, {"schedule": "none", "recompute": "no", "zero_stage": "-"}),
]


@pytest.mark.parametrize(("columns", "changes"), WRITTEN, ids=[str(changes) for _, changes in WRITTEN])
def test_other_words_for_the_same_run_are_the_same(columns: Mapping[str, str], changes: dict[str, str]) -> None:
    one, other = predicted(Row.of(columns)), predicted(Row.of({**columns, **changes}))
    assert one.step_seconds == other.step_seconds and one.peak_bytes == other.peak_bytes and one.step_seconds


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        *(("A100-SXM4-80GB", "a100"), ("NVIDIA A100 80GB", "a100"), ("A100-SXM4-40GB", "a100-40")),
        *(("A100-40", "a100-40"), ("a100_40gb", "a100-40"), ("A100 PCIe 80GB", "a100-pcie"), ("A800", "a800")),
        *(("A100-PCIE-40GB", "a100-pcie-40"), ("A100 SXM4 40G", "a100-40"), ("H100 NVL", "h100-nvl")),
        *(("H100 80GB HBM3", "h100"), ("H100-SXM5", "h100"), ("H100 PCIe", "h100-pcie"), ("H800", "h800")),
        *(("H100-96-500W", "h100-500w"), ("H100 96GB HBM2e", "h100-500w"), ("DGX-GB200", "gb200"), ("GH200", "gh200")),
        *(("V100-32", "v100-32"), ("V100-SXM2-16GB", "v100-16"), ("MI250X-GCD", "mi250x"), ("MI300X", "mi300x")),
    ],
)
def test_a_gpu_by_its_names(name: str, sheet: str) -> None:
    assert machine_of(Row.of({"gpu": name})) is MACHINES[sheet]


REFUSED = [
    ({"gpu": "H100", "notes": "precision=fp8 (tensorwise)"}, "precision must be fp16 or bf16"),
    ({"notes": "precision=NVFP4"}, "precision must be fp16 or bf16"),
    ({"notes": "precision=fp32"}, "precision must contain one of"),
    ({"notes": "mlp=swiglu; experts=64; top_k=2"}, "the model must be dense"),
    ({"model": "Mixtral-8x7B"}, "the model must be dense"),
    ({"gpu": "TPU v5p"}, "gpu must be one whose data sheet is known"),
    ({"gpu": "RTX 4090"}, "gpu must be one whose data sheet is known"),
    ({"global_batch": "some tokens"}, "global_batch must be a number of sequences or of tokens"),
    ({"gpus": "16 nodes"}, "gpus must be a whole number"),
    ({"gpus": "8 DGX H100"}, "gpus must be a whole number"),
    ({"gpus": "2 pods of 256"}, "gpus must be a whole number"),
    ({"gpus": "16 x 8 x 2"}, "gpus must be a whole number"),
    ({"gpus": "8-16"}, "gpus must be a whole number"),
    ({"gpus": "0 x 8"}, "gpus must be a whole number"),
    ({"recompute": "sometimes"}, "recompute must contain one of"),
    ({"layers": "thirty-two"}, "layers must be a whole number"),
    ({"micro_batch": "two"}, "micro_batch must be a whole number"),
    ({"global_batch": "1,5"}, "global_batch must be a whole number"),
    ({"tp": "1/2"}, "tp must be a whole number"),
    ({"tp": "64", "dp": "1", "gpus": "64"}, "heads must be at least tp"),
    ({"kv_heads": "6"}, "heads must be at least tp and a multiple of kv_heads"),
    ({"notes": "precision=tf32"}, "precision must contain one of"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_predicted_is_left_empty_with_the_reason(changes: dict[str, str], reason: str) -> None:
    of = predicted(Row.of({**TITAN, **changes}))
    assert of.step_seconds is None and reason in of.notes and "failed" not in of.notes


SIZES: list[tuple[dict[str, str], dict[str, int]]] = [
    ({"tp": "TP=2", "dp": "DP 4", "pp": "PP: 1"}, {"tp": 2, "dp": 4, "pp": 1}),
    ({"gpus": "2 nodes x 4 GPUs", "dp": "2 x 2"}, {"gpus": 8, "dp": 4}),
    ({"gpus": "2 hosts x 4"}, {"gpus": 8}),
    ({"gpus": "8x H100 80GB"}, {"gpus": 8}),
    ({"gpus": "8 (1 node)", "micro_batch": "MBS 1", "global_batch": "GBS=16"}, {"gpus": 8, "num_micro_batches": 4}),
    ({"global_batch": "4M tokens"}, {"num_micro_batches": 256}),
    ({"global_batch": "~1.5M tokens"}, {"num_micro_batches": 96}),
    ({"global_batch": "131,072 tokens (32 sequences)"}, {"num_micro_batches": 8}),
    ({"global_batch": "4194304"}, {"num_micro_batches": 256}),
    ({"global_batch": "", "notes": "mlp=swiglu; GAS=6"}, {"num_micro_batches": 6}),
    ({"global_batch": "", "notes": "mlp=swiglu; tokens_per_batch=512k"}, {"num_micro_batches": 32}),
    ({"ffn_hidden": "4h"}, {"ffn": 16384}),
    ({"ffn_hidden": "8/3 h"}, {"ffn": 10923}),
    ({"vocab": "32k"}, {"vocab": 32000}),
    ({"zero_stage": "FSDP (ZeRO-2 style)"}, {"zero": 2}),
    ({"zero_stage": "zero1.size=8"}, {"zero": 1}),
    ({"zero_stage": "dist. optimizer"}, {"zero": 1}),
    ({"zero_stage": "\u2713"}, {"zero": 1}),
    ({"vpp": "virtual stages 2", "pp": "2", "dp": "2"}, {"chunks": 2}),
    # What a model's name tells, if what is said agrees.
    ({"heads": "", "ffn_hidden": "", "vocab": ""}, {"heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000}),
    ({"model": "LLaMA 3 8B", "kv_heads": "", "ffn_hidden": "", "vocab": ""}, {"kv_heads": 8, "ffn": 14336}),
    ({"model": "Llama-3-8B", "heads": "16", "kv_heads": "", "ffn_hidden": "11008"}, {"kv_heads": 16}),
    ({"model": "Llama-2 70B", "layers": "80", "hidden": "8192", "heads": "", "kv_heads": ""}, {"kv_heads": 8}),
    ({"model": "llama", "layers": "30", "kv_heads": "", "ffn_hidden": ""}, {"kv_heads": 32, "ffn": 11008}),
]


@pytest.mark.parametrize(("changes", "sizes"), SIZES, ids=[str(changes) for changes, _ in SIZES])
def test_sizes_in_words(changes: dict[str, str], sizes: dict[str, int]) -> None:
    found = Sizes.of(Row.of({**MEGATRON, **changes}))
    assert {name: getattr(found, name) for name in sizes} == sizes


ENGINES: list[tuple[dict[str, str], str, bool]] = [
    ({"recompute": "\u2717"}, "computed again", False),
    ({"recompute": "w/o recomputation"}, "computed again", False),
    ({"recompute": "no_recompute"}, "computed again", False),
    ({"recompute": "full (uniform, 1 layer)"}, "blocks computed again", True),
    ({"recompute": "grad ckpt"}, "blocks computed again", True),
    ({"recompute": "remat"}, "blocks computed again", True),
    ({"recompute": "SAC"}, "scores computed again", True),
    ({"recompute": "selective (core attn)"}, "scores computed again", True),
    ({"sequence_parallel": ""}, "gather and scatter", True),
    ({"sequence_parallel": "", "gpu": "A100"}, "all-reduce", True),
    ({"sequence_parallel": "\u2713"}, "gather and scatter", True),
    ({"sequence_parallel": "\u2717"}, "all-reduce", True),
    ({"notes": "mlp=swiglu; precision=bf16 (FP8 off); attn=FA3"}, "FlashAttention 3", True),
]


# Of kinds of recomputation that are named only to say that they are not used.
RECOMPUTED = [
    *((words, "none") for words in ("not full", "non-full", "not enabled", "full recompute not used", "0 layers")),
    *((words, "none") for words in ("no full, no selective", "full (off)", "full: no", "selective=false", "unused")),
    *(
        (words, "none")
        for words in ("none (full is slower)", "full activation checkpointing disabled", "no (full OOMs)")
    ),
    *((words, "selective") for words in ("selective, not full", "selective not full", "not full but selective")),
    *(
        (words, "selective")
        for words in ("full: no, selective: yes", "selective (full disabled)", "no full; core attn")
    ),
    *(
        (words, "full")
        for words in ("full, not selective", "full (no offload)", "full, offload off", "enabled", "block")
    ),
]


@pytest.mark.parametrize(("words", "kind"), RECOMPUTED)
def test_a_kind_of_recomputation_that_is_negated_is_not_used(words: str, kind: str) -> None:
    assert recomputation_of(Row.of({**MEGATRON, "recompute": words})) == kind


SCHEDULES = [
    *(("1F1B interleave", "interleaved"), ("virtual pipeline", "interleaved"), ("ZB1P", "zb-h1"), ("zb2p", "zb-2p")),
    *(("zero bubble (H1)", "zb-h1"), ("AFAB", "gpipe"), ("1F1B (not interleaved)", "1f1b"), ("DAPPLE", "1f1b")),
]


@pytest.mark.parametrize(("words", "name"), SCHEDULES)
def test_schedules_in_words(words: str, name: str) -> None:
    row = Row.of({**PIPELINE, "notes": f"mlp=swiglu; precision=AMP; schedule={words}"})
    assert lowering_of(row, Sizes.of(row), engine_of(row, Sizes.of(row))).schedule == name


@pytest.mark.parametrize(("changes", "word", "is_said"), ENGINES, ids=[str(changes) for changes, _, _ in ENGINES])
def test_options_in_words(changes: dict[str, str], word: str, is_said: bool) -> None:
    row = Row.of({**MEGATRON, **changes})
    assert (word in "; ".join(engine_of(row, Sizes.of(row)).words)) is is_said


def test_a_network_of_four_times_the_width_has_no_gate() -> None:
    assert Row.of({**MEGATRON, "notes": "", "model": "22B", "ffn_hidden": "16384"}).mlp() == "gelu"
    assert Row.of({**MEGATRON, "notes": "", "model": "22B", "ffn_hidden": "4h"}).mlp() == "gelu"
    assert Row.of({**MEGATRON, "notes": "", "model": "7B"}).mlp() == "swiglu"


def test_a_micro_batch_follows_from_their_number_and_offloading_is_named() -> None:
    of = predicted(Row.of({**MEGATRON, "micro_batch": "", "notes": "mlp=swiglu; grad_accum=2; cpu_offload=yes"}))
    assert "assumed micro_batch 2" in of.notes and "offloading is not modelled" in of.notes
    assert "offloading" not in predicted(Row.of({**MEGATRON, "notes": "mlp=swiglu; offload=none"})).notes


def test_what_a_row_does_not_say_is_what_fits_and_is_named() -> None:
    """Micro-batches are the fastest that fit; recomputation and ZeRO come in where the run would not fit without."""
    of = predicted(Row.of({**MEGATRON, "micro_batch": "", "global_batch": "64"}))
    assert "assumed micro_batch" in of.notes and of.fits
    large = MEGATRON | {"gpu": "A100-40", "zero_stage": "", "recompute": "", "global_batch": "64"}
    of = predicted(Row.of(large))
    assert of.fits and "assumed zero_stage 1" in of.notes
    said = predicted(Row.of({**large, "zero_stage": "0", "recompute": "none"}))
    assert not said.fits and said.step_seconds
    # Context-parallel ranks that a source counts among its replicas.
    both = predicted(Row.of({**MEGATRON, "cp": "2", "dp": "4"}))
    assert "assumed dp 4 to include cp 2" in both.notes and "ring attention over 2 ranks" in both.notes


@pytest.mark.parametrize("changes", [{}, {"cp": "2", "dp": "2"}, {"cp": "4", "dp": "1"}])
def test_a_step_waits_for_the_slowest_of_a_rows_gpus(changes: dict[str, str]) -> None:
    """Also where some of them share sequences."""
    waited = []
    with patch.object(Machine, "slowest_of", autospec=True) as slowest:
        slowest.side_effect = lambda machine, num_ranks: waited.append(num_ranks) or machine
        costs_of(MEGATRON, **changes)
    assert set(waited) == {int(MEGATRON["gpus"])}


def test_a_block_of_torchtitan_keeps_every_second_product() -> None:
    """x, q, v, attention's output and statistics, gate, and the product behind the gate; the loss as torch has it."""
    sizes, costs = costs_of(TITAN, global_batch="16")
    tokens = 2 * 8192
    each = 2 * (3 * 4096 + 1024 + 14336 + 4096) + 4 * 32
    assert costs.activations[1].saved == tokens * each
    last = costs.activations[sizes.layers - 1]
    assert last.saved == tokens * (each + 2 * 2 * 4096 + 4 * 128256)
    assert last.working[Kind.F] - costs.activations[1].working[Kind.F] == tokens * 6 * 128256
    # Whole blocks, as autograd keeps them: four of 4,096, q, k, v, three of 14,336.
    _, whole = costs_of(TITAN, recompute="none")
    kept = 2 * (4 * 4096 + 4096 + 2 * 1024 + 4096 + 3 * 14336) + 4 * 32
    assert whole.activations[1].saved == tokens * kept
    # Eager norms keep a copy in float32 and one before the weight each; an eager gate its activation.
    _, eager = costs_of(TITAN, recompute="none", notes="mlp=swiglu; precision=bf16")
    assert eager.activations[1].saved == tokens * (kept - 4 * 32 + 2 * 6 * 4096 + 2 * 14336)


def test_computing_again_and_eager_kernels_take_time() -> None:
    seconds = {
        name: predicted(Row.of({**TITAN, "recompute": recompute, "notes": notes})).step_seconds or 0.0
        for name, recompute, notes in (
            ("none", "none", "mlp=swiglu; compile=yes"),
            ("op", "selective", "mlp=swiglu; compile=yes"),
            ("full", "full", "mlp=swiglu; compile=yes"),
            ("eager", "selective", "mlp=swiglu"),
        )
    }
    assert seconds["none"] < seconds["op"] < seconds["full"]
    assert seconds["eager"] > seconds["op"]


def test_the_loss_of_each_engine_keeps_its_bytes_per_logit() -> None:
    """Megatron 4; nanotron 4, with a third tensor in forward; FSDP of eager torch 6; llm-foundry the logits alone."""
    found = {}
    for source in ("Megatron-LM", "nanotron", "HF accelerate FSDP", "mosaicml/llm-foundry"):
        zero = {"zero_stage": "3", "tp": "1", "dp": "8"} if "F" in source or "mosaic" in source else {}
        row = Row.of({**MEGATRON, "source": source, "recompute": "full", "micro_batch": "1", **zero})
        found[source] = engine_of(row, Sizes.of(row)).engine.loss_bytes
    assert found["nanotron"] == (4, 6, 2)
    assert found["HF accelerate FSDP"] == (6, 4, 8)
    assert found["mosaicml/llm-foundry"] == (2, 0, 2)


def test_ends_without_layers_hold_their_tables_alone() -> None:
    row = Row.of({**MEGATRON, "tp": "1", "pp": "4", "dp": "2", "layers": "14", "notes": "mlp=gelu4h; schedule=zbv"})
    sizes = Sizes.of(row)
    of = lowering_of(row, sizes, engine_of(row, sizes))
    assert of.counts_ends is False
    row = Row.of({**MEGATRON, "tp": "1", "pp": "4", "dp": "2", "layers": "6", "notes": "mlp=gelu4h; schedule=zbv"})
    sizes = Sizes.of(row)
    of = lowering_of(row, sizes, engine_of(row, sizes))
    assert of.counts_ends
    names = [
        [spec.name for spec in chunk_specs(of.config.model, 1, of.layout.layers, chunk)]
        for chunk in range(len(of.layout.layers))
    ]
    tables = [[name for name in chunk if "layers" not in name] for chunk in names]
    assert tables[0] and tables[-1] and not any(tables[1:-1])
    _, costs = costs_of(row.columns, notes="mlp=gelu4h; schedule=zbv")
    # Rank 1 holds two layers and no table, as ranks 2 and 3.
    assert costs.resident[1] == costs.resident[2]
    assert costs.resident[0] > (2 + 4 + 12 / 2) * 32000 * 4096


def test_a_fault_of_ours_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("benchmarks.planner.published.predict.machine_of", broken)
    of = predicted(Row.of(TITAN))
    assert of.step_seconds is None and of.notes.startswith("the predictor failed: KeyError")


def engine_for(**changes: str) -> Engine:
    row = Row.of({**MEGATRON, **changes})
    return engine_of(row, Sizes.of(row)).engine


def test_products_are_apart_where_the_models_code_has_them_apart() -> None:
    """torchtitan: q, k, v, gate, up; InternEvo: gate and up; Megatron, nanotron: none. Backward adds gradients."""
    titan = engine_of(Row.of(TITAN), Sizes.of(Row.of(TITAN))).engine
    assert (titan.splits_heads, titan.splits_gate) == (True, True)
    intern = engine_for(source="InternLM/InternEvo")
    assert (intern.splits_heads, intern.splits_gate) == (False, True)
    for source in ("Megatron-LM", "nanotron"):
        assert not engine_for(source=source).splits_heads and not engine_for(source=source).splits_gate
    _, apart = costs_of(TITAN)
    row = Row.of(TITAN)
    of = lowering_of(row, Sizes.of(row), engine_of(row, Sizes.of(row)))
    joined = replace(of.engine.engine, splits_heads=False, splits_gate=False)
    whole = engine_costs(of.config, of.layout, of.with_blocks(of.plan(1)), machine_of(row), joined)
    added = 3 * 3 * 2 * 8192 * 4096 * 2 / MACHINES["h100"].memory_bytes_per_s
    assert apart.compute[Kind.F, 1] > whole.compute[Kind.F, 1]
    assert apart.compute[Kind.B, 1] - whole.compute[Kind.B, 1] > added


def test_internevo_has_kernels_of_apex_and_gradients_in_16_bits() -> None:
    intern, again = (engine_for(source="InternEvo", recompute=recompute) for recompute in ("none", "full"))
    assert (intern.gradient_item, intern.reduced_item, intern.added_item, intern.once_item) == (2, 2, 6, 10)
    assert intern.steps is not None and again.steps is not None
    assert intern.steps.norm_backward - again.steps.norm_backward == 12 and not intern.steps.rotation
    assert intern.loss_bytes == (2, 0, 2) and not intern.wide_loss


def test_pipelines_of_deepspeed_in_bfloat16_sum_whole_gradients_in_float32_behind_the_last_backward() -> None:
    said = {**PIPELINE, "source": "Megatron-DeepSpeed", "zero_stage": "1", "pp": "2"}
    row = Row.of(said)
    of = engine_of(row, Sizes.of(row))
    assert "reductions after backward" in of.words and of.engine.reduces_whole
    assert (of.engine.gradient_item, of.engine.reduced_item, of.engine.added_item) == (6, 4, 18)
    for changes in ({"notes": "mlp=swiglu; precision=fp16"}, {"pp": "1", "dp": "4"}):
        narrow = engine_of(Row.of({**said, **changes}), Sizes.of(Row.of({**said, **changes}))).engine
        assert (narrow.gradient_item, narrow.reduced_item, narrow.added_item) == (2, 2, 6) and not narrow.reduces_whole


def test_a_ring_adds_its_steps_results_and_attends_to_one_ranks_keys_at_a_time() -> None:
    _, one = costs_of(MEGATRON)
    _, two = costs_of(MEGATRON, cp="2", dp="2")
    # Half of the tokens takes more than half of the time: outputs and gradients are added, kernels are shorter.
    queries = keys = 2048 * 2048
    added = 2 * (7 * queries + 4 * keys + 6 * queries + 12 * keys)
    more = sum(two.compute[kind, 0] - one.compute[kind, 0] / 2 for kind in (Kind.F, Kind.B))
    assert more > 32 * added / MACHINES["h100"].memory_bytes_per_s


def test_what_exchanges_slow_down_in_a_pipeline_is_a_part_of_the_step_once() -> None:
    row = Row.of({**PIPELINE, "zero_stage": "1", "global_batch": "16"})
    sizes = Sizes.of(row)
    of, machine = lowering_of(row, sizes, engine_of(row, sizes)), replace(machine_of(row), reduce_share=0.25)
    plan = of.plan(8)
    costs = engine_costs(of.config, of.layout, plan, machine, of.engine.engine)
    slowed = slowed_once(costs, plan)
    exchanged = [
        sum(
            costs.reductions.get(bucket.index, 0.0) + costs.gathers.get(bucket.index, 0.0)
            for bucket in plan.buckets
            if plan.chunks[bucket.chunks[0]].rank == rank
        )
        for rank in range(2)
    ]
    assert slowed.reduce_share == 0.0 and slowed.step - costs.step == pytest.approx(0.25 * max(exchanged))


def test_a_run_that_does_not_say_that_it_recomputes_fits_the_whole_memory() -> None:
    """What does not fit what libraries leave, but the memory, is taken to have run without."""
    silent = MEGATRON | {"gpu": "A100-40", "recompute": "", "seq_len": "4608"}
    said = predicted(Row.of({**silent, "recompute": "none"}))
    whole = 40 * 2**30
    assert said.peak_bytes is not None and 0.94 * whole < said.peak_bytes < whole and said.fits is False
    of = predicted(Row.of(silent))
    assert of.fits is True and of.step_seconds == said.step_seconds and "assumed recompute none" in of.notes


def test_userbuffers_take_processors_from_the_products_beside_them() -> None:
    """NeMo's scatters keep 24 and 16 of 132 processors from attention's output and down, the last quarter is open."""
    nemo = TITAN | {"source": "NVIDIA NeMo", "tp": "4", "dp": "2", "zero_stage": "1", "recompute": "none"}
    row = Row.of(nemo)
    sizes = Sizes.of(row)
    of = lowering_of(row, sizes, engine_of(row, sizes))
    assert of.engine.engine.beside is not None and "exchanges overlap with products" in of.engine.words
    machine, plan = machine_of(row), of.plan(1)
    found = {
        beside: engine_costs(of.config, of.layout, plan, machine, replace(of.engine.engine, beside=beside)).compute
        for beside in (None, of.engine.engine.beside)
    }
    plain, beside = found.values()
    rows, ffn = 2 * 8192, 14336 // 4
    output, down = (machine.product_seconds(rows, 4096, inner, 2, "bfloat16") for inner in (1024, ffn))
    open_ends = 2 * machine.link(4, 1).exchange_seconds(rows * 4096 * 2, 4) / 4
    more = 32 * (output * 24 / 108 + down * 16 / 116)
    assert more < plain[Kind.F, 0] * 0.1
    assert more <= (beside[Kind.F, 0] - plain[Kind.F, 0]) <= more + 32 * open_ends + 1e-9
    assert beside[Kind.B, 0] > plain[Kind.B, 0]
    # Asynchronous tp copies.
    titan = Row.of(TITAN | {"tp": "4", "dp": "2", "notes": "mlp=swiglu; async tp"})
    assert engine_of(titan, Sizes.of(titan)).engine.beside is None


def test_scatters_of_torchs_asynchronous_tp_are_added_by_kernels_and_sums_are_not_fused() -> None:
    row = Row.of(TITAN | {"tp": "4", "dp": "2", "recompute": "none", "notes": "mlp=swiglu; async tp"})
    sizes, machine = Sizes.of(row), machine_of(row)
    of = lowering_of(row, sizes, engine_of(row, sizes))
    plan, ours = of.plan(4), replace(of.engine.engine, adds_parts=False)
    machine = machine.slowest_of(sizes.gpus)
    apart, fused = (engine_seconds(of.config, of.layout, plan, machine, engine) for engine in (of.engine.engine, ours))
    # Of a block: attention's output and down forward; backward the sums of q, k, v and of gate, up.
    tokens, hidden = of.config.train.micro_batch_size * of.config.train.seq_len, of.config.model.hidden_size
    added = machine.other_seconds(Work(0, 2 * (tokens + tokens // 4) * hidden), "bfloat16")
    assert apart[Kind.F, 1].compute - fused[Kind.F, 1].compute == pytest.approx(2 * added)
    assert apart[Kind.F, 1].exchange == fused[Kind.F, 1].exchange
    ring, left = machine.link(4, 1).gather_seconds(tokens * hidden * 2, 4), fused[Kind.B, 1].exchange
    assert apart[Kind.B, 1].compute == fused[Kind.B, 1].compute
    assert left < 2 * ring <= apart[Kind.B, 1].exchange < 2 * ring + left
    # Only where exchanges are fused, and not of NeMo's.
    plain = Row.of(TITAN | {"tp": "4", "dp": "2", "notes": "mlp=swiglu"})
    nemo = Row.of(TITAN | {"source": "NeMo", "zero_stage": "1", "tp": "4", "dp": "2"})
    assert not any(engine_of(other, Sizes.of(other)).engine.adds_parts for other in (plain, nemo))


def test_recipes_of_nvidia_keep_and_reduce_gradients_in_16_bits() -> None:
    """Llama 3.1 8B on 8 H100: a rank reported 44.3 GB of state and a peak of 70.8 GB (dgxc-benchmarking, v25.04)."""
    llama = TITAN | {"source": "NVIDIA/dgxc-benchmarking NeMo", "gpu": "H100-SXM", "cp": "2", "dp": "4", "tp": "1"}
    row = Row.of(llama | {"zero_stage": "1", "micro_batch": "1", "global_batch": "128", "recompute": "none"})
    sizes = Sizes.of(row)
    of = engine_of(row, sizes)
    assert (of.engine.gradient_item, of.engine.reduced_item, of.engine.added_item) == (2, 2, 0)
    lowered = lowering_of(row, sizes, of)
    held = engine_costs(lowered.config, lowered.layout, lowered.plan(2), machine_of(row), of.engine).resident[0]
    assert held == pytest.approx(44.27e9, rel=0.01)
    found = predicted(row)
    assert found.fits and found.peak_bytes == pytest.approx(70.83e9, rel=0.08)
    megatron = Row.of(llama | {"source": "Megatron-LM", "zero_stage": "1"})
    assert engine_of(megatron, Sizes.of(megatron)).engine.gradient_item == 4
