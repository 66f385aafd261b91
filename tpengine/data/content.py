"""What a text contains: its hash, and the check of it while training goes on.

Of a file without a hash in its header it is computed, and a note saves the next run from reading the file.

The note `.NAME.hash` is written beside the file. If that directory cannot be written, it goes to the run directory, as
`.NAME.INODE.hash`, because each host may have a file of its own. A note is valid only while the file has the size, the
time of change and the inode that the note names.

The ranks of a host start together and find no note: one of them reads the file, and the others wait for it. If no note
can be written, the hash stays in the host's temporary directory for ranks that come later.

Ranks compare hashes when they start, which reads no text. Whether the file on each host really has that content is
checked while training goes on: a thread on one rank of each host reads the file slowly, once, and again whenever it has
been written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tpengine.data.stored_tokens import FileIdentity, StoredTokens
from tpengine.data.token_file import TokenFile
from tpengine.files import write_beside

_HASHED_AT_ONCE_BYTES = 1 << 20
_HEX = re.compile("[0-9a-f]{64}")
# Share of one core's time. On CPUs the ranks of a host use all of it, and a step takes as long as on its slowest rank:
# 0.3 % reads 4 MB/s on an AMD EPYC. Beside a GPU cores are idle: 5 % reads 65 MB/s, little for a shared file system.
CPU_SHARE, GPU_SHARE = 0.003, 0.05
_CHECKED_AT_ONCE_BYTES = 1 << 19
_SECONDS_BETWEEN_LOOKS = 2.0
_LAST_PIECE_SECONDS = 5.0
# A flag is this number times the rank, plus what is wrong.
_KINDS = 4
_OTHER_CONTENT, _UNREADABLE = 1, 2


def content_sha256(tokens: StoredTokens) -> str:
    """Return the SHA-256 of all tokens of a file, in hex, as its header would have it.

    Raises: ValueError: the file has been cut short or cannot be read.
    Cost: one pass, 1.3 GB/s on an AMD EPYC.
    """
    digest = hashlib.sha256()
    for piece in tokens.pieces(_HASHED_AT_ONCE_BYTES // tokens.dtype.itemsize):
        digest.update(piece)
    return digest.hexdigest()


def once_per_host(tokens: StoredTokens, make: Callable[[], str]) -> str:
    """Let one process of this host make the hash, and the others wait and read it.

    The hash stays in the temporary directory, one small file for each state of the token file, until `forget_on_host`.
    If a process fails or dies while it makes the hash, its lock is released and the next process makes it. If the
    temporary directory cannot be written, every process makes its own.
    """
    path = _shared_path(tokens)
    with contextlib.ExitStack() as stack:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            shared = stack.enter_context(os.fdopen(os.open(path, flags, 0o600), "r+"))
            fcntl.flock(shared, fcntl.LOCK_EX)
            made = shared.read() if os.fstat(shared.fileno()).st_uid == os.getuid() else ""
        except (OSError, ValueError):
            return make()
        if _HEX.fullmatch(made):
            return made
        try:
            made = make()
        except BaseException:
            _unlink(path)
            raise
        with contextlib.suppress(OSError):
            shared.seek(0)
            shared.write(made)
            shared.flush()
        return made


def forget_on_host(tokens: StoredTokens) -> None:
    """Remove what `once_per_host` keeps, once a note has it. Processes that wait for it have the file open."""
    _unlink(_shared_path(tokens))


def noted_sha256(tokens: StoredTokens, directories: Iterable[Path]) -> str:
    """Return the hash in the first note that is valid for this file as it is now; empty if there is none."""
    identity = tokens.file.identity()._asdict()
    for directory in directories:
        try:
            note = json.loads(_note(tokens, directory).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(note, dict) or {name: note.get(name) for name in identity} != identity:
            continue
        content = note.get("sha256")
        if isinstance(content, str) and _HEX.fullmatch(content):
            return content
    return ""


def note_sha256(tokens: StoredTokens, sha256: str, directory: Path) -> bool:
    """Leave a note for later runs; false where it cannot be written."""
    note = _note(tokens, directory)
    try:
        write_beside(note, json.dumps({**tokens.file.identity()._asdict(), "sha256": sha256}).encode())
    except OSError:
        return False
    return True


def _note(tokens: StoredTokens, directory: Path) -> Path:
    path = tokens.file.path
    of_host = "" if directory == path.parent else f".{tokens.file.identity().inode}"
    return directory / f".{path.name}{of_host}.hash"


def _shared_path(tokens: StoredTokens) -> Path:
    of_file = hashlib.sha256(f"{tokens.file.path.resolve()} {tokens.file.identity()}".encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"tpengine-{os.getuid()}-{of_file[:16]}.hash"


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


class ContentCheck:
    """A thread that reads a text; a context manager. Every rank has one, but only one per host reads.

    Args:
        text: with the SHA-256 of its tokens, or of those of its parts. A text in memory is not read: its hash was
            computed from it. Files of others, whose content has no hash, are not read either.
        rank: this rank, for `flag`.
        reads: whether this rank is the one that reads on its host.
        share: of a core's time that reading may take.
        wait: waits for some seconds or until it is told to end, and returns whether it was told; None for a real wait.

    Attributes:
        flag: 0 while nothing is wrong; else a number for `explain`. Ranks can be combined by taking the largest.
    """

    def __init__(
        self, text: TokenFile, rank: int, reads: bool, share: float, wait: Callable[[float], bool] | None = None
    ) -> None:
        self._rank, self._share = rank, share
        parts = text.parts or (text,)
        self._files = [(part.tokens, part.sha256) for part in parts if isinstance(part.tokens, StoredTokens)]
        self._ending = threading.Event()
        self._wait = wait or self._ending.wait
        self._thread: threading.Thread | None = None
        if reads and self._files:
            self._thread = threading.Thread(target=self._run, name="tpengine-content-check", daemon=True)
        self.flag = 0

    def __enter__(self) -> ContentCheck:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ending.set()
        if self._thread is not None:
            # A file system that does not answer must not keep the run from ending.
            self._thread.join(_LAST_PIECE_SECONDS)

    def explain(self, flag: int) -> str:
        """Return in one line what a rank's flag means; the same line on every rank."""
        assert flag and self._files
        rest, kind = divmod(flag, _KINDS)
        rank, number = divmod(rest, len(self._files))
        tokens, sha256 = self._files[number]
        where = f"{tokens.file.path} on the host of rank {rank}"
        if kind == _UNREADABLE:
            return (
                f"a text must stay readable to its end: {where} was cut short or its disk fails: restore it and "
                "continue with --resume"
            )
        return (
            f"a text must have the content that its hash says: {where} does not have SHA-256 {sha256}: "
            "restore it and continue with --resume, or write it again for a new run"
        )

    def _run(self) -> None:
        seen: dict[int, FileIdentity] = {}
        number = 0
        try:
            while not self.flag:
                for number, (tokens, sha256) in enumerate(self._files):
                    identity = tokens.file.identity()
                    if identity != seen.get(number) and not self._has_hash(tokens, sha256):
                        self.flag = self._flag_of(number, _OTHER_CONTENT)
                        break
                    seen[number] = identity
                    if self._ending.is_set():
                        return
                if self._wait(_SECONDS_BETWEEN_LOOKS):
                    return
        except (ValueError, OSError):
            self.flag = self._flag_of(number, _UNREADABLE)

    def _flag_of(self, number: int, kind: int) -> int:
        return _KINDS * (len(self._files) * self._rank + number) + kind

    def _has_hash(self, tokens: StoredTokens, sha256: str) -> bool:
        """Read a whole file and compare; True also when told to end before."""
        digest = hashlib.sha256()
        began = time.thread_time()
        for piece in tokens.pieces(_CHECKED_AT_ONCE_BYTES // tokens.dtype.itemsize):
            digest.update(piece)
            # Measured from the end of the last wait, so that the CPU time of waiting is counted too.
            used, began = time.thread_time() - began, time.thread_time()
            if self._wait(used * (1 / self._share - 1)):
                return True
        return digest.hexdigest() == sha256


class ContentChecks:
    """A ContentCheck for each of several texts, one after the other in `flag`; a context manager.

    Args:
        texts: the texts of a run's phases; one that occurs twice is read once.
        rank, reads, share: as ContentCheck; the texts share `share`.
    """

    def __init__(self, texts: Sequence[TokenFile], rank: int, reads: bool, share: float) -> None:
        distinct = {text.sha256: text for text in texts}
        self._checks = [ContentCheck(text, rank, reads, share / len(distinct)) for text in distinct.values()]
        self._stack = ExitStack()

    @property
    def flag(self) -> int:
        """0 while nothing is wrong with any text; else a number for `explain`, of which the largest may be taken."""
        num = len(self._checks)
        return max((num * check.flag + place for place, check in enumerate(self._checks) if check.flag), default=0)

    def __enter__(self) -> ContentChecks:
        for check in self._checks:
            self._stack.enter_context(check)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def explain(self, flag: int) -> str:
        """Return in one line what a rank's flag means; the same line on every rank."""
        of_check, place = divmod(flag, len(self._checks))
        return self._checks[place].explain(of_check)
