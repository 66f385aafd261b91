"""Train a transformer: `tpengine train --nproc 4` on one host, `torchrun --nproc-per-node 8 -m tpengine.train` or
`srun python -m tpengine.train` on several, or `tpengine train` for one process.

Whatever a user can get wrong is found before a process group exists; hence torch is imported late. So is all else that
takes time: an interrupt while the program is being loaded is one line as well.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from tpengine.last_words import USER_ERROR, interrupt_in_one_line, one_line, say, tell_torchrun
from tpengine.observe.activity import Activity, OtherRanks
from tpengine.terminal import terminal_safe

if TYPE_CHECKING:
    import torch

    from tpengine.checkpoint.resume import Checkpoint
    from tpengine.config import Config
    from tpengine.data import OpenedCorpus
    from tpengine.distributed.launch import Launch
    from tpengine.distributed.meeting import Meeting
    from tpengine.observe.watch import Watch
    from tpengine.plan import Residency
    from tpengine.runs.job import ContentWatch, Wings
    from tpengine.runs.restoring import Beginning

# A process lets go of its connections a moment before it is gone, and the report is to say which rank is.
_DYING_SECONDS = 0.5
# Without torchrun, which ends the others as soon as one has left.
_LISTENING_SECONDS = 2.0


@dataclass(frozen=True)
class _Preparation:
    """What a rank has found by itself.

    Attributes:
        shared_cores: see Job.
        lock: held until this process ends, so that no other run writes there.
    """

    config: Config
    corpora: tuple[OpenedCorpus, ...]
    device: torch.device
    shared_cores: int
    residency: Residency
    run_dir: Path | None
    lock: IO[str] | None
    checkpoint: Checkpoint | None
    beginning: Beginning | None


class _Arriving(OtherRanks):
    """The other ranks, until all have met."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def explain(self, what: object) -> str:
        """See OtherRanks."""
        return self._meeting.explain(what)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, train.

    Args: argv: arguments without the program's name; default those of the process.
    Raises: SystemExit: `--help`, a mistake, or an end before the last step; see README.md for the exit codes.
    """
    interrupt_in_one_line()
    with terminal_safe():
        _run(sys.argv[1:] if argv is None else argv)


def _run(argv: Sequence[str]) -> None:
    from tpengine.commands.arguments import exit_on_user_error, leave
    from tpengine.config import TrainConfig
    from tpengine.observe.watch import Watch

    with exit_on_user_error(os.environ) as launch:
        _start_ranks(launch, argv)
    message, activity = "", Activity()
    with exit_on_user_error(os.environ) as launch, Watch(launch.rank, activity) as watch:
        os.environ.update(launch.variables())  # what srun said in other words
        prepared, mistake = None, ""
        try:
            prepared = _prepare(launch, argv)
        except ValueError as error:
            if not _others_must_be_told(launch):
                raise
            mistake = one_line(str(error))
        activity.timeout_seconds = (TrainConfig() if prepared is None else prepared.config.train).timeout_seconds
        if prepared is not None and activity.timeout_seconds:  # 0 is for ever
            # Until the first step: another host may still be reading its text.
            activity.timeout_seconds += max(corpus.reading_seconds for corpus in prepared.corpora)
        meeting = meet(launch, mistake, watch)
        assert prepared is not None
        message = _train(prepared, launch, meeting, watch)
    if message:
        # All ranks know it. torchrun ends them all as soon as one has left, which must not be before rank 0 has spoken.
        seconds = 10.0 if "TORCHELASTIC_RUN_ID" in os.environ else _LISTENING_SECONDS
        leave(message, os.environ, speaks=launch.rank == 0, wait_seconds=seconds, is_known=True)


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


def _prepare(launch: Launch, argv: Sequence[str]) -> _Preparation:
    """Find whatever a user can get wrong and this rank can see.

    Raises:
        ValueError: in one line.
    """
    from tpengine.checkpoint.resume import find_checkpoint
    from tpengine.checkpoint.run_directory import open_run_dir
    from tpengine.checkpoint.upload import check_program
    from tpengine.commands.arguments import parse_config
    from tpengine.config import phases_of
    from tpengine.data import open_corpora
    from tpengine.distributed.launcher import taken_nproc
    from tpengine.observe.wandb_run import check_wandb

    if taken_nproc(argv)[0] is not None:
        raise ValueError(
            f"--nproc starts ranks, and this process is rank {launch.rank} of {launch.world_size} already: leave it "
            "out, or start one process without torchrun or srun"
        )
    config = parse_config(argv, launch.world_size)
    # Reading a text without a hash takes as long as the disk does; one rank of each host does it.
    phases = phases_of(config)
    corpora = open_corpora(phases, say=partial(print, flush=True) if launch.rank == 0 else lambda _: None)
    shared_cores = _take_threads(config, launch)
    from tpengine.distributed.process import choose_device

    device = choose_device(config.device, launch)
    if shared_cores and device.type == "cpu":
        import torch

        # Left to itself it takes no more than it believes to be whole cores.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from tpengine.runs.memory_limit import fitting_residency
    from tpengine.runs.opening import attention_taken

    attention_taken(config, device)  # or say why it cannot be torch's
    residency = fitting_residency(config, launch, device)
    if launch.rank == 0:
        check_program(config.train.after_checkpoint)
        check_wandb(config.train.wandb)
    run_dir, lock = open_run_dir(config) if launch.rank == 0 else (None, None)
    if run_dir is not None:
        for corpus in corpora:
            corpus.note_hash(run_dir)
    checkpoint = None
    if config.resume:
        ends, fingerprints = corpora[0].fingerprint_of_ends, [corpus.fingerprint() for corpus in corpora]
        checkpoint = find_checkpoint(config, fingerprints, fingerprint_of_ends=ends)
    beginning = None
    if config.model.path and checkpoint is None:
        from tpengine.hugging_face.beginning import WeightsOfPath

        beginning = WeightsOfPath.of(config.model)
    cores = shared_cores if device.type == "cpu" else 0
    return _Preparation(config, corpora, device, cores, residency, run_dir, lock, checkpoint, beginning)


def wings() -> Wings:
    """Return what a run has other rooms do."""
    from tpengine.hugging_face.beginning import WeightsOfPath
    from tpengine.hugging_face.tokenizer_files import kept_tokenizer
    from tpengine.planner.draw.learning_rate import draw_learning_rate
    from tpengine.planner.machine import machine_on
    from tpengine.planner.modelled.costs import bytes_per_rank
    from tpengine.planner.modelled.memory import memory_of
    from tpengine.planner.profiles.recorded import write_recording
    from tpengine.runs.job import Wings

    def decoder_of(run_dir: Path) -> Callable[[list[int]], str] | None:
        tokenizer = kept_tokenizer(run_dir)
        return None if tokenizer is None else tokenizer.decode

    return Wings(
        bytes_per_rank=bytes_per_rank,
        memory_of=lambda config, layout, plan, device: memory_of(config, layout, plan, machine_on(device)),
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


def meet(launch: Launch, mistake: str, watch: Watch) -> Meeting:
    """Meet the other ranks, and end all if one has made a mistake."""

    def speak(line: str) -> None:
        say(line, prefix="error: ")

    if mistake and launch.rank == 0:
        speak(mistake)
    elif mistake:
        tell_torchrun(mistake)
    from tpengine.distributed.meeting import Meeting

    meeting = Meeting(launch, os.environ)
    watch.activity.ranks = _Arriving(meeting)
    watch.activity.begin("meeting the other ranks")
    try:
        meeting.connect()
        all_go_on = launch.world_size == 1 or meeting.agree(mistake, speak)
    except ValueError:
        raise
    except Exception as error:
        _report(error, watch)
    if not all_go_on:
        raise SystemExit(USER_ERROR)
    return meeting


def _train(prepared: _Preparation, launch: Launch, meeting: Meeting, watch: Watch) -> str:
    """Train; return what the user can mend and only training finds, on all ranks alike; else empty."""
    from tpengine.runs.job import Job
    from tpengine.runs.loop import train
    from tpengine.training.planned_run import RunError

    config, corpora, device, cores = prepared.config, prepared.corpora, prepared.device, prepared.shared_cores
    try:
        residency, run_dir, content = prepared.residency, prepared.run_dir, _content(corpora, launch, device)
        found = prepared.checkpoint, prepared.beginning
        train(Job(config, corpora, launch, device, cores, residency, meeting, wings(), content, run_dir, *found), watch)
    except RunError as error:
        return str(error)
    except Exception as error:
        _report(error, watch)
    return ""


def _content(corpora: Sequence[OpenedCorpus], launch: Launch, device: torch.device) -> ContentWatch:
    """Return what reads the texts of a run again while it goes on; one rank of each host does."""
    from tpengine.data import CPU_SHARE, GPU_SHARE, ContentChecks

    share = GPU_SHARE if device.type == "cuda" else CPU_SHARE
    texts = [text for corpus in corpora for text in corpus.texts]
    return ContentChecks(texts, launch.rank, reads=launch.local_rank == 0, share=share)


def _report(error: Exception, watch: Watch) -> NoReturn:
    """Say why this rank cannot go on, and leave."""
    from tpengine.distributed.process import lost_peer

    lost = lost_peer(error)
    if lost:
        time.sleep(_DYING_SECONDS)
        watch.report_and_leave(lost)
    traceback.print_exc()
    watch.report_and_leave(repr(error.__cause__ or error))


if __name__ == "__main__":
    main()
