"""A process that measures operators with a given tpkernels, so that two revisions can be compared.

Two revisions in one process would register the same names twice. So each side is such a process; they differ only in
the directory of tpkernels, while cases and clocks are the working tree's. The caller asks each in turn for one sample,
so calls are interleaved and ratios are paired, as within one process. A process that is not asked blocks in reading its
pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness.revision import ROOT
from benchmarks.kernels.cases.cases import MissingOperator

_MODULE = "benchmarks.kernels.side"
_GRACE_SECONDS = 10.0


class Side:
    """The caller's end: a context manager that ends the process on exit.

    Args:
        name: for messages.
        tree: a checkout whose kernels/tpkernels is measured.
        num_threads: threads of torch in that process.
    """

    def __init__(self, name: str, tree: Path, num_threads: int) -> None:
        self.name = name
        self._connection, theirs = Pipe()
        kernels = tree / "kernels"
        paths = [str(kernels), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(kernels), str(num_threads)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
        self._process.terminate()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the process's `Measured`.

        Raises:
            MissingOperator: its tpkernels does not have it.
            RuntimeError: any other failure there.
        """
        try:
            self._connection.send((method, arguments))
            kind, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the process of {self.name} has ended: its message is above") from error
        if kind == "missing":
            raise MissingOperator(f"{self.name}: {value}")
        if kind == "error":
            raise RuntimeError(f"the process of {self.name} failed: {value}")
        return value


def serve(connection: Connection, kernels: Path) -> None:
    """Answer calls until the caller closes its end."""
    import tpkernels

    from benchmarks.kernels.measure import Measured

    # With the same code on both sides the ratio would be 1, and no one would notice.
    assert Path(tpkernels.__file__).is_relative_to(kernels), f"tpkernels is {tpkernels.__file__}, not of {kernels}"
    measured = Measured()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = "value", getattr(measured, method)(*arguments)
        except MissingOperator as error:
            answer = "missing", str(error)
        except Exception:
            answer = "error", traceback.format_exc()
        connection.send(answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
    import torch

    torch.set_num_threads(int(sys.argv[3]))
    serve(Connection(int(sys.argv[1])), Path(sys.argv[2]))
