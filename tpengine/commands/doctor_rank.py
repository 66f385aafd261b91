"""A rank of `tpengine doctor`: meets the others, examines, and on rank 0 prints what was found."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tpengine.commands.doctor_arguments import check_written, out_of, parsed
from tpengine.commands.doctor_report import report
from tpengine.distributed.launch import Launch, passive_waiting
from tpengine.distributed.launcher import begin_rank
from tpengine.distributed.meeting import Meeting
from tpengine.distributed.process import choose_device
from tpengine.doctor.examination import Examination, Options, Record, leave_time
from tpengine.doctor.finding import is_ready
from tpengine.doctor.measure.sizes import QUICK, TINY_TIMED, sizes_of
from tpengine.doctor.products import TIMED_ON_CPU, TIMED_ON_GPU
from tpengine.doctor.together import Together
from tpengine.last_words import RANK_FAILED, USER_ERROR, one_line, say
from tpengine.terminal import terminal_safe

# As a run waits for its ranks to meet (train.timeout_seconds).
_MEETING_SECONDS = 300.0
_PASSES = 2


def rank_main() -> None:
    """Be a rank that --nproc has started."""
    begin_rank()
    with terminal_safe():
        sys.exit(examine(parsed(sys.argv[1:]), Launch.of(os.environ)))


def examine(args: argparse.Namespace, launch: Launch) -> int:
    """Be one rank of an examination; return its exit code, rank 0's first of all.

    Args:
        args: of the command.
        launch: this rank's place.
    """
    os.environ.update(launch.variables() | passive_waiting(os.environ))
    device, mistake = torch.device("cpu"), ""
    try:
        device = choose_device(args.device, launch)
        if launch.rank == 0:
            check_written(out_of(args))
    except ValueError as error:
        mistake = one_line(str(error))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = Meeting(launch, os.environ)
    if not _meet(meeting, launch, mistake):
        return USER_ERROR
    record = Record()
    options = _options(args, device)

    def answer() -> None:
        lines = report(record.findings, record.facts, record.measured, out_of(args), is_quick=args.quick)
        print("\n".join(lines), flush=True)

    def leave(why: str) -> None:
        """Print what is known when a look hangs; called by rank 0's thread."""
        answer()
        say(f"not all was looked at: {why}")

    store, another = meeting.store, meeting.another_client if launch.world_size > 1 else lambda: meeting.store
    with Together(launch, store, another, leave, _Progress()) as together:
        Examination(launch, device, together, store, options, record, os.environ).run()
    if launch.rank == 0:
        answer()
    if record.lost:
        if launch.rank == 0:
            say(f"not all was looked at: {record.lost}")
            leave_time()
        os._exit(RANK_FAILED)  # groups with a rank that is gone cannot be taken down
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    is_fine = launch.rank != 0 or is_ready(record.findings) or "TORCHELASTIC_RUN_ID" in os.environ
    return 0 if is_fine else 1


class _Progress:
    """Writes what is looked at to standard error, a line each, with the seconds since the first."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()

    def __call__(self, what: str) -> None:
        sys.stderr.write(f"tpengine: {time.monotonic() - self._began_at:5.1f} s  {what}\n")
        sys.stderr.flush()


def _options(args: argparse.Namespace, device: torch.device) -> Options:
    is_gpu = device.type == "cuda"
    timed = TIMED_ON_GPU if is_gpu else TIMED_ON_CPU
    return Options(
        sizes=QUICK if args.quick else sizes_of(device.type),
        dtype=args.dtype or ("bfloat16" if is_gpu else "float32"),
        directory=args.run_dir,
        passes=1 if args.quick else _PASSES,
        timed=TINY_TIMED if args.quick else timed,
    )


def _meet(meeting: Meeting, launch: Launch, mistake: str) -> bool:
    """Meet the other ranks; return whether all go on. A rank that waits too long says for whom, and leaves."""

    def speak(line: str) -> None:
        say(line, prefix="error: ")

    if mistake and launch.rank == 0:
        speak(mistake)
    with _bounded(meeting, launch.rank):
        meeting.connect()
        if launch.world_size == 1:
            return not mistake
        return meeting.agree(mistake, speak)


@contextmanager
def _bounded(meeting: Meeting, rank: int) -> Iterator[None]:
    def late() -> None:
        say(f"rank {rank} ends: meeting the other ranks for {_MEETING_SECONDS:.0f} s{meeting.explain(None)}")
        os._exit(RANK_FAILED)

    timer = threading.Timer(_MEETING_SECONDS, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
