"""Token files of others: some made by their own programs, and writers for more, which make the same bytes.

The bytes were made on 2026-11-25 by `IndexedDatasetBuilder` of Megatron-LM (in megatron/core/datasets, commit
d98e8a64dd; `add_document` for each, those of 4 ids and more as two sequences, then `finalize`; its `optimal_dtype` for
vocabularies of 65,499 and 128,256), and by `TokenizedFile` of datatrove 0.10.1 (`write` for each, then `close`;
token_size 2 with `save_final_metadata` and the tokenizer "gpt2", token_size 4 without).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SMALL = [[5, 6, 7], [11], [300, 2, 65499, 0, 2], [9, 9]]
LARGE = [[70000, 1], [128255, 65536, 65535, 3], [4]]

MADE: Mapping[str, Mapping[str, str]] = {
    "small.bin": {
        "small.bin": "0500060007000b002c010200dbff0000020009000900",
        "small.idx": (
            "4d4d494449445800000100000000000000080500000000000000050000000000000003000000010000000200000003000000"
            "020000000000000000000000060000000000000008000000000000000c000000000000001200000000000000000000000000"
            "00000100000000000000020000000000000004000000000000000500000000000000"
        ),
    },
    "large.bin": {
        "large.bin": "7011010001000000fff4010000000100ffff00000300000004000000",
        "large.idx": (
            "4d4d494449445800000100000000000000040400000000000000040000000000000002000000020000000200000001000000"
            "0000000000000000080000000000000010000000000000001800000000000000000000000000000001000000000000000300"
            "0000000000000400000000000000"
        ),
    },
    "small.ds": {
        "small.ds": "0500060007000b002c010200dbff0000020009000900",
        "small.ds.index": "0300000000000000040000000000000009000000000000000b00000000000000",
        "small.ds.metadata": "677074327c320a31310a31312e302054",
    },
    "large.ds": {
        "large.ds": "7011010001000000fff4010000000100ffff00000300000004000000",
        "large.ds.index": "020000000000000006000000000000000700000000000000",
    },
}
DOCUMENTS: Mapping[str, list[list[int]]] = {name: SMALL if name.startswith("small") else LARGE for name in MADE}


def write_made(directory: Path, name: str) -> Path:
    """Write one of the files that others made, with what lies beside it."""
    for file, content in MADE[name].items():
        (directory / file).write_bytes(bytes.fromhex(content))
    return directory / name


def write_megatron(path: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 8) -> Path:
    """Write `NAME.bin` and `NAME.idx`.

    Args:
        path: `NAME.bin`.
        documents: each is its sequences.
        code: 8 for uint16, 4 for int32.
    """
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    dtype = np.dtype({8: "<u2", 4: "<i4"}[code])
    path.write_bytes(np.array([token for sequence in sequences for token in sequence], dtype=dtype).tobytes())
    places = (np.cumsum(lengths, dtype="<i8") - lengths) * dtype.itemsize
    borders = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sequences), len(borders))
    content = header + lengths.tobytes() + places.astype("<i8").tobytes() + borders.tobytes()
    path.with_suffix(".idx").write_bytes(content)
    return path


def write_datatrove(path: Path, documents: Sequence[Sequence[int]], size: int, tokenizer: str | None = None) -> Path:
    """Write `NAME.ds` and `NAME.ds.index`; with a tokenizer `NAME.ds.metadata` too."""
    tokens = np.array([token for document in documents for token in document], dtype=f"<u{size}")
    path.write_bytes(tokens.tobytes())
    ends = np.cumsum([len(document) for document in documents], dtype="<u8")
    path.with_name(f"{path.name}.index").write_bytes(ends.astype("<u8").tobytes())
    if tokenizer is not None:
        # The third line is for people: the count in words.
        text = f"{tokenizer}|{size}\n{len(tokens)}\n{len(tokens)}.0 T"
        path.with_name(f"{path.name}.metadata").write_text(text)
    return path


def write_plain(path: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16", said: str = "") -> Path:
    """Write ids, their documents, and what they are."""
    tokens = np.array([token for document in documents for token in document])
    path.write_bytes(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    ends = np.cumsum([0, *(len(document) for document in documents)], dtype="<u8")
    path.with_suffix(".starts").write_bytes(ends[:-1].astype("<u8").tobytes())
    text = f'{{"dtype": "{dtype}", "documents": "{path.with_suffix(".starts").name}"{said}}}'
    path.with_name(f"{path.name}.json").write_text(text)
    return path
