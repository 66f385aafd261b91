"""Rung: pure. What a run continues with: which checkpoint, which layout, which configuration."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.saved_runs import begin, of_experts, saved_run, write_checkpoint

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import CheckpointError, Index, write_index
from tpengine.checkpoint.resume import changes_since, continued_config, find_checkpoint, state_of, without_layout
from tpengine.commands.arguments import ConfigError, parse_config
from tpengine.config import Config, TrainConfig, decay_steps_of, num_evaluated, validate
from tpengine.config.presets import tiny_moe
from tpengine.config.settings import ModelDetails
from tpengine.config.toml import dump_toml
from tpengine.training.learning_rate import learning_rate


def sizes(config: Config) -> tuple[int | None, int | None, int | None]:
    return config.parallel.tp, config.parallel.pp, config.parallel.dp


def test_the_same_processes_keep_the_layout() -> None:
    saved = saved_run(1, 4, 1)
    assert continued_config(saved, without_layout(saved), 4) == saved


def test_other_processes_get_a_layout_and_the_same_global_batch() -> None:
    saved = saved_run(1, 2, 2)
    continued = continued_config(saved, without_layout(saved), 2)
    assert sizes(continued) == (1, 2, 1) and continued.train.num_micro_batches == 8
    continued = continued_config(saved, without_layout(saved), 1)
    assert sizes(continued) == (1, 1, 1) and continued.train.num_micro_batches == 8


@pytest.mark.parametrize(
    ("saved", "world", "now"),
    [
        # (tp, pp, dp, ep): the legal ep nearest to the saved one.
        ((2, 1, 2, 4), 4, (2, 1, 2, 4)),
        ((2, 1, 2, 4), 2, (2, 1, 1, 2)),
        ((2, 1, 2, 4), 8, (2, 1, 4, 4)),
        ((1, 1, 4, 4), 1, (1, 1, 1, 1)),
        ((1, 1, 4, 1), 2, (1, 1, 2, 1)),
    ],
)
def test_other_processes_share_experts_as_nearly_alike_as_may_be(
    saved: tuple[int, int, int, int], world: int, now: tuple[int, int, int, int]
) -> None:
    base = saved_run(*saved[:3])
    details = ModelDetails(num_experts=8, experts_per_token=2, expert_ffn_size=64)
    model = replace(base.model, architecture="qwen3_moe", details=details)
    before = replace(base, model=model, parallel=replace(base.parallel, ep=saved[3]))
    continued = validate(continued_config(before, without_layout(before), world), world)
    assert (*sizes(continued), continued.parallel.ep) == now


def test_a_preset_beside_a_resume_says_nothing_of_who_shares_experts() -> None:
    before = of_experts()
    before = replace(before, parallel=replace(before.parallel, ep=4))
    continued = continued_config(before, without_layout(before), 4, tiny_moe().parallel)
    assert (*sizes(continued), continued.parallel.ep) == (1, 1, 4, 4)


def test_a_flag_says_who_shares_experts() -> None:
    base = saved_run(2, 1, 2)
    details = ModelDetails(num_experts=8, experts_per_token=2, expert_ffn_size=64)
    before = replace(base, model=replace(base.model, architecture="qwen3_moe", details=details))
    wanted = without_layout(before)
    wanted = replace(wanted, parallel=replace(wanted.parallel, ep=4))
    assert continued_config(before, wanted, 4).parallel.ep == 4


@pytest.mark.parametrize(
    ("saved", "world", "layout"),
    [
        # tp and pp are what fits a model into memory; replicas come and go.
        ((2, 2, 4), 8, (2, 2, 2)),
        ((1, 1, 8), 4, (1, 1, 4)),
        ((2, 2, 2), 2, (2, 1, 1)),
        ((4, 1, 2), 2, (2, 1, 1)),
        # dp 3 divides neither 4 heads nor 8 micro-batches nor, as tp, the heads: what is left is a pipeline.
        ((1, 1, 2), 3, (1, 3, 1)),
        ((2, 2, 2), 12, (2, 3, 2)),
    ],
)
def test_the_nearest_legal_layout_is_taken(
    saved: tuple[int, int, int], world: int, layout: tuple[int, int, int]
) -> None:
    before = saved_run(*saved, num_micro_batches=8 // saved[2])
    continued = validate(continued_config(before, without_layout(before), world), world)
    assert sizes(continued) == layout and continued.train.num_micro_batches * layout[2] == 8


def test_another_size_of_micro_batches_keeps_the_samples_of_a_step() -> None:
    saved = saved_run(1, 1, 2)
    wanted = without_layout(saved)
    wanted = replace(wanted, train=replace(wanted.train, micro_batch_size=2))
    assert continued_config(saved, wanted, 1).train.num_micro_batches == 16
    # 32 samples are no whole number of threes: the run's number stays, and find_checkpoint refuses it with a way out.
    wanted = replace(wanted, train=replace(wanted.train, micro_batch_size=3))
    assert continued_config(saved, wanted, 1).train.num_micro_batches == 8


def test_another_size_of_micro_batches_keeps_the_held_out_samples() -> None:
    """Before, a resume with half the size evaluated half of them, and compared that loss with the best one's."""
    saved = saved_run(1, 1, 1)
    assert num_evaluated(saved.train) == 64

    def resumed(before: Config, **train: int) -> TrainConfig:
        base = without_layout(before)
        return continued_config(before, replace(base, train=replace(base.train, **train)), 1).train

    for size, micro_batches in ((2, 8), (1, 16), (8, 2), (16, 1)):
        halved = replace(saved, train=resumed(saved, micro_batch_size=size))
        assert (halved.train.num_micro_batches, num_evaluated(halved.train)) == (micro_batches, 64)
        # And so does the resume after it.
        again = resumed(halved, micro_batch_size=4)
        assert (again.num_micro_batches, num_evaluated(again)) == (4, 64)
    assert resumed(saved).eval_samples == 0
    # A number that is asked for is taken.
    halved = replace(saved, train=resumed(saved, micro_batch_size=2))
    assert num_evaluated(resumed(halved, eval_micro_batches=3)) == 6
    assert num_evaluated(resumed(saved, micro_batch_size=2, eval_micro_batches=3)) == 6
    assert num_evaluated(resumed(halved, eval_samples=5)) == 5
    assert num_evaluated(resumed(halved, eval_micro_batches=0)) == 0


def test_sizes_that_the_flags_give_stand() -> None:
    saved = saved_run(2, 2, 1)
    wanted = without_layout(saved)
    wanted = replace(wanted, parallel=replace(wanted.parallel, dp=4))
    continued = continued_config(saved, wanted, 4)
    assert sizes(continued) == (1, 1, 4) and continued.train.num_micro_batches == 1
    with pytest.raises(ValueError, match=r"tp\*pp\*dp must equal the number of processes"):
        continued_config(saved, wanted, 6)


def test_a_batch_that_does_not_divide_is_refused_with_a_way_out() -> None:
    saved = saved_run(1, 1, 1, num_micro_batches=4)
    wanted = without_layout(saved)
    wanted = replace(wanted, parallel=replace(wanted.parallel, tp=1, pp=1))
    with pytest.raises(ValueError, match=r"the run has 4 per step, dp 3: use --parallel.dp 1"):
        continued_config(saved, wanted, 3)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]))
def test_the_global_batch_never_changes(world: int, dp: int, new_world: int) -> None:
    saved = saved_run(1, 1, dp, num_micro_batches=8)
    continued = continued_config(saved, without_layout(saved), new_world)
    new_dp = continued.parallel.dp
    assert new_dp is not None
    assert continued.train.num_micro_batches * new_dp == 8 * dp


def test_the_newest_checkpoint_is_found(tmp_path: Path) -> None:
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    assert find_checkpoint(config, "f" * 64) is None
    write_checkpoint(tmp_path, config, 10)
    write_checkpoint(tmp_path, config, 20)
    found = find_checkpoint(config, "f" * 64)
    assert found is not None and found.index.step == 20 and found.directory.name == "step-00000020"


def damage(checkpoint: Path) -> str:
    """Cut the index; return how the error names it."""
    index = checkpoint / "index.json"
    index.write_bytes(index.read_bytes()[:-9])
    return f"{index}: cut short or altered"


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, config, step)
    reason = damage(tmp_path / "checkpoints/step-00000040")
    found = find_checkpoint(config, "f" * 64)
    assert found is not None and found.index.step == 30
    assert list(found.damaged) == [40] and reason in found.damaged[40]
    # Another rank may know of more.
    found = find_checkpoint(config, "f" * 64, {30: "seen by rank 3"})
    assert found is not None and found.index.step == 20 and found.damaged[30] == "seen by rank 3"
    assert sorted(found.damaged) == [30, 40]


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    """It would stand where that step is to be saved."""
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    write_checkpoint(tmp_path, config, 10)
    write_checkpoint(tmp_path, config, 20).rename(tmp_path / "checkpoints/step-00000030")
    found = find_checkpoint(config, "f" * 64)
    assert found is not None and found.index.step == 10 and "is of step 20" in found.damaged[30]


def test_no_whole_checkpoint_names_all(tmp_path: Path) -> None:
    """It is not a run that was stopped before its first: to begin anew would bury what can perhaps be mended."""
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    reasons = [damage(write_checkpoint(tmp_path, config, step)) for step in (10, 20)]
    with pytest.raises(CheckpointError) as error:
        find_checkpoint(config, "f" * 64)
    message = str(error.value)
    assert message.startswith(f"--resume needs a whole checkpoint: {tmp_path}/checkpoints has none: step-00000020: ")
    assert all(reason in message for reason in reasons) and "\n" not in message


def test_what_belongs_to_another_run_never_gives_way(tmp_path: Path) -> None:
    """Neither the newest, nor an older one that a damaged one has given way to."""
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    other = replace(config, train=replace(config.train, seed=3))
    write_checkpoint(tmp_path, config, 10)
    write_checkpoint(tmp_path, other, 20)
    with pytest.raises(CheckpointError, match=r"must keep train.seed: .*step-00000020"):
        find_checkpoint(config, "f" * 64)
    damage(tmp_path / "checkpoints/step-00000020")
    with pytest.raises(CheckpointError, match=r"must keep train.seed: .*step-00000010"):
        find_checkpoint(other, "f" * 64)


def test_the_command_line_continues_the_runs_own_configuration(tmp_path: Path) -> None:
    saved = replace(saved_run(1, 1, 2), run_dir=str(tmp_path), optim=replace(Config().optim, lr=1e-4))
    (tmp_path / "config.toml").write_text(dump_toml(saved))
    config = parse_config(["--resume", "--run-dir", str(tmp_path), "--optim.beta1", "0.8"], 1)
    assert (config.optim.lr, config.optim.beta1, config.resume) == (1e-4, 0.8, True)
    assert sizes(config) == (1, 1, 1) and config.train.num_micro_batches == 8
    config = parse_config(["--resume", "--run-dir", str(tmp_path), "--preset", "bench"], 1)
    assert config.optim.lr != 1e-4 and config.resume


def global_batch(config: Config) -> int:
    return config.train.micro_batch_size * config.train.num_micro_batches * (config.parallel.dp or 0)


@pytest.mark.by_default("2-preset", "8-file")
@pytest.mark.parametrize("base", ["preset", "file"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_one_command_continues_on_any_number_of_processes(tmp_path: Path, base: str, world: int) -> None:
    """torchrun --nnodes 1:4 restarts a run so, with --preset or --config; it keeps its first global batch."""
    (tmp_path / "my.toml").write_text("[train]\nnum_micro_batches = 2\n[parallel]\ntp = 1\npp = 2\ndp = 2\n")
    command = ["--preset", "tiny"] if base == "preset" else ["--config", str(tmp_path / "my.toml")]
    command += ["--resume", "--optim.lr", "0.01"]
    first = begin(tmp_path, *command)
    config = parse_config([*command, "--run-dir", str(tmp_path)], world)
    assert global_batch(config) == global_batch(first)
    assert find_checkpoint(config, "f" * 64) is not None
    alone = parse_config(["--resume", "--run-dir", str(tmp_path)], world)
    assert config == replace(alone, resume=True)
    if world == 4:
        assert replace(config, resume=False) == replace(first, resume=False)


def test_flags_win_over_the_run_and_the_run_over_preset_and_file(tmp_path: Path) -> None:
    first = begin(tmp_path, "--preset", "tiny", "--parallel.dp", "4")
    command = ["--preset", "tiny", "--resume", "--run-dir", str(tmp_path)]
    assert sizes(parse_config(command, 4)) == sizes(first) == (1, 1, 4)
    config = parse_config([*command, "--parallel.tp", "2"], 4)
    assert sizes(config) == (2, 1, 2) and global_batch(config) == global_batch(first)
    config = parse_config([*command, "--train.num-micro-batches", "4"], 2)
    assert config.train.num_micro_batches == 4
    with pytest.raises(CheckpointError, match="must keep samples per step"):
        find_checkpoint(config, "f" * 64)
    # A file that is edited between two starts has its way with the layout where that fills the processes.
    (tmp_path / "my.toml").write_text("[parallel]\ntp = 2\npp = 2\n")
    command = ["--config", str(tmp_path / "my.toml"), "--resume", "--run-dir", str(tmp_path)]
    assert sizes(parse_config(command, 4)) == (2, 2, 1)
    assert sizes(parse_config(command, 2)) == (1, 1, 2)


def test_before_its_first_checkpoint_a_run_begins_as_the_command_says(tmp_path: Path) -> None:
    first = begin(tmp_path, "--preset", "tiny", "--parallel.dp", "4", "--train.steps", "40")
    shutil.rmtree(tmp_path / "checkpoints")
    config = parse_config(["--preset", "tiny", "--resume", "--run-dir", str(tmp_path)], 2)
    assert sizes(config) == (2, 1, 1) and global_batch(config) < global_batch(first)
    assert config.optim.decay_steps == config.train.steps == 250


def rates(config: Config, steps: range) -> list[float]:
    return [learning_rate(config.optim, step, decay_steps_of(config)) for step in steps]


@pytest.mark.by_default("False-alone")
@pytest.mark.parametrize("base", [[], ["--preset", "tiny"]], ids=["alone", "preset"])
@pytest.mark.parametrize("is_old", [False, True])
def test_the_learning_rate_does_not_jump_where_a_run_becomes_longer(
    tmp_path: Path, base: list[str], is_old: bool
) -> None:
    """A config.toml that is too old to have the setting stands for a schedule as long as the run was."""
    first = begin(tmp_path, "--train.steps", "40")
    assert first.optim.decay_steps == 40
    if is_old:
        text = (tmp_path / "config.toml").read_text()
        (tmp_path / "config.toml").write_text(text.replace("decay_steps = 40\n", ""))
    command = [*base, "--resume", "--run-dir", str(tmp_path), "--train.steps", "80"]
    longer = parse_config(command, 4)
    assert rates(longer, range(40)) == rates(first, range(40))
    assert rates(longer, range(40, 80)) == [rates(first, range(39, 40))[0]] * 40
    # A second time, from what the first resume has left.
    (tmp_path / "config.toml").write_text(dump_toml(longer))
    assert parse_config([*command, "--train.steps", "120"], 4).optim.decay_steps == 40
    for steps, want in (("100", 100), ("0", 80)):
        assert parse_config([*command, "--optim.decay-steps", steps], 4).optim.decay_steps == want


def test_a_checkpoint_of_another_version_is_read(tmp_path: Path) -> None:
    """What a newer one knows besides is nobody's; what an older one lacks was as it is by default."""
    config = replace(saved_run(1, 1, 1), run_dir=str(tmp_path))
    state = state_of(config, "f" * 64, 10)
    state |= {"updates": 9, "threads": 4}
    for section in ("model", "train", "data", "parallel", "optim"):
        state["config"][section]["of_the_future"] = "x"
    del state["config"]["optim"]["decay_steps"], state["config"]["train"]["keep_checkpoints"]
    del state["config"]["device"]
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    write_index(directory.begin(10), Index(10, {}, {}, state))
    directory.complete(10)
    found = find_checkpoint(config, "f" * 64)
    assert found is not None and changes_since(found.index, config) == []
    longer = replace(config, train=replace(config.train, steps=500))
    assert changes_since(found.index, longer) == [
        "optim.decay_steps from 250 to 500",
        "train.steps from 250 to 500",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs the directory of a run: got no --run-dir"),
        (["--resume", "--run-dir", "{}/absent"], "absent has no config.toml"),
        (["--resume=yes"], "--resume takes no value: got 'yes': use --resume or --no-resume"),
    ],
)
def test_resuming_nothing_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config([argument.format(tmp_path) for argument in arguments], 1)
    assert message in str(error.value) and "\n" not in str(error.value)
