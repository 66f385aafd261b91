"""Rung: gloo ranks. A run saved in one layout goes on in another as if nothing had happened.

What only a GPU checks: copying aside from a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine.parity import Outcome, compare, config_of
from support.engine.resuming import resumed
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import Index, read_index
from tpengine.checkpoint.load import load
from tpengine.checkpoint.resume import Checkpoint, checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.checkpoint.storage import SavedBlock
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.evaluation import ForwardPass
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of, restore

CPU = torch.device("cpu")
BEFORE, AFTER = 3, 3


def config_for(dp: int, tp: int, pp: int, *, tied: bool = True, kv_heads: int = 1) -> Config:
    config = config_of(dp, tp, pp, tied=tied, kv_heads=kv_heads)
    return replace(config, train=replace(config.train, steps=BEFORE + AFTER))


def outcome_after(trainer: Trainer, first: int, last: int) -> Outcome:
    """Train steps [first, last); return (loss, norm) by step and the parameters with their places."""
    numbers = []
    for step in range(first, last):
        result = trainer.step.run(step)
        numbers.append((result.loss, result.grad_norm))
    parameters = {
        name: (trainer.state.model.pieces[name].block[0], parameter.detach().clone())
        for name, parameter in trainer.state.model.held.items()
    }
    return numbers, parameters


def uninterrupted(config: Config) -> Outcome:
    trainer = Trainer(config, open_corpus(config), CPU)
    for step in range(BEFORE):
        trainer.step.run(step)
    return outcome_after(trainer, BEFORE, BEFORE + AFTER)


def train_and_save(config: Config, run_dir: str) -> str | None:
    trainer = Trainer(config, open_corpus(config), CPU)
    for step in range(BEFORE):
        trainer.step.run(step)
    saver = Saver(checkpoints_of(run_dir), keep=2)
    saver.save(BEFORE, blocks_of(trainer.state), state_of(config, trainer.state.part.corpus.fingerprint(), BEFORE))
    # What comes after the copy must not be in the checkpoint.
    trainer.step.run(BEFORE)
    return saver.wait()


def resume_and_train(config: Config, run_dir: str) -> Outcome:
    return outcome_after(resumed(config, run_dir, BEFORE), BEFORE, BEFORE + AFTER)


# (dp, tp, pp) that saves -> layouts that go on: every axis grows and shrinks, KV heads become shared and single again.
CHANGES = {
    (1, 1, 1): [(2, 2, 2)],
    (2, 2, 1): [(1, 1, 4), (1, 4, 1)],
    (1, 2, 2): [(2, 1, 1), (1, 1, 1)],
    (1, 1, 4): [(2, 2, 1)],
    (2, 1, 2): [(4, 2, 1), (1, 4, 1)],
    (1, 4, 2): [(1, 2, 1), (2, 1, 4)],
}


# By default each axis grows once and shrinks once, between two ranks.
SOME_CHANGES = {(2, 1, 1): [(1, 2, 1)], (1, 2, 1): [(1, 1, 2)], (1, 1, 2): [(2, 1, 1)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "kv_heads", "changes"),
    [
        (True, 1, SOME_CHANGES),
        *(pytest.param(tied, kv, CHANGES, marks=pytest.mark.slow) for tied in (False, True) for kv in (1, 2)),
    ],
)
def test_a_run_goes_on_in_any_layout(
    ranks: RankPool,
    tmp_path: Path,
    tied: bool,
    kv_heads: int,
    changes: dict[tuple[int, int, int], list[tuple[int, int, int]]],
) -> None:
    """Loss, gradient norm and parameters of the steps after the change, within 1e-9 of one uninterrupted process."""
    (reference,) = ranks.run(uninterrupted, 1, config_for(1, 1, 1, tied=tied, kv_heads=kv_heads))
    for saving, others in changes.items():
        run_dir = str(tmp_path / "-".join(map(str, saving)))
        config = config_for(*saving, tied=tied, kv_heads=kv_heads)
        assert ranks.run(train_and_save, saving[0] * saving[1] * saving[2], config, run_dir)[0] is None
        for dp, tp, pp in others:
            config = config_for(dp, tp, pp, tied=tied, kv_heads=kv_heads)
            compare(ranks.run(resume_and_train, dp * tp * pp, config, run_dir), reference)


@pytest.mark.parametrize(
    ("dtype", "dp"),
    [("bfloat16", 1), *(pytest.param(dtype, 2, marks=pytest.mark.slow) for dtype in ("float64", "bfloat16"))],
)
def test_the_same_layout_goes_on_bit_by_bit(ranks: RankPool, tmp_path: Path, dtype: str, dp: int) -> None:
    """In bfloat16 this needs the masters: a weight alone has lost 16 of their bits."""
    config, world = config_for(dp, 1, 2), 2 * dp
    config = replace(config, train=replace(config.train, dtype=dtype))  # type: ignore[arg-type]
    want = ranks.run(uninterrupted, world, config)
    assert ranks.run(train_and_save, world, config, str(tmp_path)) == [None] * world
    got = ranks.run(resume_and_train, world, config, str(tmp_path))
    for (got_numbers, got_parameters), (want_numbers, want_parameters) in zip(got, want, strict=True):
        assert got_numbers == want_numbers
        for name, (_, parameter) in want_parameters.items():
            assert torch.equal(got_parameters[name][1], parameter), name


def logits_of(trainer: Trainer) -> torch.Tensor:
    """The global logits[T, V] of one held-out batch, on the last stage of the first replica."""
    tokens = torch.from_numpy(trainer.state.part.corpus.held_out.batch(0, 2)[0]).view(-1)
    seen: list[torch.Tensor] = []
    forward = ForwardPass(trainer.state, 1, 2)
    forward.run(tokens[None], lambda logits, _: seen.append(logits.detach().clone()))
    whole = trainer.state.rank.comms.tp.all_gather(seen[0].T.contiguous()).T
    return whole[:, : trainer.state.part.config.model.vocab_size]


def trained_logits(config: Config, run_dir: str) -> torch.Tensor:
    trainer = Trainer(config, open_corpus(config), CPU)
    for step in range(BEFORE):
        trainer.step.run(step)
    saver = Saver(checkpoints_of(run_dir), keep=2)
    saver.save(BEFORE, blocks_of(trainer.state), state_of(config, trainer.state.part.corpus.fingerprint(), BEFORE))
    assert saver.wait() is None
    return logits_of(trainer)


def loaded_logits(config: Config, run_dir: str) -> torch.Tensor:
    return logits_of(resumed(config, run_dir, BEFORE))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1,), pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=str)
def test_logits_survive_a_change_of_tp(ranks: RankPool, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Saved at tp 2 with 2 KV heads, loaded at tp 1 and at tp 4, where each KV head is held twice."""
    saving = config_for(1, 2, 1, tied=False, kv_heads=2)
    want = ranks.run(trained_logits, 2, saving, str(tmp_path))[0]
    assert want.std() > 0.01
    for tp in sizes:
        config = config_for(1, tp, 1, tied=False, kv_heads=2)
        for got in ranks.run(loaded_logits, tp, config, str(tmp_path)):
            assert (got - want).abs().max() <= 1e-9 * want.abs().max(), tp


@pytest.mark.by_default("1-2")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_names_and_shapes_are_hugging_faces_llama(ranks: RankPool, tmp_path: Path, tp: int, pp: int) -> None:
    config = config_for(1, tp, pp, tied=False, kv_heads=2)
    assert ranks.run(train_and_save, tp * pp, config, str(tmp_path))[0] is None
    index = newest(tmp_path)
    heads, kv, d, f, v = 32, 16, 32, 48, 250
    block = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (heads, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, heads),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }
    expected = {f"model.layers.{i}.{name}": shape for i in range(5) for name, shape in block.items()}
    expected |= {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    weights = {name: entry.shape for name, entry in index.tensors.items() if not name.startswith("optimizer.")}
    assert weights == expected
    moments = {
        f"optimizer.{kind}.{name}": shape for kind in ("exp_avg", "exp_avg_sq") for name, shape in expected.items()
    }
    assert {name: entry.shape for name, entry in index.tensors.items()} == expected | moments
    assert index.state["data"]["next_sample"] == BEFORE * 8 and index.state["random"]["seed"] == 5


@pytest.mark.parametrize(("dp", "tp", "share"), [(2, 1, 0.6), pytest.param(4, 2, 1 / 3, marks=pytest.mark.slow)])
def test_replicas_share_the_writing(ranks: RankPool, tmp_path: Path, dp: int, tp: int, share: float) -> None:
    """Each block is stored once, and no replica stores all of them."""
    config = config_for(dp, tp, 1, kv_heads=1)
    assert ranks.run(train_and_save, dp * tp, config, str(tmp_path))[0] is None
    sizes = [entry.num_bytes for entry in newest(tmp_path).files.values()]
    assert len(sizes) == dp * tp and max(sizes) < sum(sizes) * share


def newest(run_dir: Path) -> Index:
    directory = checkpoints_of(run_dir).newest()
    assert directory is not None
    return read_index(directory)


def moments_forgotten(trainer: Trainer, checkpoint: Checkpoint) -> None:
    blocks = {
        name: block for name, block in blocks_of(trainer.state).items() if not name.startswith("optimizer.exp_avg.")
    }
    load(checkpoint.directory, checkpoint.index, blocks)
    trainer.state.num_updates = BEFORE


def steps_forgotten(trainer: Trainer, checkpoint: Checkpoint) -> None:
    restore(trainer.state, checkpoint)
    trainer.state.num_updates = 0


def moments_swapped(trainer: Trainer, checkpoint: Checkpoint) -> None:
    restore(trainer.state, checkpoint)
    for name in trainer.state.optimizer.masters:
        trainer.state.optimizer.state_of(name)["exp_avg_sq"].mul_(1 + 1e-6)


def shards_exchanged(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Every rank reads the shard of its neighbour of one weight: right shapes, no error."""
    blocks = blocks_of(trainer.state)
    name = next(name for name in blocks if name.startswith("model.layers.") and name.endswith("up_proj.weight"))
    block = blocks[name]
    rows = block.tensor.shape[0]
    other = (block.offset[0] + rows) % block.global_shape[0]
    blocks[name] = SavedBlock(block.tensor, (other, 0), block.global_shape)
    load(checkpoint.directory, checkpoint.index, blocks)
    trainer.state.num_updates = BEFORE


def tied_copy_not_loaded(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """The last stage keeps its initial copy of the embedding."""
    blocks = blocks_of(trainer.state)
    if trainer.state.rank.mesh.at.pp > 0:
        blocks.pop("model.embed_tokens.weight")
    load(checkpoint.directory, checkpoint.index, blocks)
    trainer.state.num_updates = BEFORE


def data_starts_again(trainer: Trainer, checkpoint: Checkpoint) -> None:
    restore(trainer.state, checkpoint)
    read = trainer.step.reader.read
    trainer.step.reader.read = lambda step: read(step - BEFORE)  # type: ignore[method-assign]


def unbroken(trainer: Trainer, checkpoint: Checkpoint) -> None:
    restore(trainer.state, checkpoint)


MUTATIONS = (
    moments_forgotten,
    steps_forgotten,
    moments_swapped,
    shards_exchanged,
    tied_copy_not_loaded,
    data_starts_again,
)


def resume_broken(config: Config, run_dir: str, mutation: str) -> Outcome:
    trainer = Trainer(config, open_corpus(config), CPU)
    directory = CheckpointDirectory(Path(run_dir) / "checkpoints").newest()
    assert directory is not None
    globals()[mutation](trainer, Checkpoint(directory, read_index(directory)))
    return outcome_after(trainer, BEFORE, BEFORE + AFTER)


# With the control, on the two ranks that can show them.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutations", "tp"),
    [((moments_swapped, tied_copy_not_loaded), 1), (MUTATIONS, 2)],
    ids=["two", "all"],
)
def test_every_mutation_of_resuming_turns_the_comparison_red(
    ranks: RankPool,
    tmp_path: Path,
    count_mutations: Callable[[str, int, int], None],
    mutations: tuple[Callable[[Trainer, Checkpoint], None], ...],
    tp: int,
) -> None:
    (reference,) = ranks.run(uninterrupted, 1, config_for(1, 1, 1))
    config, world = config_for(1, tp, 2), 2 * tp
    assert ranks.run(train_and_save, world, config, str(tmp_path))[0] is None
    compare(ranks.run(resume_broken, world, config, str(tmp_path), "unbroken"), reference)
    names = [mutation.__name__ for mutation in mutations]
    unnoticed = survivors(
        names,
        lambda name: ranks.run(resume_broken, world, config, str(tmp_path), name),
        lambda outcomes: compare(outcomes, reference),
    )
    count_mutations("resuming (parity)", len(names) - len(unnoticed), len(names))
    assert not unnoticed
