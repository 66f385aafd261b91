"""Encode windows for another process: what `python -m tpengine.data.text.worker DIR SHA256` does until its input ends.

Both sides write frames: how many bytes follow, then those. A request is whether documents have several windows, how
many windows, the bytes of each, and their texts in UTF-8. A reply begins with what it is: ids, ids with places, or a
message; the first reply says that the tokenizer is the one that was meant. Nothing is pickled.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from tpengine.data.text.documents import Place
from tpengine.data.text.encode import EncodedBatch, encode_windows
from tpengine.data.text.tokenizer import TextTokenizer
from tpengine.data.text.windows import Window

_SIZE = struct.Struct("<Q")
_HEAD = struct.Struct("<BQQ")
_PLAIN, _WITH_PLACES, _MESSAGE = 0, 1, 2


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
        Window(content[start:end].decode(), is_whole, is_whole, Path(), 0, Place())
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


if __name__ == "__main__":
    main()
