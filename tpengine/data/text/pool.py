"""Several processes that encode batches of windows; what comes back is in the order of the batches."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from tpengine.data.text.encode import EncodedBatch
from tpengine.data.text.tokenizer import TextTokenizer
from tpengine.data.text.windows import Window
from tpengine.data.text.worker import answer_of, ask, receive

# So many batches per worker are under way or have been answered: one to work on, one to go on with.
_AHEAD = 2


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
        argv = [sys.executable, "-m", "tpengine.data.text.worker", str(tokenizer.directory), tokenizer.sha256()]
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
