"""Bytes out of a directory's files, counted. No torch.

The decision a reader will question: files are read with preadv into memory that the caller uses again, not mapped.
Pages of a mapped file count as resident memory of the rank, and stay until somebody needs them.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType


class Source:
    """Open files, read at any place, by several threads; a context manager, which closes them.

    Attributes:
        bytes_read: so far.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_into(self, memory: memoryview, path: Path, begin: int) -> None:
        """Fill memory with the bytes of a file from `begin` on.

        Args:
            memory: of bytes.
            path: opened at its first use.
            begin: in the file.

        Raises:
            ValueError: the file cannot be read, or ends before the memory is full.
        """
        try:
            descriptor, done = self._descriptor(path), 0
            # One call reads at most 2 GiB, and may be interrupted.
            while done < len(memory):
                num_bytes = os.preadv(descriptor, [memory[done:]], begin + done)
                if num_bytes == 0:
                    raise ValueError(
                        f"a safetensors file must be whole: {path} ends at byte {begin + done}, its header speaks of "
                        f"{begin + len(memory)}: copy it again"
                    )
                done += num_bytes
            with self._lock:
                self.bytes_read += done
        except OSError as error:
            raise ValueError(f"weights must be readable: {path}: {error.strerror}: check the file") from None

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]
