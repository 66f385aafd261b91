"""Rung: gloo ranks. A run begins with weights of Hugging Face's files, or of another run, and trains on from there."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.architectures.drawn import CONFIGS, EXPERTS
from support.architectures.parity import transformers_losses
from support.architectures.runs import CPU, Pieces, beginning, begun, pieces_of, saved, trained_run
from support.architectures.transformers_models import in_files, tensor_of
from support.ranks.rank_pool import RankPool

from tpengine.architectures.model_path import model_at
from tpengine.architectures.registry import BUILT_IN
from tpengine.config import Config, ModelConfig
from tpengine.data import open_corpus
from tpengine.hugging_face.beginning import begin_from, check_beginning
from tpengine.hugging_face.directory import ModelDirectory, OpenFiles, open_directory
from tpengine.hugging_face.names import stored_of
from tpengine.hugging_face.read import BoxReader
from tpengine.layout.parameters import ParameterSpec, stage_specs
from tpengine.model.transformer import Transformer
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import masters_of
from tpengine.training.planned_run import RunError


def begun_pieces(config: Config) -> Pieces:
    return pieces_of(begun(config))


@pytest.mark.by_default("qwen3-layout1-3")
@pytest.mark.parametrize(
    ("architecture", "layout", "zero"),
    [
        ("gpt2", (1, 2, 2), 0),
        ("qwen3", (2, 2, 1), 3),
        *(
            pytest.param(name, layout, zero, marks=pytest.mark.slow)
            for name in CONFIGS
            for layout, zero in (((1, 4, 1), 0), ((1, 2, 2), 0), ((2, 2, 1), 3))
        ),
    ],
)
def test_each_rank_has_its_part_of_every_tensor(
    ranks: RankPool, tmp_path: Path, architecture: str, layout: tuple[int, int, int], zero: int
) -> None:
    state = saved(architecture, tmp_path).state_dict()
    config = beginning(tmp_path, layout, zero)
    seen = set()
    for held in ranks.run(begun_pieces, layout[0] * layout[1] * layout[2], config):
        for name, (offset, values) in held.items():
            seen.add(name)
            spec = specs_of(config)[name]
            whole = tensor_of(config.model, spec, state)
            cut = tuple(slice(first, first + size) for first, size in zip(offset, values.shape, strict=True))
            assert torch.equal(values, whole[cut]), name
    assert seen == set(specs_of(config))


def read_by_rank(config: Config) -> tuple[int, int, Pieces]:
    """Bytes read, and held as the files have them, without drawing; what is held, gathered where replicas own slices.

    New memory holds NaN, so that what nobody has filled is seen.
    """
    num_bytes = 0
    read_into = OpenFiles.read_into

    def counted(source: OpenFiles, memory: memoryview, path: Path, begin: int) -> None:
        nonlocal num_bytes
        num_bytes += len(memory)
        read_into(source, memory, path, begin)

    torch.use_deterministic_algorithms(True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OpenFiles, "read_into", counted)
            patch.setattr(Transformer, "initialise", None)
            patch.setattr(torch.Tensor, "normal_", None)
            trainer = begun(config, draws=False)
    finally:
        torch.use_deterministic_algorithms(False)
    held = sum(block.tensor.numel() * 8 for _, block in masters_of(trainer.state))
    return num_bytes, held, pieces_of(trainer)


@pytest.mark.by_default("llama-layout1-0")
@pytest.mark.parametrize(("architecture", "layout", "zero"), [("gpt2", (2, 2, 1), 3), ("llama", (1, 2, 2), 0)])
def test_a_rank_reads_what_it_updates_and_draws_nothing(
    ranks: RankPool, tmp_path: Path, architecture: str, layout: tuple[int, int, int], zero: int
) -> None:
    """Padding is zero all the same: of 260 rows, padded to 264."""
    saved(architecture, tmp_path, vocab_size=260)
    config = beginning(tmp_path, layout, zero)
    read = ranks.run(read_by_rank, 4, config)
    for (num_bytes, held, weights), drawn in zip(read, ranks.run(begun_pieces, 4, config), strict=True):
        assert num_bytes == held
        for name, (_, want) in drawn.items():
            assert torch.equal(weights[name][1], want), name
    if zero:
        # Nothing is held twice but by tp ranks: norms and biases.
        files = sum(tensor.num_bytes for tensor in open_directory(tmp_path).tensors.values())
        assert files < sum(num_bytes for num_bytes, _, _ in read) < 1.05 * files


def specs_of(config: Config) -> dict[str, ParameterSpec]:
    assert config.parallel.tp
    return {spec.name: spec for spec in stage_specs(config.model, config.parallel.tp, 0, config.model.num_layers)}


def save_body(architecture: str, source: Path, directory: Path) -> None:
    """Save the files of a directory again, in one, as the body of the model alone was published."""
    tensors = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    prefix = BUILT_IN[architecture].prefix
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if architecture == "gpt2":
        # Buffers of masks, as old versions wrote them.
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4).tril()
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    directory.mkdir()
    save_file(tensors, str(directory / "model.safetensors"), {"format": "pt"})
    shutil.copy(source / "config.json", directory)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_may_lack_the_prefix(tmp_path: Path, architecture: str, tied: bool) -> None:
    saved(architecture, tmp_path / "theirs", tie_word_embeddings=tied)
    save_body(architecture, tmp_path / "theirs", tmp_path / "body")
    found = [check_beginning(model_at(ModelConfig(path=str(tmp_path / name)))) for name in ("theirs", "body")]
    whole, body = (directory for directory in found if isinstance(directory, ModelDirectory))
    assert body.tensors.keys() >= whole.tensors.keys()
    model = model_at(ModelConfig(path=str(tmp_path / "body")))
    with BoxReader(whole) as first, BoxReader(body) as second:
        for spec, stored in stored_of(model).values():
            box = (stored, (0,) * len(spec.shape), spec.shape, torch.float64)
            assert torch.equal(first.read(*box), second.read(*box)), spec.name


EVERY = 10


def losses_and_weights(config: Config) -> tuple[list[float], list[Pieces]]:
    """Train in one process; return the losses, and the weights after every 10th step."""
    trainer, seen = begun(config), []
    losses = []
    for step in range(config.train.steps):
        losses.append(trainer.step.run(step).loss)
        if not (step + 1) % EVERY:
            seen.append(pieces_of(trainer))
    return losses, seen


# dtype -> how far losses, and weights of their largest element, may be from transformers'.
TOLERANCE = {"float64": 1e-8, "float32": 1e-3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype", "steps"),
    [
        ("qwen3", "float64", 10),
        *(
            pytest.param(name, dtype, 50, marks=pytest.mark.slow)
            for name in ("qwen3", "gpt2")
            for dtype in ("float64", "float32")
        ),
        *(pytest.param(name, "float64", 20, marks=pytest.mark.slow) for name in EXPERTS),
    ],
)
def test_it_trains_on_as_transformers_does(
    ranks: RankPool, tmp_path: Path, architecture: str, dtype: str, steps: int
) -> None:
    theirs = saved(architecture, tmp_path, getattr(torch, dtype))
    config = beginning(tmp_path, steps=steps, dtype=dtype)
    losses, weights = ranks.run(losses_and_weights, 1, config)[0]
    assert len(weights) == steps // EVERY
    specs = specs_of(config)

    def compare_weights(step: int) -> None:
        if (step + 1) % EVERY:
            return
        state = in_files(theirs, theirs.state_dict())
        for name, (_, got) in weights[step // EVERY].items():
            # Without rotation a bias of all keys changes no probability: its gradient is rounding.
            if architecture == "gpt2" and name.endswith("k_proj.bias"):
                continue
            want = tensor_of(config.model, specs[name], state)
            error = (got - want).abs().max().item()
            assert error <= TOLERANCE[dtype] * want.abs().max().item(), f"step {step}: {name}: error {error}"

    assert losses == pytest.approx(transformers_losses(theirs, config, compare_weights), rel=TOLERANCE[dtype])


@pytest.mark.by_default("float32-bfloat16")
@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_another_run_is_begun_from(ranks: RankPool, tmp_path: Path, before: str, after: str) -> None:
    """Its newest checkpoint's weights, the wider ones where it has them, in another layout and dtype."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    saved("qwen3", tmp_path / "theirs")
    first = replace(beginning(tmp_path / "theirs", dtype=before, checkpoint_every=1, steps=1), run_dir=str(run_dir))
    want = ranks.run(trained_run, 1, first)[0]
    config = beginning(run_dir, (1, 2, 1), dtype=after, steps=1)
    for held in ranks.run(begun_pieces, 2, config):
        for name, (offset, values) in held.items():
            cut = tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))
            assert torch.equal(values, want[name][cut].to(values.dtype)), name


def test_a_damaged_file_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    config = beginning(tmp_path, (1, 2, 1))
    said = ranks.run(refusal, 2, config, str(sorted(tmp_path.glob("*.safetensors"))[0]))
    assert said[0] == said[1]
    assert "must be whole" in said[0]


def refusal(config: Config, path: str) -> str:
    """What is said if a file is cut after it has been checked."""
    trainer, found = Trainer(config, open_corpus(config), CPU), check_beginning(config.model)
    dist.barrier()
    if trainer.state.rank.mesh.at.tp == 0:
        os.truncate(path, os.path.getsize(path) // 2)
    dist.barrier()
    try:
        begin_from(trainer.state, found)
    except RunError as error:
        return str(error)
    return ""


def test_a_run_without_that_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ValueError, match=r"must have a whole checkpoint"):
        check_beginning(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"has those of steps none, not 3"):
        check_beginning(ModelConfig(path=f"{tmp_path}@3"))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"12 misshapen: model\.layers\.0\.mlp\.gate_proj\.weight"):
        check_beginning(beginning(tmp_path).model)
