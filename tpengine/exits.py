"""How a rank leaves: its last line on standard error, torchrun's error file, exit codes. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

# A mistake of the user's, found before or during the run; every rank has the same message and one says it.
USER_ERROR = 2
# sysexits.h's EX_SOFTWARE: this rank could not go on, and said in one line what it did and whom it waited for.
RANK_FAILED = 70


def one_line(text: str) -> str:
    """Join lines: whoever greps a log for one rank's last word must find it whole."""
    return " ".join(text.splitlines()).strip()


def say(line: str, environ: Mapping[str, str] = os.environ, *, prefix: str = "") -> None:
    """Write `tpengine: <prefix><line>` to standard error, and the line to TORCHELASTIC_ERROR_FILE, with which
    torchrun's own report ends. One write: lines of several ranks do not mix."""
    line = one_line(line)
    sys.stderr.write(f"tpengine: {prefix}{line}\n")
    sys.stderr.flush()
    if "TORCHELASTIC_ERROR_FILE" in environ:
        details = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(environ["TORCHELASTIC_ERROR_FILE"]).write_text(
                json.dumps({"message": {"message": line, "extraInfo": details}})
            )
