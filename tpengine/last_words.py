"""How a rank leaves: its last line on standard error, torchrun's error file, exit codes. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

# A mistake of the user's, found before or during the run; every rank has the same message and one says it.
USER_ERROR = 2
# sysexits.h's EX_SOFTWARE: this rank could not go on, and said in one line what it did and whom it waited for.
RANK_FAILED = 70


def one_line(text: str) -> str:
    """Join lines: whoever greps a log for one rank's last word must find it whole."""
    return " ".join(text.splitlines()).strip()


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
        details = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(environ["TORCHELASTIC_ERROR_FILE"]).write_text(
                json.dumps({"message": {"message": line, "extraInfo": details}})
            )


def interrupt_in_one_line() -> None:
    """Have Ctrl-C end this process with one line of rank 0's and 130, without a traceback, while no watch listens.

    Call it in the main thread. A process that ignores interrupts goes on doing so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(*_: object) -> NoReturn:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        os.write(2, b"tpengine: interrupted\n")
    os._exit(128 + signal.SIGINT)
