"""Rung: gloo ranks. What reads the held-out text: which ranks do, and what each mistake in it says on all of them.

What the loss is for every layout: test_parity.py; which samples count: test_trainer.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from support.engine.own_loss import HIDDEN
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, DataConfig
from tpengine.data import Samples, open_corpus, write_tokens
from tpengine.runs.evaluation import held_out_loss, held_out_losses, read_prompt
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError

CPU = torch.device("cpu")
NUM_TOKENS, HELD_OUT = 9000, 900
# Of the held-out part, in the third window: with two replicas of one micro-batch of two samples, the second reads it.
BAD_PLACE = NUM_TOKENS - HELD_OUT + 2 * 16 + 5


def config_for(path: Path, dp: int, tp: int, pp: int) -> Config:
    config = config_of(dp, tp, pp, tied=False, kv_heads=2)
    train = replace(config.train, seq_len=16, micro_batch_size=2, eval_micro_batches=2)
    data = DataConfig(path=str(path), held_out_fraction=HELD_OUT / NUM_TOKENS)
    return replace(config, train=train, data=data)


def write(path: Path, *wrong: tuple[int, int]) -> None:
    """A text whose header knows nothing of the tokens that are changed."""
    write_tokens(path, np.arange(NUM_TOKENS) % 50, vocab_size=50)
    with path.open("r+b") as file:
        for place, token in wrong:
            file.seek(64 + place)
            file.write(bytes([token]))


def outcome(config: Config, paths: list[str]) -> tuple[str, object, str]:
    """What evaluation says, what it was last doing, and what reading a prompt says, on this rank with its own file."""
    here = replace(config, data=replace(config.data, path=paths[dist.get_rank()]))
    trainer = Trainer(config, open_corpus(here), CPU)
    said = []
    doing: object = None
    for call in (lambda: held_out_loss(trainer.state), lambda: read_prompt(trainer.state, 4)):
        try:
            said.append(str(call()))
        except RunError as error:
            said.append(f"RunError: {error}")
        doing = doing or trainer.state.rank.activity.now.what
    return said[0], doing, said[1]


def test_a_bad_held_out_token_stops_every_rank_with_one_message(ranks: RankPool, tmp_path: Path) -> None:
    """The second replica alone reads it: before, its ranks raised ValueError and the others waited."""
    write(tmp_path / "t", (BAD_PLACE, 251))
    config = config_for(tmp_path / "t", 2, 1, 2)
    (answer,) = set(ranks.run(outcome, 4, config, [str(tmp_path / "t")] * 4))
    message, doing, prompt = answer
    assert message.startswith("RunError: tokens must be at least 0 and below model.vocab_size: got 251, ")
    assert message.endswith("(ranks [1, 3] alone found this)")
    assert doing == "reading the held-out text"
    assert prompt == "[0, 1, 2, 3]"


def test_a_bad_token_in_the_prompt_stops_every_rank_with_one_message(ranks: RankPool, tmp_path: Path) -> None:
    write(tmp_path / "t", (NUM_TOKENS - HELD_OUT, 251))
    answers = ranks.run(outcome, 2, config_for(tmp_path / "t", 1, 2, 1), [str(tmp_path / "t")] * 2)
    for message, _, prompt in answers:
        assert message == prompt and "got 251" in prompt and "alone" not in message


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_of_a_replica_that_read_other_held_out_tokens_stop(
    ranks: RankPool, tmp_path: Path, tp: int, pp: int
) -> None:
    """Both headers say the same; tensor-parallel ranks must agree, and who embeds tokens with who has their labels."""
    write(tmp_path / "a")
    write(tmp_path / "b", (BAD_PLACE, 1))
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    for message, _, prompt in ranks.run(outcome, 2, config_for(tmp_path / "a", 1, tp, pp), paths):
        assert message == (
            "RunError: all ranks of a replica must read the same held-out text: ranks [1] have read other tokens than "
            "the first of theirs: give every host the same file"
        )
        assert prompt == "[0, 1, 2, 3]"


def losses_of_rank(configs: list[Config]) -> list[float | None]:
    """The held-out loss of the drawn weights, by each configuration."""
    return [held_out_loss(Trainer(config, open_corpus(config), CPU).state) for config in configs]


@pytest.mark.by_default("1-1-1", "1-1-2")
@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_held_out_text_of_its_own_is_what_the_loss_is_of(
    ranks: RankPool, tmp_path: Path, dp: int, tp: int, pp: int
) -> None:
    """In every layout it has the loss of the same tokens at a text's end; another one has another loss."""
    write(tmp_path / "t")
    tokens = open_corpus(config_for(tmp_path / "t", 1, 1, 1)).held_out.tokens[:]
    write_tokens(tmp_path / "v", tokens, vocab_size=50)
    write_tokens(tmp_path / "w", tokens[::-1], vocab_size=50)
    config = config_for(tmp_path / "t", dp, tp, pp)
    write_tokens(tmp_path / "u", np.arange(5000) % 49, vocab_size=49)
    named = [replace(config, data=DataConfig(path=str(tmp_path / "u"), held_out=str(tmp_path / name))) for name in "vw"]
    (found,) = {tuple(of_rank) for of_rank in ranks.run(losses_of_rank, dp * tp * pp, [config, *named])}
    assert found[0] == found[1] != found[2]


def keeps_hidden(config: Config) -> tuple[bool, bool]:
    """Whether the model does in training, after an evaluation by another objective: of a plain run, and of another."""
    plain = Trainer(config, open_corpus(config), CPU)
    held_out_losses(plain.state, None, HIDDEN)
    own = Trainer(config, open_corpus(config), CPU, objective=HIDDEN)
    held_out_loss(own.state)
    assert np.isfinite(own.step.run(0).loss)
    return plain.state.model.keeps_hidden, own.state.model.keeps_hidden


def test_an_evaluation_by_another_objective_leaves_training_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    """A plain run keeps no hidden states, which cost memory; a loss of hidden states has them."""
    write(tmp_path / "t")
    assert ranks.run(keeps_hidden, 1, config_for(tmp_path / "t", 1, 1, 1)) == [(False, True)]


@pytest.mark.slow
def test_the_loss_is_of_as_many_samples_whatever_the_size_of_a_micro_batch(ranks: RankPool, tmp_path: Path) -> None:
    """Seven samples: no size but one divides them, and a replica has some that do not count."""
    write(tmp_path / "t")
    losses = []
    for dp in (1, 2):
        config = config_for(tmp_path / "t", dp, 1, 1)
        train = replace(config.train, dtype="float64", eval_samples=7)
        configs = [replace(config, train=replace(train, micro_batch_size=size)) for size in (1, 2, 4, 8)]
        losses += [loss for of_rank in ranks.run(losses_of_rank, dp, configs) for loss in of_rank]
        more = replace(config, train=replace(train, eval_samples=8))
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-12)
    assert abs(ranks.run(losses_of_rank, 2, [more])[0][0] - losses[0]) > 1e-6


def num_reads(config: Config) -> int:
    """How often this rank reads the text in an evaluation."""
    trainer = Trainer(config, open_corpus(config), CPU)
    reads: list[int] = []
    read = Samples.read_with_starts

    def counting(self: Samples, samples: NDArray[np.int64]) -> object:
        reads.append(len(samples))
        return read(self, samples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Samples, "read_with_starts", counting)
        assert held_out_loss(trainer.state) is not None
        before = len(reads)
        assert read_prompt(trainer.state, 4) == [0, 1, 2, 3]
    return 10 * before + len(reads) - before


def test_only_ranks_that_use_the_held_out_text_read_it(ranks: RankPool, tmp_path: Path) -> None:
    """Of four stages the first, for its tokens, and the last, for its labels; the prompt on one rank."""
    write(tmp_path / "t")
    assert ranks.run(num_reads, 4, config_for(tmp_path / "t", 1, 1, 4)) == [11, 0, 0, 10]
