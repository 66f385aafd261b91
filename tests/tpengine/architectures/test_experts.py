"""Rung: pure, and one process. Experts as their description has them: names, numbers, files, what is refused.

The oracle is transformers: what its models save, experts apart on disk, is read, written and loaded again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures.drawn import EXPERTS, drawn_config
from support.architectures.runs import saved
from support.architectures.transformers_models import built, config_json, in_files, tensor_of
from torch import Tensor

from tpengine.architectures.experts import Experts
from tpengine.architectures.part import Exchange, Sizes
from tpengine.architectures.registry import architecture_of, check_architecture, layer_halves, model_of
from tpengine.cli import main
from tpengine.commands import weights
from tpengine.commands.weights import export
from tpengine.config import Config, ParallelConfig, num_shards_of, validate
from tpengine.config.presets import preset_config, qwen3_30b_a3b, tiny_moe
from tpengine.config.settings import ModelDetails, ParameterGroup
from tpengine.config.toml import dump_toml, load_toml
from tpengine.hugging_face.directory import open_directory
from tpengine.hugging_face.names import stored_of, wanted
from tpengine.hugging_face.read import BoxReader
from tpengine.layout.flops import step_flops
from tpengine.layout.parameters import num_matmul_parameters, num_parameters, stage_specs

ALL_PARTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [1], "attention_bias": True},
    "mixtral": {},
}


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def file_with(directory: Path, part: str) -> tuple[Path, str]:
    """The first tensor whose name has such a part, and its file."""
    found = ((path, name) for path in sorted(directory.glob("*.safetensors")) for name in load_file(path))
    return next((path, name) for path, name in found if part in name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture", EXPERTS)
def test_names_and_shapes_are_those_that_transformers_saves(architecture: str, seed: int) -> None:
    """With layers of both kinds, of one kind, and a tied head."""
    theirs = built(drawn_config(architecture, seed))
    model = model_of(config_json(theirs.config))
    check_architecture(model)
    saved_by_theirs = in_files(theirs, theirs.state_dict())
    if model.tie_embeddings:
        del saved_by_theirs["lm_head.weight"]
    assert {of.name: of.shape for of in wanted(model)} == {n: tuple(t.shape) for n, t in saved_by_theirs.items()}
    assert num_parameters(model) == sum(tensor.numel() for tensor in saved_by_theirs.values())


@pytest.mark.parametrize("architecture", EXPERTS)
def test_an_import_is_given_back_byte_for_byte_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """One expert in float32 among those in bfloat16, too; a checkpoint has one tensor of all experts."""
    from transformers import AutoModelForCausalLM

    theirs = saved(architecture, tmp_path / "theirs", torch.bfloat16, **ALL_PARTS[architecture])
    path, odd = file_with(tmp_path / "theirs", ".experts.2.")
    tensors = load_file(path)
    save_file({**tensors, odd: tensors[odd].float()}, path, {"format": "pt"})
    monkeypatch.setattr(weights, "LARGEST_FILE_BYTES", 30_000)
    # So small that one expert is several blocks.
    monkeypatch.setattr("tpengine.hugging_face.write.BLOCK_ELEMENTS", 100)
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "run"), "--train.seq-len", "32"]) == 0
    held = {of: t for f in (tmp_path / "run" / "checkpoints").rglob("*.safetensors") for of, t in load_file(f).items()}
    stacked = {name: tensor for name, tensor in held.items() if ".experts." in name}
    num_layers = sum(".gate.weight" in name for name in held)
    assert len(stacked) == 3 * num_layers and all(tensor.dim() == 3 for tensor in stacked.values())
    export(tmp_path / "run", None, tmp_path / "out")
    got, want = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "theirs")
    assert got.keys() == want.keys()
    assert all(got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]) for name in want)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("architecture", EXPERTS)
def test_a_rank_reads_its_box_of_every_expert(tmp_path: Path, architecture: str) -> None:
    """Of F, over tp; of some experts, as where they are cut over ranks; and no byte besides."""
    theirs = saved(architecture, tmp_path, torch.float32, **ALL_PARTS[architecture])
    model = model_of(config_json(theirs.config))
    whole = in_files(theirs, theirs.state_dict())
    with BoxReader(open_directory(tmp_path)) as reader:
        for name, (spec, stored) in stored_of(model).items():
            if len(spec.shape) < 3:
                continue
            want = tensor_of(model, spec, whole)
            (_, rows, columns), first = spec.shape, int("down" in name)
            for offset, size in (
                spec_of.block(2, 1) for spec_of in stage_specs(model, 2, 0, model.num_layers) if spec_of.name == name
            ):
                assert offset == ((0, 0, columns // 2) if first else (0, rows // 2, 0))
                before = reader.source.bytes_read
                got = reader.read(stored, offset, size, torch.float32)
                assert torch.equal(got, want[:, offset[1] :, offset[2] :])
                assert reader.source.bytes_read - before == got.nbytes
            some = reader.read(stored, (1, 0, 0), (2, rows, columns), torch.float64)
            assert torch.equal(some, want[1:3].double())


def test_the_presets_parameters_are_those_of_the_published_model() -> None:
    """30.5e9 and 3.3e9, counted by transformers without memory; a token meets 8 of 128 experts."""
    import transformers

    model = qwen3_30b_a3b().model
    # What its config.json has; the rest is transformers' default.
    given: dict[str, Any] = dict(num_hidden_layers=48, head_dim=128, norm_topk_prob=True, rope_theta=1e6)
    theirs = transformers.Qwen3MoeConfig(**given)
    with torch.device("meta"):
        parameters = dict(transformers.AutoModelForCausalLM.from_config(theirs).named_parameters())
    num = sum(of.numel() for of in parameters.values())
    experts = sum(of.numel() for name, of in parameters.items() if ".experts." in name)
    vectors = sum(of.numel() for of in parameters.values() if of.dim() == 1)
    table = parameters["model.embed_tokens.weight"].numel()
    assert num_parameters(model) == num == 30_532_122_624
    active = num_matmul_parameters(model) + table + vectors
    assert active == num - experts + experts * 8 // 128 == 3_353_032_704
    assert model == replace(model_of(config_json_of(theirs)), architecture="qwen3_moe")


def config_json_of(config: Any) -> Any:
    from tpengine.architectures.describe import ConfigJson

    return ConfigJson({**json.loads(config.to_json_string(use_diff=False)), "architectures": ["Qwen3MoeForCausalLM"]})


def test_flops_are_those_of_the_chosen_experts() -> None:
    """Forward and twice as many backward, less the weight gradients of frozen experts."""
    config = validate(replace(tiny_moe(), parallel=ParallelConfig(1, 1, 1)), 1)
    model, train = config.model, config.train
    tokens = train.seq_len * train.micro_batch_size * train.num_micro_batches
    d, f, num = model.hidden_size, 192, 8
    scores = 4 * model.hidden_size * train.seq_len
    of_token = 2 * (4 * d * d + num * d + 2 * 3 * d * f) + scores
    forward = tokens * (model.num_layers * of_token + 2 * d * model.vocab_size)
    assert step_flops(config, causal_half=False) == 3 * forward
    groups = (ParameterGroup("*.experts.*", frozen=True),)
    frozen = replace(config, optim=replace(config.optim, groups=groups))
    left_out = tokens * model.num_layers * 2 * 2 * 3 * d * f
    assert step_flops(frozen, causal_half=False) == 3 * forward - left_out


def test_experts_are_cut_over_tp_within_each_and_the_router_is_whole() -> None:
    specs = {spec.name.split("mlp.")[-1]: spec for spec in stage_specs(tiny_moe().model, 2, 0, 1)}
    assert specs["gate.weight"].shard_dim is None and specs["gate.weight"].reduce_over == ("dp", "tp")
    assert specs["experts.up_proj.weight"].block(2, 1) == ((0, 96, 0), (8, 96, 128))
    assert specs["experts.down_proj.weight"].block(2, 1) == ((0, 0, 96), (8, 128, 96))
    assert specs["experts.down_proj.weight"].reduce_over == ("dp",)
    up, down = (specs[f"experts.{name}_proj.weight"].init_std for name in ("up", "down"))
    assert up is not None and down is not None and up > down > 0


def test_shared_experts_are_a_network_of_every_token() -> None:
    """A gate of one row; their flops count for every token, and their gate and up are one matrix."""
    base = tiny_moe().model
    details = replace(base.details, shared_expert_size=64, gates_shared_expert=True, router_bias=True)
    part = Experts.of(replace(base, details=details))
    shapes = part.shapes(base)
    assert shapes["shared_expert.down_proj.weight"] == (128, 64)
    assert shapes["shared_expert_gate.weight"] == (1, 128)
    assert shapes["gate.e_score_correction_bias"] == (8,)
    met = part.elements_per_token(base)
    assert met["shared_expert.up_proj.weight"] == 64 * 128 and met["experts.up_proj.weight"] == 2 * 192 * 128
    assert part.behind() == {"shared_expert.up_proj.weight": "shared_expert.gate_proj.weight"}


def test_what_grows_with_the_load_is_what_experts_compute() -> None:
    part, config = Experts.of(tiny_moe().model), validate(replace(tiny_moe(), parallel=ParallelConfig(2, 1, 1)), 2)
    even = Sizes.of(config, 2)
    work = [product.work(even) for product in part.products(even)]
    assert [of.flops for of in work] == [2 * 2 * even.tokens * 192 * 128, 2 * even.tokens * 2 * 128 * 96]
    # Each expert's matrix is read once.
    assert work[1].memory_bytes == 4 * (2 * even.tokens * (128 + 96) + 8 * 128 * 96)
    # Where each expert is cut over tp all ranks multiply the same rows, whatever the load.
    assert part.products(replace(even, load=1.5)) == part.products(even)
    # Two ranks that share experts get as many rows in the mean, each of its own tokens; no rank more than all of them.
    shared = replace(even, ep=2)
    for load, times in ((1.0, 1.0), (1.5, 1.5), (9.0, 2.0)):
        hottest = replace(shared, load=load)
        products = part.products(hottest)
        assert [product.rows for product in products] == [times * even.own_tokens * 2] * 2
        assert [(of.columns, of.inner, of.num_weights) for of in products] == [(2 * 192, 128, 4), (128, 192, 4)]
        # There and back; a rank sends half of the rows in the mean.
        sent = [of.work(2).link_bytes for of in part.forward(hottest) if isinstance(of, Exchange)]
        assert sent == [times * even.own_tokens * 2 * 128 * 4 // 2] * 2
    kept = {of.name: of.num_bytes for of in part.kept(shared)}
    grown = {of.name: of.num_bytes for of in part.kept(replace(shared, load=1.5))}
    assert grown["experts' gate, up, product"] == 1.5 * kept["experts' gate, up, product"]
    assert grown["its gathered rows"] == kept["its gathered rows"] == even.x


def test_in_exact_mode_the_parts_of_all_shards_come_back() -> None:
    """All tp ranks route all tokens; of each row that travels 4 come back, and are kept."""
    part, base = Experts.of(tiny_moe().model), replace(tiny_moe(), parallel=replace(ParallelConfig(2, 1, 1), ep=2))
    fast, exact = (
        Sizes.of(validate(replace(base, train=replace(base.train, reduction=reduction)), 2), 2)
        for reduction in ("fast", "exact")
    )
    assert (fast.partials, exact.partials) == (0, 4)
    assert part.tokens(exact) == exact.tokens == 2 * part.tokens(fast)
    rows = exact.own_tokens * 2 * 128 * 4
    assert [of.num_bytes for of in part.exchanges(fast)] == [rows, rows]
    # Then the gather of tokens, and their sum, of all parts that are cut over tp.
    assert [of.num_bytes for of in part.exchanges(exact)] == [rows, 4 * rows, *2 * [exact.tokens * 128 * 4]]
    kept = {of.name: of.num_bytes for of in part.kept(exact)}
    assert kept["experts' rows and outputs"] == 5 * rows
    assert kept["its gathered rows"] == exact.tokens * 128 * 4


def test_numbers_of_experts_come_back_from_toml_and_a_dense_model_has_none(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(tiny_moe()))
    assert load_toml(path, Config()) == tiny_moe()
    text = dump_toml(Config(model=replace(Config().model, details=ModelDetails(head_size=8))))
    assert "expert" not in text and "router" not in text


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (dict(experts_per_token=9), "experts_per_token 9, num_experts 8: use experts_per_token 8"),
        (dict(expert_groups=3), "expert_groups 3, num_experts 8: use expert_groups 2 or 4"),
        (dict(expert_groups=8, groups_per_token=4), "expert_groups 8, num_experts 8: use expert_groups 4"),
        (dict(expert_groups=4, experts_per_token=3), "use groups_per_token 2 to 4"),
        (dict(num_experts=5000), "num_experts 5000: use num_experts 4096 or fewer"),
        (dict(expert_ffn_size=0), "expert_ffn_size 0"),
        (dict(expert_ffn_size=190), "expert_ffn_size must be divisible by tp: expert_ffn_size 190, tp 4"),
        (dict(shared_expert_size=6), "shared_expert_size must be divisible by tp: shared_expert_size 6, tp 4"),
        (dict(gates_shared_expert=True), "shared_expert_size 0: use gates_shared_expert false"),
        (dict(has_experts=(True, False)), "has_experts must be one of each layer"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(details: dict[str, Any], said: str) -> None:
    base = replace(tiny_moe(), parallel=ParallelConfig(4, 1, 1))
    model = replace(base.model, details=replace(base.model.details, **details))
    with pytest.raises(ValueError, match="use ") as refused:
        validate(replace(base, model=model), 4)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_experts_that_an_architecture_has_not_are_refused() -> None:
    model = tiny_moe().model
    check_architecture(model)
    check_architecture(replace(model, details=replace(model.details, has_experts=(False,) * model.num_layers)))
    with pytest.raises(ValueError, match=r"num_experts: that is 8, and llama has none: use --model.architecture qwen3"):
        check_architecture(replace(model, architecture="llama"))


def test_dropout_inside_experts_is_refused() -> None:
    base = tiny_moe()
    with pytest.raises(ValueError, match=r"mlp_dropout 0\.1 with num_experts 8: use model\.mlp_dropout 0"):
        validate(replace(base, model=replace(base.model, mlp_dropout=0.1)), 1)


def test_the_width_of_networks_that_are_not_there_bounds_nothing() -> None:
    """Neither tp nor exact mode's shards; of a model with both kinds of layers both widths count."""
    base = replace(tiny_moe(), parallel=ParallelConfig(4, 1, 1))
    odd = replace(base, model=replace(base.model, ffn_size=387))
    assert validate(odd, 4).parallel.tp == 4 and num_shards_of(odd) == 4
    details = replace(odd.model.details, has_experts=(True, False, True, True))
    both = replace(odd, model=replace(odd.model, details=details))
    assert num_shards_of(both) == 1
    with pytest.raises(ValueError, match="ffn_size 387, tp 4"):
        validate(both, 4)
    kinds = [type(half.part).__name__ for layer in (0, 1) for half in layer_halves(both.model, layer)]
    assert kinds == ["Attention", "Experts", "Attention", "FeedForward"]


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_quantized_experts_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    """The method's name is said, however many modules stand before it; a quantized tensor alone is named."""
    saved("mixtral", tmp_path / "theirs", torch.bfloat16)
    path = tmp_path / "theirs" / "config.json"
    values = json.loads(path.read_text())
    modules = [f"model.layers.{layer}.mlp.gate" for layer in range(9)]
    quantized = {**values, "quantization_config": {"modules_to_not_convert": modules, "quant_method": method}}
    command = ["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "run")]
    path.write_text(json.dumps(quantized))
    assert main(command) != 0
    assert f"quantization_config {{'quant_method': '{method}'" in capsys.readouterr().err
    path.write_text(json.dumps(values))
    file, name = file_with(tmp_path / "theirs", ".experts.")
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    assert main(command) != 0
    assert f"has {name} as F8_E4M3" in capsys.readouterr().err


def test_a_missing_expert_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("qwen3_moe", tmp_path / "theirs", torch.bfloat16, **ALL_PARTS["qwen3_moe"])
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name = next(of for of in values["weight_map"] if ".experts.1." in of)
    file = tmp_path / "theirs" / values["weight_map"].pop(name)
    index.write_text(json.dumps(values))
    save_file({of: tensor for of, tensor in load_file(file).items() if of != name}, file, {"format": "pt"})
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "run")]) != 0
    assert f"1 missing: {name}" in capsys.readouterr().err


def test_presets_are_models_of_their_architecture() -> None:
    for name in ("qwen3_30b_a3b", "tiny_moe"):
        model = preset_config(name).model
        check_architecture(model)
        assert architecture_of(model).name == "Qwen3MoeForCausalLM"
