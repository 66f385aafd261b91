"""Processes that encode batches of windows (Pool), and what each does until its input ends (main).

A worker is `python -m tpengine.data.workers DIR SHA256`; what comes back is in the order of the batches. Both sides
write frames: how many bytes follow, then those. A request is whether documents have several windows, how many windows,
the bytes of each, and their texts in UTF-8. A reply begins with what it is: ids, ids with places, or a message; the
first reply says that the tokenizer is the one that was meant. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from tpengine.data.documents import DocumentPlace
from tpengine.data.encode import EncodedBatch, encode_windows
from tpengine.data.windows import Window
from tpengine.tokenizer import TextTokenizer

_SIZE = struct.Struct("<Q")
_HEAD = struct.Struct("<BQQ")
_PLAIN, _WITH_PLACES, _MESSAGE = 0, 1, 2
# So many batches per worker are under way or have been answered: one to work on, one to go on with.
_AHEAD = 2


def send(file: IO[bytes], *parts: bytes) -> None:
    """Write a frame."""
    file.write(_SIZE.pack(sum(map(len, parts))))
    for part in parts:
        file.write(part)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """Read a frame; None at the end.

    Raises:
        EOFError: the end inside a frame.
    """
    head = file.read(_SIZE.size)
    if not head:
        return None
    (size,) = _SIZE.unpack(head) if len(head) == _SIZE.size else (-1,)
    content = file.read(size) if size >= 0 else b""
    if len(content) != size:
        raise EOFError("a frame was cut short")
    return content


def ask(file: IO[bytes], windows: Sequence[Window]) -> None:
    """Send windows to be encoded."""
    texts = [window.text.encode() for window in windows]
    kind = _PLAIN if all(window.begins and window.ends for window in windows) else _WITH_PLACES
    sizes = np.array([len(text) for text in texts], dtype="<u8")
    send(file, _HEAD.pack(kind, len(texts), 0), sizes.tobytes(), *texts)


def answer_of(content: bytes) -> EncodedBatch:
    """Return what a worker has replied.

    Raises:
        ValueError: it could not encode.
    """
    kind, num_windows, num_ids = _HEAD.unpack_from(content)
    if kind == _MESSAGE:
        raise ValueError(content[_HEAD.size :].decode())
    place = _HEAD.size
    counts = np.frombuffer(content, "<i8", num_windows, place)
    place += counts.nbytes
    ids = np.frombuffer(content, "<u4", num_ids, place)
    if kind == _PLAIN:
        return EncodedBatch(ids, counts)
    place += ids.nbytes
    offsets = np.frombuffer(content, "<i4", 2 * num_ids, place)
    words = np.frombuffer(content, "<i4", num_ids, place + offsets.nbytes)
    return EncodedBatch(ids, counts, offsets.reshape(-1, 2), words)


def _answer(tokenizer: TextTokenizer, content: bytes) -> list[bytes]:
    kind, num_windows, _ = _HEAD.unpack_from(content)
    sizes = np.frombuffer(content, "<u8", num_windows, _HEAD.size)
    ends = (_HEAD.size + sizes.nbytes + np.cumsum(sizes, dtype=np.int64)).tolist()
    starts = [_HEAD.size + sizes.nbytes, *ends[:-1]]
    is_whole = kind == _PLAIN
    windows = [
        Window(content[start:end].decode(), is_whole, is_whole, Path(), 0, DocumentPlace())
        for start, end in zip(starts, ends, strict=True)
    ]
    batch = encode_windows(tokenizer, windows)
    head = _HEAD.pack(kind, num_windows, len(batch.ids))
    parts = [head, batch.counts.astype("<i8").tobytes(), batch.ids.astype("<u4").tobytes()]
    if batch.offsets is not None and batch.words is not None:
        parts += [batch.offsets.astype("<i4").tobytes(), batch.words.astype("<i4").tobytes()]
    return parts


def main() -> None:
    """Answer until the input ends: also when whoever asked was killed."""
    directory, sha256 = sys.argv[1:]
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    try:
        tokenizer = TextTokenizer(Path(directory))
        if tokenizer.sha256() != sha256:
            raise ValueError(f"a tokenizer must not change while it is used: {directory}: start again")
        send(replies, _HEAD.pack(_PLAIN, 0, 0))
        while (content := receive(requests)) is not None:
            send(replies, *_answer(tokenizer, content))
    except ValueError as error:
        send(replies, _HEAD.pack(_MESSAGE, 0, 0), str(error).encode())
    except (EOFError, BrokenPipeError):
        return


class Pool:
    """Processes of one thread each; a context manager.

    Args:
        tokenizer: theirs is read from the same directory, and must be the same.
        num_workers: how many.
    """

    def __init__(self, tokenizer: TextTokenizer, num_workers: int) -> None:
        # Several threads of the library in each process would be in the way of the other processes.
        environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        # What this process imports they import, and nothing out of the folder where the user is.
        environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        argv = [sys.executable, "-m", "tpengine.data.workers", str(tokenizer.directory), tokenizer.sha256()]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(num_workers, "tpengine-encode")
        try:
            for _ in range(num_workers):
                # In a session of its own: Ctrl-C is for the command, which ends its workers.
                process = subprocess.Popen(
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, start_new_session=True
                )
                self._processes.append(process)
            for process in self._processes:
                _read(process)
                self._idle.put(process)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end()

    def encode(self, batches: Iterable[list[Window]]) -> Iterator[tuple[list[Window], EncodedBatch]]:
        """Yield each batch with what a worker made of it.

        Raises:
            ValueError: what a worker says, or that it has died.
        """
        under_way: deque[tuple[list[Window], Future[EncodedBatch]]] = deque()
        for batch in batches:
            under_way.append((batch, self._threads.submit(self._encode, batch)))
            if len(under_way) > _AHEAD * len(self._processes):
                windows, answer = under_way.popleft()
                yield windows, answer.result()
        for windows, answer in under_way:
            yield windows, answer.result()

    def _encode(self, windows: list[Window]) -> EncodedBatch:
        process = self._idle.get()
        try:
            assert process.stdin is not None
            # What it said, or how it ended, is read below.
            with contextlib.suppress(OSError):
                ask(process.stdin, windows)
            return _read(process)
        finally:
            self._idle.put(process)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # What was not written yet was for a process that is gone.
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


def _read(process: subprocess.Popen[bytes]) -> EncodedBatch:
    assert process.stdout is not None
    try:
        content = receive(process.stdout)
    except EOFError:
        content = None
    if content is None:
        code = process.wait()
        raise ValueError(
            f"a process that encodes has ended with code {code}: it may have run out of memory: use fewer --workers"
        )
    return answer_of(content)


if __name__ == "__main__":
    main()
