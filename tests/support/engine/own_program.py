"""A user's own script: flags, and a callback that writes what it is told to `told-RANK.txt` in the working directory,
and the names of a step's numbers to `named-RANK.txt`.

`FAIL=<method>:<rank>:<step>` has the callback raise there; `ALIKE=no` gives it to rank 0 alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tpengine

RANK = os.environ.get("RANK", "0")


class Mine(tpengine.Callback):
    """Writes what it is told, and fails as planned."""

    def after_step(self, numbers: Mapping[str, Any]) -> None:
        self._take("after_step", numbers["step"], numbers["loss"])
        Path(f"named-{RANK}.txt").write_text(" ".join(numbers))

    def after_evaluation(self, numbers: Mapping[str, Any]) -> None:
        self._take("after_evaluation", numbers["step"], numbers["held_out_loss"])

    def before_checkpoint(self, path: Path, step: int) -> None:
        self._take("before_checkpoint", step, path.is_dir())

    def after_checkpoint(self, path: Path, step: int) -> None:
        self._take("after_checkpoint", step, path.is_dir())

    def _take(self, method: str, step: int, number: float) -> None:
        with open(f"told-{RANK}.txt", "a") as file:
            file.write(f"{method} {step} {number!r}\n")
        if os.environ.get("FAIL") == f"{method}:{RANK}:{step}":
            raise KeyError("planned")


def main() -> None:
    """Train, and print what comes of it."""
    mine = [Mine()] if RANK == "0" or os.environ.get("ALIKE") != "no" else []
    result = tpengine.run(sys.argv[1:], callbacks=mine)
    print(f"result {result.step} {result.loss!r} {result.held_out_loss!r} {result.checkpoint}")


if __name__ == "__main__":
    main()
