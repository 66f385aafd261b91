"""A run as Weights & Biases sees it: through its own library, which is optional, and its own environment variables."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpengine.files import write_beside
from tpengine.last_words import one_line

_ID_FILE = "wandb_id.txt"
# What the library has not sent by then stays in the run's directory.
_FINISH_SECONDS = 10.0


def check_wandb(project: str) -> None:
    """Check that the library is there if a project is given.

    Raises: ValueError: it is not.
    """
    # A folder of that name, as its runs leave, is found too, but has no origin.
    spec = importlib.util.find_spec("wandb") if project else None
    if project and (spec is None or spec.origin is None):
        raise ValueError(
            f"train.wandb {project} needs a library: wandb is not installed: pip install 'tpengine[wandb]', or leave "
            "train.wandb out"
        )


class WandbRun:
    """Reports rows to a project; a run that is resumed goes on with the run that it has there.

    Args:
        project: its name. WANDB_MODE, WANDB_ENTITY and so on are the library's.
        run_dir: the run's directory; the library writes to wandb/ in it.
        settings: of the run, to be shown there.
        continues: whether a run of this directory goes on.

    Raises:
        ValueError: the library does not begin, in one line: nobody has logged in, or the network does not answer.
    """

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any], *, continues: bool) -> None:
        import wandb

        self._run_dir, self._has_failed = run_dir, False
        try:
            self._run = wandb.init(
                project=project,
                dir=str(run_dir),
                id=_id_of(run_dir, continues),
                resume="allow",
                config=dict(settings),
                # It would put itself between the progress line and the terminal.
                settings=wandb.Settings(console="off"),
            )
            # A run that is resumed repeats steps: rows have their place by their step, not by their number.
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise ValueError(
                f"--train.wandb must be able to begin: {one_line(str(error))}: log in with `wandb login`, set "
                "WANDB_MODE=offline, or leave it out"
            ) from None

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Report numbers of a step; a failure is said once and ends nothing."""
        try:
            self._run.log({**values, "step": step})
        except Exception as error:
            if not self._has_failed:
                _say(f"Weights & Biases does not take a row: {one_line(str(error))}: the run goes on")
            self._has_failed = True

    def close(self, exit_code: int) -> None:
        """Wait until all is sent, but not for ever.

        Args: exit_code: of the run; only one that ends with 0 is shown as finished.
        """
        thread = threading.Thread(target=self._finish, args=(exit_code,), name="tpengine-wandb", daemon=True)
        thread.start()
        thread.join(_FINISH_SECONDS)
        if thread.is_alive():
            _say(f"Weights & Biases has not taken all rows: `wandb sync {self._run_dir}/wandb/latest-run` sends them")

    def _finish(self, exit_code: int) -> None:
        with contextlib.suppress(Exception):
            self._run.finish(exit_code=exit_code)


def _id_of(run_dir: Path, continues: bool) -> str:
    """Return the name of this run there, kept in the directory; a new one for a new run."""
    path = run_dir / _ID_FILE
    if continues and path.is_file():
        return path.read_text().strip()
    name = secrets.token_hex(8)
    write_beside(path, f"{name}\n".encode())
    return name


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tpengine: {line}", file=sys.stderr, flush=True)
