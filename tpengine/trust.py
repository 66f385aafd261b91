"""What a directory may have executed: nothing that the user has not named. No torch.

A run's directory is data, and may be somebody else's. Its config.toml can name two things that run: the Python file of
an architecture, and the command of train.after_checkpoint. Both pass through here at the place that executes them, so
that a caller who forgets to ask gets a refusal.

What the user has named is permitted: --model.architecture FILE.py and --train.after-checkpoint on the command line, and
what stands in a file given with --config, since such a file is written to be carried out; one that lies in a run's
directory is data, whatever it is called (commands/parsing.py). --trust permits whatever is named.

Two decisions that a reader will question. A permission is for a content, by its SHA-256, not for a path: a run's copy
of the file that the user gives is permitted with it, and a file that changes before it is executed is not. Permissions
stand in the environment: ranks that a command starts have them too, and no directory can set it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

_VARIABLE, _ALL = "TPENGINE_TRUSTED", "all"
# Beside a run's copy of a file, in the form of sha256sum: what it was when the run began.
RECORD = ".sha256"


def permit(content: bytes) -> None:
    """Permit a content that the user has named, in this process and in those that it starts."""
    _add(sha256_of(content))


def permit_file(path: str | Path) -> None:
    """Permit what a file of the user's has now; one that cannot be read is refused when it is to be executed."""
    with contextlib.suppress(OSError):
        permit(Path(path).read_bytes())


def permit_all() -> None:
    """Permit whatever a directory names, as --trust asks."""
    _add(_ALL)


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """End, with the block, the permissions that it gives."""
    before = os.environ.get(_VARIABLE)
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        if before is not None:
            os.environ[_VARIABLE] = before


def permitted_file(path: Path) -> bytes:
    """Return the content of a Python file that may be executed: these bytes, not what the path has later.

    Raises:
        ValueError: it cannot be read, or the user has not named it; one line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"model.architecture must be a file that can be read: {path}: {error.strerror}: check the path"
        ) from None
    if not _is_permitted(content):
        raise ValueError(
            f"a Python file that a directory names is executed only if you say so: {path}, SHA-256 {sha256_of(content)}"
            f"{', not what the run began with' if changed_since(path.parent, path, path.name) else ''}: read it, then "
            f"add --trust, or --model.architecture {path}"
        )
    return content


def permitted_command(command: str) -> str:
    """Return a command of train.after_checkpoint that may be executed.

    Raises:
        ValueError: the user has not named it; one line.
    """
    if command and not _is_permitted(command.encode(errors="surrogatepass")):
        raise ValueError(
            f"a command that a directory names is executed only if you say so: train.after_checkpoint "
            f"{command!r}: add --trust, or give it with --train.after-checkpoint, or '' for none"
        )
    return command


def changed_since(run: Path, path: Path, name: str) -> str:
    """Return in words that a file is not what a run recorded of its file `name`; empty if it is, or none was."""
    try:
        recorded = run.joinpath(name + RECORD).read_text(errors="replace").partition(" ")[0].strip()
        now = sha256_of(path.read_bytes())
    except OSError:
        return ""
    return "" if now == recorded else f"{path} is not what {run} began with: SHA-256 {now}, recorded {recorded[:64]}"


def record_of(name: str, content: bytes) -> bytes:
    """Return the line that a run keeps of a file: what `sha256sum -c` reads."""
    return f"{sha256_of(content)}  {name}\n".encode()


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 of a content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _is_permitted(content: bytes) -> bool:
    permitted = os.environ.get(_VARIABLE, "").split()
    return _ALL in permitted or sha256_of(content) in permitted


def _add(permission: str) -> None:
    permitted = os.environ.get(_VARIABLE, "").split()
    if permission not in permitted:
        os.environ[_VARIABLE] = " ".join([*permitted, permission])
