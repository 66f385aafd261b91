"""Train a transformer: `tpengine train --nproc 4` on one host, `torchrun --nproc-per-node 8 -m tpengine.train` or
`srun python -m tpengine.train` on several, or `tpengine train` for one process. From Python: `tpengine.run`, which is
what all of these call.

Whatever a user can get wrong is found before a process group exists; hence torch is imported late. So is all else that
takes time: an interrupt while the program is being loaded is one line as well.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tpengine.last_words import USER_ERROR, interrupt_in_one_line, one_line, say, tell_torchrun
from tpengine.observe.activity import Activity, OtherRanks
from tpengine.terminal import terminal_safe

if TYPE_CHECKING:
    import torch

    from tpengine.checkpoint.resume import Checkpoint
    from tpengine.config import Config
    from tpengine.data import OpenedCorpus
    from tpengine.distributed.hosts import Hosts
    from tpengine.distributed.launch import Launch
    from tpengine.distributed.meeting import Meeting
    from tpengine.layout.decided import Decided
    from tpengine.observe.watch import Watch
    from tpengine.runs.callbacks import Callback
    from tpengine.runs.job import ContentWatch, RunResult, Wings
    from tpengine.runs.restoring import Beginning
    from tpengine.training.elementwise import UpdateRule
    from tpengine.training.objective import Count, Loss, Metric, Objective

# A process lets go of its connections a moment before it is gone, and the report is to say which rank is.
_DYING_SECONDS = 0.5
# Without torchrun, which ends the others as soon as one has left.
_LISTENING_SECONDS = 2.0


@dataclass(frozen=True)
class _RunArguments:
    """What `run` is given; see there."""

    config: Config | str | os.PathLike[str] | Sequence[str]
    preset: str | None
    settings: Mapping[str, Any]
    loss: Loss | Objective | None
    count: Count | None
    metrics: Mapping[str, Metric] | None
    optimizer: UpdateRule | None
    callbacks: Sequence[Callback]
    data: Any


@dataclass(frozen=True)
class _Preparation:
    """What a rank has found by itself.

    Attributes:
        shared_cores: see Job.
    """

    config: Config
    corpora: tuple[OpenedCorpus, ...]
    device: torch.device
    shared_cores: int
    decided: Decided
    run_dir: Path | None
    checkpoint: Checkpoint | None
    beginning: Beginning | None
    objective: Objective | None


class _Arriving(OtherRanks):
    """The other ranks, until all have met."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def explain(self, what: object) -> str:
        """See OtherRanks."""
        return self._meeting.explain(what)


def run(
    config: Config | str | os.PathLike[str] | Sequence[str] = (),
    *,
    loss: Loss | Objective | None = None,
    count: Count | None = None,
    metrics: Mapping[str, Metric] | None = None,
    optimizer: UpdateRule | None = None,
    callbacks: Sequence[Callback] = (),
    data: Any = None,
    preset: str | None = None,
    **settings: Any,
) -> RunResult:
    """Train, with parts of your own: plan, watch, checkpoints, metrics, evaluation, signals as on the command line.

    Call it alike on every rank that torchrun or srun starts, or in one process. No process group may exist yet.

        tpengine.run(model={"num_layers": 2}, train={"steps": 100}, run_dir="DIR")
        tpengine.run("run.toml", data=tokens, callbacks=[Mine()])
        tpengine.run(sys.argv[1:], loss=my_loss)

    Args:
        config: a Config; the path of a TOML file; or flags as `tpengine train` has them, --preset, --config and --help
            among them. By default the preset tiny.
        loss: loss(output, batch) -> Tensor [], the sum over a micro-batch, instead of the next token's loss. output is
            a LastOutput, batch a MicroBatch of T tokens; training/objective.py says what they have, and the shapes. Or
            an Objective, which has its count and metrics.
        count: count(batch) -> number, what a micro-batch adds to what the loss is divided by; by default its valid
            labels, or the sum of their weights.
        metrics: by name, each called as the loss is, summed and averaged as it is, and logged, drawn and evaluated.
        optimizer: one of your own, element by element, instead of the one that optim.name says (UpdateRule).
        callbacks: told of steps, evaluations and checkpoints, in this order (Callback).
        data: what is trained on, instead of the text that the settings name: tokens[N], integers in one row; or samples
            with __len__ and __getitem__, each at most seq_len + 1 integers (data/own_data.py). A dictionary is the
            settings of `data`, and a path is data.path.
        preset: of which a file and the settings are changes.
        settings: of a section as a dictionary, model, parallel, train, data or optim; or device, run_dir, resume,
            phases. They override a Config and a file; flags override them.

    Returns:
        Directory, losses and newest checkpoint, equal on all ranks.

    Raises:
        SystemExit: a mistake, which rank 0 has said in one line on standard error (2); or an end before the last step,
            with the exit codes of training/README.md. Ranks that lose a peer, hang or have a bug leave as those of
            `tpengine train` do, without coming back here.
    """
    from tpengine.config import DataConfig

    if isinstance(data, str | os.PathLike):
        settings, data = {**settings, "data": {"path": os.fspath(data)}}, None
    elif isinstance(data, Mapping | DataConfig):
        settings, data = {**settings, "data": data}, None
    with terminal_safe():
        return _run(_RunArguments(config, preset, settings, loss, count, metrics, optimizer, callbacks, data))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, train.

    Args: argv: arguments without the program's name; default those of the process.
    Raises: SystemExit: `--help`, a mistake, or an end before the last step; see README.md for the exit codes.
    """
    interrupt_in_one_line()
    with terminal_safe():
        from tpengine.commands.arguments import exit_on_user_error

        given = sys.argv[1:] if argv is None else argv
        with exit_on_user_error(os.environ) as launch:
            _start_ranks(launch, given)
        run(given)


def _run(given: _RunArguments) -> RunResult:
    from tpengine.commands.arguments import exit_on_user_error, leave
    from tpengine.config import TrainConfig
    from tpengine.distributed.launcher import is_started
    from tpengine.observe.watch import Watch

    result, activity = None, Activity()
    # The run directory's lock is held until here, or until this process ends, so that no other run writes there.
    with ExitStack() as held, exit_on_user_error(os.environ) as launch, Watch(launch.rank, activity) as watch:
        if is_started(launch, os.environ):
            # What srun said in other words. A process alone is no rank, also when it has trained: it may start some.
            os.environ.update(launch.variables())
        prepared, mistake = None, ""
        try:
            prepared = _prepare(launch, given, held)
        except ValueError as error:
            if not _others_must_be_told(launch):
                raise
            mistake = one_line(str(error))
        activity.timeout_seconds = (TrainConfig() if prepared is None else prepared.config.train).timeout_seconds
        if prepared is not None and activity.timeout_seconds:  # 0 is for ever
            # Until the first step: another host may still be reading its text.
            activity.timeout_seconds += max(corpus.reading_seconds for corpus in prepared.corpora)
        meeting, hosts = meet(launch, mistake, watch)
        assert prepared is not None
        result = _train(prepared, given, launch, meeting, hosts, watch)
    if isinstance(result, str):
        # All ranks know it. torchrun ends them all as soon as one has left, which must not be before rank 0 has spoken.
        seconds = 10.0 if "TORCHELASTIC_RUN_ID" in os.environ else _LISTENING_SECONDS
        leave(result, os.environ, speaks=launch.rank == 0, wait_seconds=seconds, is_known=True)
    assert result is not None
    return result


def rank_main() -> None:
    """Be a rank that --nproc has started."""
    from tpengine.distributed.launcher import begin_rank

    begin_rank()
    main()


def _start_ranks(launch: Launch, argv: Sequence[str]) -> None:
    """With --nproc start that many ranks here, and leave with their code; do nothing in a process that is a rank.

    Raises:
        ValueError: a mistake on the command line, before any rank is started.
        SystemExit: all have ended.
    """
    from tpengine.distributed.launcher import is_started, run_ranks_here, taken_nproc

    if is_started(launch, os.environ):
        return
    num_ranks, others = taken_nproc(argv)
    if num_ranks is not None:
        from tpengine.commands.arguments import parse_config

        parse_config(others, num_ranks)
        raise SystemExit(run_ranks_here(num_ranks, "tpengine.train:rank_main", others))


def _prepare(launch: Launch, given: _RunArguments, held: ExitStack) -> _Preparation:
    """Find whatever a user can get wrong and this rank can see.

    Raises:
        ValueError: in one line.
    """
    from tpengine.checkpoint.resume import find_checkpoint
    from tpengine.checkpoint.run_directory import open_run_dir
    from tpengine.checkpoint.upload import check_program
    from tpengine.commands.arguments import resolved
    from tpengine.commands.keywords import asked_in_python
    from tpengine.config import phases_of
    from tpengine.data import open_corpora
    from tpengine.observe.wandb_run import check_wandb

    _check_given(launch, given)
    config = resolved(
        lambda: asked_in_python(given.config, given.preset, given.settings, given.optimizer),
        launch.world_size,
        given.data,
    )
    # Reading a text without a hash takes as long as the disk does; one rank of each host does it.
    phases = phases_of(config)
    say = partial(print, flush=True) if launch.rank == 0 else lambda _: None
    corpora = open_corpora(phases, say, given.data)
    shared_cores = _take_threads(config, launch)
    from tpengine.distributed.process import choose_device

    device = choose_device(config.device, launch)
    if shared_cores and device.type == "cpu":
        import torch

        # Left to itself it takes no more than it believes to be whole cores.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if given.optimizer is not None:
        from tpengine.training.update_rules import with_rule

        config = with_rule(config, given.optimizer)
    objective = _objective(given, config)
    from tpengine.runs.memory_limit import decided_by_memory
    from tpengine.runs.opening import attention_taken
    from tpengine.runs.own_parts import check_same_loss

    attention_taken(config, device)  # or say why it cannot be torch's
    decided = decided_by_memory(config, launch, device)
    if launch.rank == 0:
        check_program(config.train.after_checkpoint)
        check_wandb(config.train.wandb)
    run_dir = None
    if launch.rank == 0:
        run_dir, lock = open_run_dir(config)
        held.enter_context(lock)
        for corpus in corpora:
            corpus.note_hash(run_dir)
    checkpoint = None
    if config.resume:
        ends, fingerprints = corpora[0].fingerprint_of_ends, [corpus.fingerprint() for corpus in corpora]
        checkpoint = find_checkpoint(config, fingerprints, fingerprint_of_ends=ends)
        check_same_loss(checkpoint, objective)
    beginning = None
    if config.model.path and checkpoint is None:
        from tpengine.hugging_face.beginning import WeightsOfPath

        beginning = WeightsOfPath.of(config.model)
    cores = shared_cores if device.type == "cpu" else 0
    return _Preparation(config, corpora, device, cores, decided, run_dir, checkpoint, beginning, objective)


def _check_given(launch: Launch, given: _RunArguments) -> None:
    """Find what is wrong with what is no setting.

    Raises:
        ValueError: in one line.
    """
    from tpengine.distributed.launcher import taken_nproc

    flags = given.config if isinstance(given.config, list | tuple) else ()
    if taken_nproc([flag for flag in flags if isinstance(flag, str)])[0] is not None:
        raise ValueError(
            f"--nproc starts ranks, and this process is rank {launch.rank} of {launch.world_size} already: leave it "
            "out, or start one process without torchrun or srun"
        )
    if not isinstance(given.callbacks, Sequence):
        name = type(given.callbacks).__name__
        raise ValueError(f"callbacks must be a list: got {name}: give [{name}()]")
    wrong = [each for each in given.callbacks if not hasattr(type(each), "on_first_rank_only")]
    if wrong:
        raise ValueError(
            f"callbacks must be objects of classes that derive from tpengine.Callback: got {wrong[0]!r}: derive its "
            "class, and give an object of it"
        )


def _objective(given: _RunArguments, config: Config) -> Objective | None:
    """Return the user's own loss and metrics; None for none.

    Raises:
        ValueError: they are no functions, or do not go with the settings; one line.
    """
    if given.loss is None and given.count is None and not given.metrics:
        return None
    from tpengine.training.objective import Objective, resolved

    if given.metrics is not None and not isinstance(given.metrics, Mapping):
        name = type(given.metrics).__name__
        raise ValueError(f"metrics must be a dictionary of functions by name: got {name}: use metrics={{'mine': mine}}")
    if isinstance(given.loss, Objective):
        if given.count is not None or given.metrics:
            raise ValueError(
                "an Objective has its count and metrics: got loss=Objective(...) and them too: leave them out"
            )
        resolved(given.loss, config.train)
        return given.loss
    functions = {"loss": given.loss, "count": given.count, **(given.metrics or {})}
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ValueError(f"a loss, its count and metrics are functions: {name} is {function!r}: give the function")
    objective = Objective(given.loss, given.count, dict(given.metrics or {}))
    resolved(objective, config.train)
    return objective


def wings(limit: int = 0) -> Wings:
    """Return what a run has other rooms do. Args: limit: bytes that a rank may use; 0 for any number."""
    from tpengine.hugging_face.beginning import WeightsOfPath
    from tpengine.hugging_face.tokenizer_files import kept_tokenizer
    from tpengine.planner.draw.learning_rate import draw_learning_rate
    from tpengine.planner.machine import machine_on
    from tpengine.planner.modelled.costs import bytes_per_rank
    from tpengine.planner.modelled.memory import memory_of, most_load
    from tpengine.planner.profiles.recorded import write_recording
    from tpengine.runs.job import Wings

    def decoder_of(run_dir: Path) -> Callable[[list[int]], str] | None:
        tokenizer = kept_tokenizer(run_dir)
        return None if tokenizer is None else tokenizer.decode

    return Wings(
        bytes_per_rank=bytes_per_rank,
        memory_of=lambda config, layout, plan, device: memory_of(config, layout, plan, machine_on(device)),
        most_load=lambda config, layout, plan, device: most_load(config, layout, plan, limit, machine_on(device)),
        draw_learning_rate=draw_learning_rate,
        write_recording=write_recording,
        find_beginning=WeightsOfPath.of,
        decoder_of=decoder_of,
    )


def _take_threads(config: Config, launch: Launch) -> int:
    """Have torch, which is not yet loaded, compute with this rank's share of the host's cores, and wait without them.

    Returns:
        The cores that are shared; 0 if the number of threads stays what it is.
    """
    from tpengine.distributed.launch import environment_of_parent, num_cores, passive_waiting, threads_of_rank

    # However many threads there are.
    os.environ.update(passive_waiting(os.environ))
    # Exact mode computes with one thread; what a GPU computes needs none.
    if config.train.reduction == "exact" or config.device == "cuda":
        return 0
    cores = num_cores()
    threads = threads_of_rank(launch, os.environ, environment_of_parent(), cores)
    if threads is None:
        return 0
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("MKL_NUM_THREADS", str(threads))
    return cores


def _others_must_be_told(launch: Launch) -> bool:
    """Whether this rank's end alone leaves others waiting: torchrun on one node ends all with rank 0, which speaks."""
    all_are_torchruns = "TORCHELASTIC_RUN_ID" in os.environ and launch.local_world_size == launch.world_size
    return launch.world_size > 1 and not (all_are_torchruns and launch.rank == 0)


def meet(launch: Launch, mistake: str, watch: Watch) -> tuple[Meeting, Hosts]:
    """Meet the other ranks, and end all if one has made a mistake; return where they met, and their hosts."""

    def speak(line: str) -> None:
        say(line, prefix="error: ")

    if mistake and launch.rank == 0:
        speak(mistake)
    elif mistake:
        tell_torchrun(mistake)
    from tpengine.distributed.hosts import Hosts
    from tpengine.distributed.meeting import Meeting

    meeting, hosts = Meeting(launch, os.environ), Hosts()
    watch.activity.ranks = _Arriving(meeting)
    watch.activity.begin("meeting the other ranks")
    try:
        meeting.connect()
        all_go_on = launch.world_size == 1 or meeting.agree(mistake, speak)
        if all_go_on:
            watch.activity.begin("comparing the hosts")
            hosts = _agreed_hosts(meeting, launch, speak)
    except ValueError:
        raise
    except Exception as error:
        _report(error, watch, hosts)
    if not all_go_on:
        raise SystemExit(USER_ERROR)
    return meeting, hosts


def _agreed_hosts(meeting: Meeting, launch: Launch, speak: Callable[[str], None]) -> Hosts:
    """Return the hosts of the run, or end all ranks if they do not go together."""
    from tpengine.distributed.hosts import meet_hosts

    hosts, mistake = meet_hosts(meeting, launch, os.environ, say)
    if not hosts.names:
        return hosts
    if mistake and launch.rank == 0:
        speak(mistake)
    elif mistake:
        tell_torchrun(mistake)
    if not meeting.agree(mistake, speak, "whether the hosts go together"):
        raise SystemExit(USER_ERROR)
    return hosts


def _train(
    prepared: _Preparation, given: _RunArguments, launch: Launch, meeting: Meeting, hosts: Hosts, watch: Watch
) -> RunResult | str:
    """Train; return what has come of it, or what the user can mend and only training finds; on all ranks alike."""
    from tpengine.runs.job import Job
    from tpengine.runs.loop import train
    from tpengine.runs.memory_limit import memory_limit
    from tpengine.training.planned_run import RunError

    config, corpora, device, cores = prepared.config, prepared.corpora, prepared.device, prepared.shared_cores
    try:
        decided, run_dir, content = prepared.decided, prepared.run_dir, _content(corpora, launch, device)
        found = prepared.checkpoint, prepared.beginning
        limit = memory_limit(config, launch, device)
        others = meeting, wings(limit), content, run_dir
        job = Job(
            *(config, corpora, launch, device, cores, decided, *others, *found),
            hosts=hosts,
            objective=prepared.objective,
            optimizer=given.optimizer,
            callbacks=tuple(given.callbacks),
        )
        return train(job, watch)
    except RunError as error:
        return str(error)
    except Exception as error:
        _report(error, watch, hosts)


def _content(corpora: Sequence[OpenedCorpus], launch: Launch, device: torch.device) -> ContentWatch:
    """Return what reads the texts of a run again while it goes on; one rank of each host does."""
    from tpengine.data import CPU_SHARE, GPU_SHARE, ContentChecks

    share = GPU_SHARE if device.type == "cuda" else CPU_SHARE
    texts = [text for corpus in corpora for text in corpus.texts]
    return ContentChecks(texts, launch.rank, reads=launch.local_rank == 0, share=share)


def _report(error: Exception, watch: Watch, hosts: Hosts) -> NoReturn:
    """Say why this rank cannot go on, and leave."""
    from tpengine.distributed.process import lost_peer

    lost = lost_peer(error)
    if lost:
        time.sleep(_DYING_SECONDS)
        host = hosts.lost(error, int(os.environ.get("RANK", "0")))
        watch.report_and_leave(f"a connection to {host} closed" if host else lost)
    traceback.print_exc()
    watch.report_and_leave(repr(error.__cause__ or error))


if __name__ == "__main__":
    main()
