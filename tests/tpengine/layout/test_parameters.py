"""Rung: pure. The parameter table: blocks tile the tensors, counts add up, buckets hold everything once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.architectures import llama
from tpengine.config import ModelConfig
from tpengine.config.presets import tiny_moe
from tpengine.layout.parameters import (
    all_pieces,
    bucket_layouts,
    decays,
    gradients_of,
    layer_specs,
    num_matmul_parameters,
    num_parameters,
    pieces_of,
    sliced_gradients,
    stage_specs,
)
from tpengine.trust import permit_file

MODELS = st.builds(
    ModelConfig,
    hidden_size=st.just(48),
    num_layers=st.integers(1, 5),
    num_heads=st.just(12),
    num_kv_heads=st.sampled_from([1, 2, 6, 12]),
    ffn_size=st.just(60),
    vocab_size=st.integers(2, 300),
    tie_embeddings=st.booleans(),
)


@settings(deadline=None, derandomize=True)
@given(MODELS, st.sampled_from([1, 2, 4, 6, 12]))
def test_blocks_tile_every_tensor_replicas_times(model: ModelConfig, tp: int) -> None:
    for spec in stage_specs(model, tp, 0, model.num_layers):
        covered: dict[tuple[int, ...], int] = {}
        for rank in range(tp):
            offset, size = spec.block(tp, rank)
            corner = tuple(offset)
            covered[corner] = covered.get(corner, 0) + 1
            assert all(o + s <= n for o, s, n in zip(offset, size, spec.shape, strict=True))
        holders = tp if spec.shard_dim is None else spec.replicas
        assert set(covered.values()) == {holders}
        assert len(covered) * spec.local_numel(tp) == math.prod(spec.shape)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (1, 2), (2, 4), (1, 8), (4, 8)])
def test_every_expert_lies_once_on_the_ranks_that_share_them(tp: int, ep: int) -> None:
    model = tiny_moe().model
    for spec in stage_specs(model, tp, 0, 1, ep):
        pieces = all_pieces(spec, tp)
        assert len({piece.holder for piece in pieces}) == len(pieces)
        if ".experts." not in spec.name:
            assert (spec, pieces) == (
                next(of for of in stage_specs(model, tp, 0, 1) if of.name == spec.name),
                pieces_of(spec, tp, range(tp)),
            )
            continue
        # Whole experts where ranks share them, neighbours in the order of ranks; else a share of every one.
        assert sum(math.prod(piece.block[1]) for piece in pieces) == math.prod(spec.shape)
        assert spec.local_numel(tp) * len(pieces) == math.prod(spec.shape)
        if ep > 1:
            firsts = [piece.block[0] for piece in pieces]
            assert firsts == [(rank * spec.shape[0] // ep, 0, 0) for rank in range(ep)]
        assert spec.reduce_over == (("edp",) if ep > tp else ("dp",))
        held = [piece for of in range(max(tp, ep)) for piece in pieces_of(spec, tp, range(of % tp, of % tp + 1), of)]
        assert sorted(piece.block for piece in held) == sorted(piece.block for piece in pieces)


@settings(deadline=None, derandomize=True)
@given(MODELS, st.data())
def test_stages_hold_every_parameter_once_but_tied_embeddings(model: ModelConfig, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, model.num_layers - 1))) if model.num_layers > 1 else [])
    bounds = [0, *cuts, model.num_layers]
    whole = [spec.name for spec in stage_specs(model, 2, 0, model.num_layers)]
    staged = [s.name for first, last in itertools.pairwise(bounds) for s in stage_specs(model, 2, first, last)]
    copies = ["embed_tokens.weight"] if model.tie_embeddings and len(bounds) > 2 else []
    assert sorted(staged) == sorted(whole + copies)


@settings(deadline=None, derandomize=True)
@given(MODELS, st.sampled_from([1, 2, 4]), st.integers(1, 100_000))
def test_buckets_hold_each_gradient_once_and_complete_in_order(model: ModelConfig, tp: int, limit: int) -> None:
    specs = stage_specs(model, tp, 0, model.num_layers)
    layouts = bucket_layouts(gradients_of(specs, tp), limit, 4)
    names = [name for layout in layouts for name in layout.names]
    assert sorted(names) == sorted(spec.name for spec in specs)
    by_name = {spec.name: spec for spec in specs}
    backward = [spec.name for spec in reversed(specs)]
    completions = []
    for layout in layouts:
        assert {by_name[name].reduce_over for name in layout.names} == {layout.reduce_over}
        assert list(layout.numels) == [by_name[name].local_numel(tp) for name in layout.names]
        places = [backward.index(name) for name in layout.names]
        assert places == sorted(places)
        completions.append(places[-1])
        # closed as soon as it is full: without its last parameter it was below the limit
        assert 4 * sum(layout.numels[:-1]) < limit
    assert completions == sorted(completions)


@settings(deadline=None, derandomize=True)
@given(MODELS, st.integers(1, 40_000_000))
def test_tapered_buckets_halve_what_is_left(model: ModelConfig, limit: int) -> None:
    """Each is closed before it holds more than what comes after it and one more gradient, down to 1 MB."""
    gradients = gradients_of(stage_specs(model, 1, 0, model.num_layers), 1)
    # Large enough that there is something to halve.
    large = [replace(gradient, numel=gradient.numel * 1000) for gradient in gradients]
    layouts = bucket_layouts(large, limit, 4, tapered=True)
    assert sorted(name for layout in layouts for name in layout.names) == sorted(g.name for g in large)
    order = [gradient.name for gradient in reversed(large)]
    numel = {gradient.name: gradient.numel for gradient in large}
    for layout in layouts:
        before_last = layout.names[:-1]
        if before_last:
            left = sum(numel[name] for name in order[order.index(before_last[-1]) + 1 :])
            assert 4 * sum(numel[name] for name in before_last) < min(limit, max(4 * left, 1_000_000))


@settings(deadline=None, derandomize=True)
@given(MODELS, st.sampled_from([1, 2, 4]), st.integers(1, 100_000), st.booleans())
def test_packed_gradients_lie_behind_each_other_in_one_bucket(
    model: ModelConfig, tp: int, limit: int, sliced: bool
) -> None:
    """However small buckets are; but where ranks share KV heads, Q is summed over others and lies apart."""
    specs = stage_specs(model, tp, 0, model.num_layers)
    gradients = sliced_gradients(specs, tp) if sliced else gradients_of(specs, tp, packed=True)
    layouts = bucket_layouts(gradients, limit, 4, packed=True)
    names = sorted(name for layout in layouts for name in layout.names)
    assert names == sorted(spec.name for spec in specs)
    packs = set()
    for layout in layouts:
        for pack in layout.packs:
            first = layout.names.index(pack[0])
            assert layout.names[first : first + len(pack)] == pack
            packs.add(tuple(name.removesuffix(".weight") for name in pack))
    qkv = [f"self_attn.{name}_proj" for name in "qkv"][1 if tp > model.num_kv_heads and not sliced else 0 :]
    expected = {
        tuple(f"layers.{layer}.{name}" for name in part)
        for layer in range(model.num_layers)
        for part in (qkv, ["mlp.gate_proj", "mlp.up_proj"])
    }
    assert packs == expected
    # Not declared unless asked for, wherever they lie.
    assert not any(layout.packs for layout in bucket_layouts(gradients, limit, 4, in_order_of_use=True))


def test_counts_of_a_model_known_by_hand() -> None:
    model = ModelConfig(
        hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_size=16, vocab_size=10, tie_embeddings=False
    )
    attention = 8 * 8 + 2 * (4 * 8) + 8 * 8
    layer = attention + 3 * 8 * 16 + 2 * 8
    assert num_parameters(model) == 2 * layer + 2 * (10 * 8) + 8
    assert num_matmul_parameters(model) == 2 * (layer - 16) + 10 * 8
    tied = ModelConfig(**{**model.__dict__, "tie_embeddings": True})
    assert num_parameters(tied) == num_parameters(model) - 10 * 8
    assert num_matmul_parameters(tied) == num_matmul_parameters(model)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("input_layernorm.weight", ("dp", "tp")),
        ("self_attn.q_proj.weight", ("dp",)),
        ("self_attn.k_proj.weight", ("dp", "replica")),
        ("mlp.down_proj.weight", ("dp",)),
    ],
)
def test_axes_over_which_gradients_are_partial(name: str, axes: tuple[str, ...]) -> None:
    specs = {spec.name: spec for spec in layer_specs(ModelConfig(num_kv_heads=2), 4, 3)}
    assert specs[f"layers.3.{name}"].reduce_over == axes


def test_weight_decay_passes_over_vectors_and_what_the_architecture_names(tmp_path: Path) -> None:
    source = Path(llama.__file__).read_text()
    assert source.count("ARCHITECTURE = Architecture(") == 1
    own = tmp_path / "own.py"
    own.write_text(source + '\nARCHITECTURE = replace(ARCHITECTURE, undecayed=("embed_*", "*.k_proj.weight"))\n')
    permit_file(own)
    plain = ModelConfig()
    model = replace(plain, architecture=str(own))
    decayed = {spec.name for spec in stage_specs(plain, 1, 0, 4) if decays(plain, spec)}
    fewer = {spec.name for spec in stage_specs(model, 1, 0, 4) if decays(model, spec)}
    assert "embed_tokens.weight" in decayed and not any("norm" in name for name in decayed)
    assert decayed - fewer == {"embed_tokens.weight", *(f"layers.{i}.self_attn.k_proj.weight" for i in range(4))}
    assert num_parameters(model) == num_parameters(plain) and num_matmul_parameters(model) == num_matmul_parameters(
        plain
    )
