"""Rung: gloo ranks. Phases of one run: the bits of exact mode through every border, killed and resumed elsewhere.

Only a GPU checks that a phase's kernels are loaded before its first receive is posted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine.exactness import exact_config
from support.ranks.rank_pool import RankPool

from tpengine.checkpoint.index import read_index
from tpengine.checkpoint.resume import find_checkpoint
from tpengine.config import Config, phases_of, validate_run
from tpengine.data import open_corpora
from tpengine.runs.checkpoints import RunCheckpoints
from tpengine.runs.restoring import restore_newest
from tpengine.runs.trainer import Trainer

CPU = torch.device("cpu")
# Batch ramp-up; longer sequences, of which exact mode makes 2 shards instead of 4; annealing with other sums again.
PHASES = """
[[phase]]
until = 3

[[phase]]
until = 6
micro_batches = 8
train.seq_len = 31

[[phase]]
train.seq_len = 48
train.micro_batch_size = 1
data.ignore_token = 101
optim.schedule = "linear"
optim.min_lr_ratio = 0.0
optim.beta1 = 0.8
optim.clip_norm = 0.1
"""
STEPS = 9


def config_of(tmp_path: Path, tp: int, pp: int, dp: int, text: str = PHASES, **more: object) -> Config:
    file = tmp_path / "given.toml"
    file.write_text(text)
    optim = more.pop("optim", {})
    base = exact_config(dp, tp, pp, **more)  # type: ignore[arg-type]
    base = replace(base, optim=replace(base.optim, **optim))  # type: ignore[arg-type]
    train = replace(base.train, steps=STEPS, checkpoint_every=2, keep_checkpoints=9)
    config = replace(base, train=train, phases=str(file), run_dir=str(tmp_path / "run"), resume=True)
    return validate_run(config, tp * pp * dp)


def go_on(config: Config, dies_before: int) -> dict[int, tuple[str, str, float, int]]:
    """Continue a run until it dies, or ends; (loss, norm, rate, shards) of each step."""
    phases = phases_of(config)
    corpora = open_corpora(phases)
    trainer = Trainer(config, corpora[0], CPU, corpora=corpora)
    found = restore_newest(
        trainer.state, trainer.planned, find_checkpoint(config, [corpus.fingerprint() for corpus in corpora])
    )
    first = 0 if found is None else found.index.step
    run_dir = Path(config.run_dir) if torch.distributed.get_rank() == 0 else None
    if run_dir is not None:
        run_dir.mkdir(exist_ok=True)
    numbers = {}
    with RunCheckpoints(trainer.state, trainer.planned, run_dir) as checkpoints:
        for step in range(first, dies_before):
            trainer.enter_phase_of(step)
            result = trainer.step.run(step)
            numbers[step] = result.loss.hex(), result.grad_norm.hex(), result.lr, trainer.state.model.parts.table_size
            checkpoints.after_step(step + 1)
    return numbers


# Layouts, ZeRO, and the step before which all ranks die: after 2 saved steps of 3, in the second phase, at the border
# to the third, at the end.
FOUR_RANKS = [(2, 1, 1, 0, 3), (1, 2, 1, 0, 5), (1, 1, 2, 3, 7), (2, 2, 1, 0, STEPS)]
TWO_RANKS = [(1, 2, 1, 0, 5), (1, 1, 2, 3, STEPS)]


@pytest.mark.parametrize(
    ("dtype", "layouts"),
    [
        pytest.param("float32", TWO_RANKS, id="2 ranks", marks=pytest.mark.slow),
        pytest.param("float32", FOUR_RANKS, id="4 ranks", marks=pytest.mark.slow),
        pytest.param("bfloat16", FOUR_RANKS, id="4 ranks, bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_three_phases_killed_in_each_and_resumed_elsewhere_has_the_undisturbed_bits(
    ranks: RankPool, tmp_path: Path, dtype: str, layouts: list[tuple[int, int, int, int, int]]
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (want,) = ranks.run(go_on, 1, config_of(whole, 1, 1, 1, dtype=dtype), STEPS)
    assert [shards for *_, shards in want.values()] == [4, 4, 4, 2, 2, 2, 4, 4, 4]
    for tp, pp, dp, zero, dies in layouts:
        config = config_of(tmp_path, tp, pp, dp, dtype=dtype, zero=zero)
        for found in ranks.run(go_on, tp * pp * dp, config, dies):
            assert found == {step: want[step] for step in found}
            assert max(found) == dies - 1
    assert sorted(int(path.name[5:]) for path in (tmp_path / "run/checkpoints").iterdir()) == [2, 4, 6, 8, 9]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "zero", "optim"),
    [(1, 3, {}), (1, 1, {}), (2, 0, {}), (1, 3, {"moments": "bfloat16"}), (2, 1, {"name": "lion"})],
)
def test_a_model_that_is_cut_otherwise_goes_on_with_the_same_state(
    ranks: RankPool, tmp_path: Path, tp: int, zero: int, optim: dict[str, str]
) -> None:
    """Through both borders without a checkpoint between."""
    whole = tmp_path / "whole"
    whole.mkdir()
    (want,) = ranks.run(go_on, 1, config_of(whole, 1, 1, 1, optim=optim), 7)
    config = config_of(tmp_path, tp, 1, 2, zero=zero, optim=optim)
    for found in ranks.run(go_on, 2 * tp, config, 7):
        assert found == want


# The first half is frozen, with the embeddings; then one weight of two packed products; then nothing, at another rate.
THAWING = """
[[phase]]
until = 3
[[phase.optim.groups]]
pattern = "model.embed_tokens.weight"
frozen = true
[[phase.optim.groups]]
pattern = "model.layers.[0-2].*"
frozen = true

[[phase]]
until = 6
[[phase.optim.groups]]
pattern = "*.[ku]*_proj.weight"
frozen = true

[[phase]]
[[phase.optim.groups]]
pattern = "*.mlp.*"
lr = 0.5
"""


@pytest.mark.parametrize(
    ("dtype", "layouts"),
    [
        pytest.param("float32", TWO_RANKS, id="2 ranks", marks=pytest.mark.slow),
        pytest.param("float32", FOUR_RANKS, id="4 ranks", marks=pytest.mark.slow),
        pytest.param("bfloat16", FOUR_RANKS, id="4 ranks, bfloat16", marks=pytest.mark.slow),
        pytest.param(
            "bfloat16", [(2, 1, 2, 2, 4), (1, 2, 2, 3, 8), (2, 1, 2, 1, STEPS)], id="8", marks=pytest.mark.slow
        ),
    ],
)
def test_phases_freeze_and_thaw_in_every_layout_alike(
    ranks: RankPool, tmp_path: Path, dtype: str, layouts: list[tuple[int, int, int, int, int]]
) -> None:
    """What a phase trains has moments that a resume in it must find; what it freezes has none."""
    whole = tmp_path / "whole"
    whole.mkdir()
    (want,) = ranks.run(go_on, 1, config_of(whole, 1, 1, 1, THAWING, dtype=dtype), STEPS)
    for tp, pp, dp, zero, dies in layouts:
        config = config_of(tmp_path, tp, pp, dp, THAWING, dtype=dtype, zero=zero)
        for found in ranks.run(go_on, tp * pp * dp, config, dies):
            assert found == {step: want[step] for step in found}
            assert max(found) == dies - 1
    kept = [read_index(path).tensors for path in sorted((tmp_path / "run/checkpoints").iterdir())]
    assert "model.embed_tokens.weight" in kept[0]
    assert "optimizer.exp_avg.model.embed_tokens.weight" not in kept[0]
    assert "optimizer.exp_avg.model.embed_tokens.weight" in kept[-1]
