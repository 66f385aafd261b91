"""The process between a rank and its upload command: if the rank dies, however, the command ends with all it started.

A script of its own: run by its path, with the command's words, in a session of its own, and with a pipe as standard
input whose other end the rank holds. Nothing of the package is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_NOT_STARTED = 127


def main(words: Sequence[str]) -> int:
    """Run a command; return its exit code, or as a shell 128 + the signal that ended it."""
    try:
        command = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", flush=True)
        return _NOT_STARTED
    threading.Thread(target=_end_with_the_rank, daemon=True).start()
    code = command.wait()
    return code if code >= 0 else 128 - code


def _end_with_the_rank() -> None:
    """Wait until nobody holds the pipe's other end, then end everything in this session's group, this process too."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
