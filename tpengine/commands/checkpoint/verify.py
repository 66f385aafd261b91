"""`tpengine checkpoint verify`: every file against the hash that was taken when it was written. No torch.

Loading stops at the first damage; here all of it is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tpengine.checkpoint.index import DamagedCheckpoint, Index, check_file, read_index_alone


@dataclass(frozen=True)
class Verified:
    """A checkpoint that was looked at: what is damaged, a line for each file, and how much was to be read."""

    damage: list[str]
    num_files: int = 0
    num_bytes: int = 0


def verify(directory: Path) -> Verified:
    """Hash all files of a checkpoint.

    Raises:
        CheckpointError: of another version, or this user may not read it: neither whole nor damaged.

    Cost: every file is read once.
    """
    try:
        index = read_index_alone(directory)
    except DamagedCheckpoint as error:
        return Verified([str(error)])
    damage = []
    for name, entry in sorted(index.files.items()):
        try:
            check_file(directory, name, entry)
        except DamagedCheckpoint as error:
            damage.append(f"{error} ({_num_tensors(index, name)} tensors have a piece in it)")
    return Verified(damage, len(index.files), sum(entry.num_bytes for entry in index.files.values()))


def _num_tensors(index: Index, file: str) -> int:
    return sum(any(piece.file == file for piece in entry.pieces) for entry in index.tensors.values())
