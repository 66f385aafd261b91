"""How a rank leaves: its last line on standard error, torchrun's error file, exit codes. No torch.

A rank that cannot go on also writes its last words to the run's directory (`LastWords`), where `tpengine diagnose`
finds those of all ranks and follows who waited for whom.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tpengine.files import write_beside
from tpengine.terminal import escaped

# A mistake of the user's, found before or during the run; every rank has the same message and one says it.
USER_ERROR = 2
# sysexits.h's EX_SOFTWARE: this rank could not go on, and said in one line what it did and whom it waited for.
RANK_FAILED = 70


_DIRECTORY = "last_words"
_MAX_BYTES = 100_000


@dataclass(frozen=True)
class LastWords:
    """What a rank did when it could not go on.

    Args:
        rank: which.
        reason: why it left.
        step: counted from 1; None before the first.
        doing: an action of the plan, or what it did between plans.
        seconds: for how long.
        waits: the ranks that had to act first, by mesh axis; none if it waited for nobody.
        gone: those of them that had ended.
        time: when it left, as time.time().
    """

    rank: int
    reason: str
    step: int | None
    doing: str
    seconds: float
    waits: Mapping[str, tuple[int, ...]]
    gone: tuple[int, ...]
    time: float

    def write(self, run_dir: Path) -> None:
        """Write them to a run's directory.

        Raises: OSError: they cannot be written.
        """
        directory = run_dir / _DIRECTORY
        directory.mkdir(exist_ok=True)
        write_beside(directory / f"{self.rank}.json", json.dumps(asdict(self)).encode() + b"\n")


def read_last_words(run_dir: Path) -> dict[int, LastWords]:
    """Return the last words of a run's ranks by rank; none of a run that has not failed since it began.

    Raises: ValueError: a file is no rank's last words; one line.
    """
    found = {}
    for path in sorted((run_dir / _DIRECTORY).glob("*.json")):
        try:
            words = _parse(json.loads(path.read_bytes()[:_MAX_BYTES]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            raise ValueError(f"last words must be a rank's: {path}: it holds something else: remove it") from None
        found[words.rank] = words
    return found


def forget_last_words(run_dir: Path) -> None:
    """Remove the last words of an earlier attempt; what cannot be removed stays."""
    for path in (run_dir / _DIRECTORY).glob("*.json"):
        with contextlib.suppress(OSError):
            path.unlink()


def _parse(content: dict[str, Any]) -> LastWords:
    step = content["step"]
    return LastWords(
        rank=int(content["rank"]),
        reason=one_line(str(content["reason"])),
        step=None if step is None else int(step),
        doing=one_line(str(content["doing"])),
        seconds=float(content["seconds"]),
        waits={str(axis): tuple(int(rank) for rank in ranks) for axis, ranks in content["waits"].items()},
        gone=tuple(int(rank) for rank in content["gone"]),
        time=float(content["time"]),
    )


def one_line(text: str) -> str:
    """Join lines: whoever greps a log for one rank's last word must find it whole; show what controls a terminal."""
    return escaped(" ".join(text.splitlines()).strip())


def say(line: str, environ: Mapping[str, str] = os.environ, *, prefix: str = "") -> None:
    """Write `tpengine: <prefix><line>` to standard error, and the line to torchrun. One write: lines of several
    ranks do not mix.
    """
    line = one_line(line)
    sys.stderr.write(f"tpengine: {prefix}{line}\n")
    sys.stderr.flush()
    tell_torchrun(line, environ)


def tell_torchrun(line: str, environ: Mapping[str, str] = os.environ) -> None:
    """Write a line to TORCHELASTIC_ERROR_FILE, with which torchrun's own report ends; without torchrun do nothing."""
    if "TORCHELASTIC_ERROR_FILE" in environ:
        line = escaped(line)  # torchrun prints it
        details = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(environ["TORCHELASTIC_ERROR_FILE"]).write_text(
                json.dumps({"message": {"message": line, "extraInfo": details}})
            )


@functools.lru_cache(maxsize=256)
def say_once(line: str) -> None:
    """Write `tpengine: <line>` to standard error, on the first rank, and not again in this process."""
    if _is_first_rank():
        sys.stderr.write(f"tpengine: {one_line(line)}\n")
        sys.stderr.flush()


def interrupt_in_one_line() -> None:
    """Have Ctrl-C end this process with one line of rank 0's and 130, without a traceback, while no watch listens.

    Call it in the main thread. A process that ignores interrupts goes on doing so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _interrupted(*_: object) -> NoReturn:
    if _is_first_rank():
        os.write(2, b"tpengine: interrupted\n")
    os._exit(128 + signal.SIGINT)
