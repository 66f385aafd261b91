"""Phases as data: where each begins, what it changes, its rates, and what is no list of phases. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tpengine.checkpoint.fingerprint import of_mixture
from tpengine.checkpoint.index import Index, write_index
from tpengine.checkpoint.resume import checkpoints_of, find_checkpoint, saved_config, state_of
from tpengine.checkpoint.run_directory import write_config
from tpengine.commands.arguments import ConfigError, parse_config
from tpengine.config import (
    Config,
    ParallelConfig,
    TrainConfig,
    num_blocks,
    num_evaluated,
    num_shards_of,
    phases_of,
    validate_run,
)
from tpengine.data import for_phase, open_corpora, open_corpus
from tpengine.layout.step_plan import phase_layouts
from tpengine.training.learning_rate import rate_of_step

README = Path(__file__).parents[3] / "tpengine/training/phases.md"
THREE = """
[[phase]]
until = 10

[[phase]]
until = "20480 tokens"
micro_batches = 8

[[phase]]
train.seq_len = 64
optim.schedule = "linear"
optim.min_lr_ratio = 0.0
"""


def config_of(tmp_path: Path, text: str, world_size: int = 1, **changes: object) -> Config:
    (tmp_path / "given.toml").write_text(text)
    train = TrainConfig(seq_len=32, micro_batch_size=2, num_micro_batches=4, steps=60)
    config = replace(Config(), train=train, phases=str(tmp_path / "given.toml"), **changes)  # type: ignore[arg-type]
    return validate_run(config, world_size)


def test_steps_tokens_and_samples_follow_from_the_file(tmp_path: Path) -> None:
    phases = phases_of(config_of(tmp_path, THREE))
    # 256 tokens a step, then 512 until 20,480, then 1,024.
    assert [(phase.first_step, phase.end_step) for phase in phases] == [(0, 10), (10, 45), (45, 60)]
    assert [phase.tokens_per_step for phase in phases] == [256, 512, 1024]
    assert [(phase.order, phase.consumed) for phase in phases] == [(0, 0), (0, 80), (2, 0)]
    tokens = samples = 0
    for step in range(60):
        phase = phases.at(step)
        samples = 0 if step == 45 else samples
        assert phases.tokens_before(step) == tokens and phase.samples_before(step) == samples
        tokens, samples = tokens + phase.tokens_per_step, samples + phase.samples_per_step


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ("train.seq_len = 16", 1),
        ('data.path = "other.bin"', 1),
        ('data.mixture = "mix.toml"', 1),
        ("data.ignore_token = 3", 0),
        ("optim.lr = 1e-4", 0),
    ],
)
def test_an_order_of_its_own_begins_with_other_windows(tmp_path: Path, given: str, order: int) -> None:
    phases = phases_of(config_of(tmp_path, f"[[phase]]\nuntil = 10\n[[phase]]\n{given}\n"))
    assert phases[1].order == order and phases[1].consumed == (0 if order else 80)


def test_a_phase_with_other_micro_batches_is_evaluated_on_as_many_samples(tmp_path: Path) -> None:
    """Losses of one order of samples are compared to find the best checkpoint."""
    text = "[[phase]]\nuntil = 10\n[[phase]]\nuntil = 20\ntrain.micro_batch_size = 1\n[[phase]]\nmicro_batches = 8\n"
    phases = phases_of(config_of(tmp_path, text))
    assert [num_evaluated(phase.config.train) for phase in phases] == [32, 32, 32]
    first = phases_of(config_of(tmp_path, "[[phase]]\ntrain.micro_batch_size = 1\n"))
    assert num_evaluated(first[0].config.train) == 16


def test_the_rate_makes_no_jump_that_no_phase_asks_for(tmp_path: Path) -> None:
    phases = phases_of(config_of(tmp_path, THREE))
    rates = [rate_of_step(phases, step) for step in range(60)]
    alone = phases_of(replace(phases[0].config, phases="", optim=phases[0].config.optim))
    assert rates[:45] == [rate_of_step(alone, step) for step in range(45)]
    # From the rate that the cosine would have had, linearly to zero at the last step.
    peak = rate_of_step(alone, 45)
    assert rates[45:] == pytest.approx([peak * (1 - n / 14) for n in range(15)], abs=1e-18)
    assert max(abs(a - b) for a, b in pairwise(rates)) <= 3e-3 / 15


def test_a_phase_may_warm_up_again_from_the_rate_that_it_finds(tmp_path: Path) -> None:
    text = "[[phase]]\nuntil = 30\n[[phase]]\noptim.lr = 0.004\noptim.warmup_steps = 4\n"
    config = config_of(tmp_path, text)
    phases = phases_of(replace(config, optim=replace(config.optim, schedule="constant")))
    rates = [rate_of_step(phases, step) for step in range(60)]
    assert rates[29:34] == pytest.approx([0.003, 0.00325, 0.0035, 0.00375, 0.004])


def test_every_layout_has_the_same_global_steps_and_rates(tmp_path: Path) -> None:
    one = phases_of(config_of(tmp_path, THREE))
    train = TrainConfig(seq_len=32, micro_batch_size=2, num_micro_batches=1, steps=60)
    four = phases_of(validate_run(replace(one[0].config, train=train, parallel=ParallelConfig(dp=4, tp=1, pp=1)), 4))
    for mine, other in zip(one, four, strict=True):
        assert replace(mine, config=Config()) == replace(other, config=Config())
        assert other.config.train.num_micro_batches * 4 == mine.config.train.num_micro_batches
        assert mine.samples_per_step == other.samples_per_step


def test_each_phase_has_its_own_shards_and_blocks_and_a_layout_must_divide_all(tmp_path: Path) -> None:
    text = "[[phase]]\nuntil = 10\n[[phase]]\nmicro_batches = 6\ntrain.seq_len = 31\n"
    exact = TrainConfig(seq_len=32, micro_batch_size=2, num_micro_batches=4, steps=60, reduction="exact")
    (tmp_path / "given.toml").write_text(text)
    config = Config(train=exact, phases=str(tmp_path / "given.toml"))
    phases = phases_of(validate_run(config, 1))
    assert [num_shards_of(phase.config) for phase in phases] == [4, 2]
    assert [num_blocks(phase.config) for phase in phases] == [4, 2]
    with pytest.raises(ValueError, match=r"in phase 2 the tokens of a micro-batch must be divisible by tp: .* tp 4"):
        validate_run(replace(config, parallel=ParallelConfig(tp=4)), 4)
    with pytest.raises(ValueError, match="phase 2 has 6 per step, dp 4: use micro_batches 8"):
        validate_run(replace(config, parallel=ParallelConfig(tp=1, pp=1), train=replace(exact, num_micro_batches=1)), 4)
    # Ranks keep their layers, whatever the length of the sequences.
    two = validate_run(replace(config, parallel=ParallelConfig(pp=2)), 2)
    assert len({layout.layers for layout in phase_layouts(phases_of(two))}) == 1


def test_a_phase_reads_windows_of_its_own_length_in_its_own_order(tmp_path: Path) -> None:
    config = config_of(tmp_path, THREE + "data.ignore_token = 101\n")
    first, second, third = open_corpora(phases_of(config))
    for text in (first, second):
        np.testing.assert_array_equal(text.train.batch(0, 4)[0], open_corpus(config).train.batch(0, 4)[0])
    assert (third.train.seq_len, third.train.ignore_token, third.train.phase) == (64, 101, 2)
    same = replace(third.train, phase=0)
    assert not np.array_equal(same.batch(0, 4)[0], third.train.batch(0, 4)[0])
    with pytest.raises(ValueError, match="training text must hold a window"):
        short = replace(first, train=replace(first.train, tokens=first.train.tokens[:60]))
        for_phase(short, phases_of(config)[2])


def test_the_run_directory_repeats_the_run_and_resume_finds_its_phases(tmp_path: Path) -> None:
    config = config_of(tmp_path, THREE)
    run = tmp_path / "run"
    run.mkdir()
    write_config(replace(config, run_dir=str(run)), run, keeps_equal=False)
    (tmp_path / "given.toml").unlink()
    again = saved_config(str(run))
    assert again.phases == str(run / "phases.toml")
    assert [phase.end_step for phase in phases_of(again)] == [10, 45, 60]
    resumed = parse_config(["--resume", "--run-dir", str(run)], 4)
    assert [phase.samples_per_step for phase in phases_of(resumed)] == [8, 16, 16]
    with pytest.raises(ConfigError, match="ends with its last one"):
        (run / "phases.toml").write_text(THREE.replace("train.seq_len", "until = 60\ntrain.seq_len"))
        parse_config(["--resume", "--run-dir", str(run), "--train.steps", "70"], 4)


def test_a_checkpoint_says_where_it_is(tmp_path: Path) -> None:
    phases = phases_of(config_of(tmp_path, THREE))
    state = state_of(phases[0].config, "text", 50)
    assert state["data"] == {
        "fingerprint": "text",
        "next_sample": 80,
        "samples_per_step": 16,
        "phase": 2,
        "order": 2,
    }
    assert state["config"]["train"]["seq_len"] == 64


def saved_after(tmp_path: Path, config: Config, step: int, fingerprint: str = "text", **without: object) -> None:
    """A checkpoint of the run directory, without tensors; `without`: what its data do not say."""
    state = state_of(config, fingerprint, step)
    for name in without:
        del state["data"][name]
    directory = checkpoints_of(tmp_path / "run").of_step(step)
    directory.mkdir(parents=True)
    write_index(directory, Index(step, {}, {}, state))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (THREE, ""),
        # What is still to come may change.
        (THREE.replace("seq_len = 64", "seq_len = 128"), ""),
        (THREE.replace("micro_batches = 8", "micro_batches = 16"), "must keep samples per step"),
        (THREE.replace("until = 10", "until = 11"), "must keep the number of samples read: .* saved with 240"),
        (THREE.replace("micro_batches", "train.seq_len = 48\nmicro_batches"), "must keep train.seq_len"),
        ("", "must keep samples per step"),
    ],
)
def test_a_resumed_run_must_keep_the_phases_until_its_step(tmp_path: Path, text: str, words: str) -> None:
    saved_after(tmp_path, config_of(tmp_path, THREE), 20)
    config = config_of(tmp_path, text or "[[phase]]\n")
    config = replace(config, run_dir=str(tmp_path / "run"))
    if not words:
        found = find_checkpoint(config, ["text"] * len(phases_of(config)))
        assert found is not None and found.index.step == 20
        return
    with pytest.raises(ValueError, match=words):
        find_checkpoint(config, ["text"] * len(phases_of(config)))


def test_a_checkpoint_from_before_there_were_phases_is_resumed(tmp_path: Path) -> None:
    plain = replace(config_of(tmp_path, "[[phase]]\n"), phases="", run_dir=str(tmp_path / "run"))
    saved_after(tmp_path, plain, 20, samples_per_step=None, phase=None, order=None)
    assert find_checkpoint(plain, "text") is not None
    # Phases may begin behind it.
    later = replace(plain, phases=config_of(tmp_path, "[[phase]]\nuntil = 30\n[[phase]]\ntrain.seq_len = 64\n").phases)
    assert find_checkpoint(later, ["text", "other"]) is not None


def test_the_text_of_the_checkpoints_own_phase_must_be_the_same(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, THREE), run_dir=str(tmp_path / "run"))
    saved_after(tmp_path, config, 20)
    assert find_checkpoint(config, ["older", "text", "later"]) is not None
    with pytest.raises(ValueError, match="must keep the text"):
        find_checkpoint(config, ["text", "older", "later"])


def test_a_mixture_that_has_changed_is_named_and_may_be_a_new_phase(tmp_path: Path) -> None:
    def mixed(*weights: float) -> str:
        pairs = zip("abc", weights, strict=False)
        return of_mixture({name: (f"{name}.tokens", {"weight": weight}, f"of {name}") for name, weight in pairs})

    config = replace(config_of(tmp_path, "[[phase]]\nuntil = 20\n[[phase]]\n"), run_dir=str(tmp_path / "run"))
    saved_after(tmp_path, config, 20, fingerprint=mixed(0.7, 0.3))
    assert find_checkpoint(config, [mixed(0.7, 0.3)] * 2) is not None
    for now, words in (
        (mixed(0.7, 0.4), r"must keep the weight of b \(b.tokens\): .* was saved with 0.3, this run has 0.4: use"),
        (mixed(0.7, 0.3, 0.1), "must keep the sources of the mixture: .* with a, b, this run has a, b, c"),
        (
            mixed(0.7, 0.3).replace("of a", "of x"),
            r"must keep the text of a \(a.tokens\): .* with of a, this run has of x",
        ),
        ("a text", "must keep the text: .* was saved with a mixture of a, b, this run has a text"),
    ):
        with pytest.raises(ValueError, match=words):
            find_checkpoint(config, [now] * 2)
    # The next phase may read anything.
    later = replace(config, phases=config_of(tmp_path, '[[phase]]\nuntil = 20\n[[phase]]\ndata.mixture = "m"\n').phases)
    assert find_checkpoint(later, [mixed(0.7, 0.3), mixed(0.7, 0.4)]) is not None


def test_a_phase_reads_a_text_or_a_mixture(tmp_path: Path) -> None:
    text = '[[phase]]\nuntil = 10\n[[phase]]\nuntil = 20\ndata.mixture = "m"\n[[phase]]\ndata.path = "b"\n'
    config = config_of(tmp_path, text)
    phases = phases_of(validate_run(replace(config, data=replace(config.data, path="a")), 1))
    assert [(phase.config.data.path, phase.config.data.mixture) for phase in phases] == [
        ("a", ""),
        ("stdlib", "m"),
        ("b", ""),
    ]
    both = replace(config, data=replace(config.data, path="a", mixture="m"))
    with pytest.raises(ValueError, match=r"one text or one mixture: got data\.path a and data\.mixture m: leave"):
        validate_run(both, 1)
    with pytest.raises(ValueError, match="in phase 2 a run reads one text or one mixture"):
        validate_run(config_of(tmp_path, '[[phase]]\nuntil = 9\n[[phase]]\ndata.path = "a"\ndata.mixture = "m"\n'), 1)


BAD = [
    ("", "needs a list of phases"),
    ("phases = 3", "unknown key phases: did you mean [[phase]]?"),
    ("[[phase]]\nuntil = 9\n[[phase]]\nuntil = 9\n", "phases must ascend: phase 2 ends at step 9 and begins at step 9"),
    ("[[phase]]\nuntil = 70\n[[phase]]\n", "phases must ascend: phase 2 ends at step 60 and begins at step 70"),
    ('[[phase]]\nuntil = 9\n[[phase]]\nuntil = "9 tokens"\n', "phases must ascend: phase 2 ends at 9 tokens"),
    (
        '[[phase]]\nuntil = "100 tokens"\n',
        "a phase must have a step: phase 1 has 100 tokens, its steps 256: use",
    ),
    ("[[phase]]\n[[phase]]\n", "every phase but the last must say where it ends: phase 1 does not"),
    ("[[phase]]\nuntil = 9.5\n", "until of phase 1 must be a number of steps"),
    (
        "[[phase]]\nmodel.hidden_size = 64\n",
        "a phase cannot change model.hidden_size, which is the whole run's: phase 1",
    ),
    ("[[phase]]\nmodel.vocab_size = 64\n", "a phase cannot change model.vocab_size"),
    ("[[phase]]\nparallel.tp = 2\n", "a phase cannot change parallel.tp"),
    ("[[phase]]\noptim.name = 'lion'\n", "a phase cannot change optim.name, which is the whole run's"),
    ("[[phase]]\ntrain.num_micro_batches = 2\n", "phase 1 has train.num_micro_batches: use micro_batches"),
    ("[[phase]]\ntrain.seqlen = 64\n", "unknown key train.seqlen in phase 1: did you mean train.seq_len?"),
    ("[[phase]]\nmicro_batch = 4\n", "unknown key micro_batch in phase 1: did you mean micro_batches?"),
    ("[[phase]]\nmicro_batches = 0\n", "micro_batches must be a number of at least 1: phase 1 has 0"),
    ("[[phase]]\ntrain.seq_len = '64'\n", "train.seq_len must be of type int"),
    ("[[phase]]\noptim.beta1 = 1.5\n", "in phase 1 optim.beta1 must be below 1"),
    (
        "[[phase]]\nuntil = 9\n[[phase]]\noptim.schedule = 'linear'\noptim.decay_from = 99\n",
        "decay must begin before its",
    ),
    ("[[phase]\n", "needs valid TOML"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_what_is_no_list_of_phases_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        config_of(tmp_path, text)
    assert words in str(error.value) and "\n" not in str(error.value), str(error.value)
    assert "given.toml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--phases needs a readable file: .* No such file"):
        validate_run(Config(phases=str(tmp_path / "none.toml")), 1)


def test_the_example_of_the_readme_is_a_run_that_one_process_and_four_can_train(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(\[\[phase\]\].*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "phases.toml").write_text(text)
    for world_size in (1, 4):
        phases = phases_of(parse_config(["--phases", str(tmp_path / "phases.toml")], world_size))
        assert [phase.end_step for phase in phases] == [10, 30, 40]
        assert [phase.tokens_per_step for phase in phases] == [2048, 16384, 16384]
