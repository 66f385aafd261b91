"""What a run reads, as training sees it, whether it is one text or a mixture of several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tpengine.config import Config
from tpengine.data.samples.reader import HeldOut, TrainingSamples
from tpengine.data.token_file import TokenFile


class Corpus(Protocol):
    """A text or a mixture, cut into a part for training and a held-out part.

    Attributes:
        train, held_out: the parts.
        texts: all texts, with the SHA-256 of their tokens, and the indices of fitted samples, with that of theirs.
        reading_seconds: how much longer than this rank a rank of another host may take to open it, since it may have to
            read all of it; 0 if the headers have the hashes.
    """

    @property
    def train(self) -> TrainingSamples: ...

    @property
    def held_out(self) -> HeldOut: ...

    @property
    def texts(self) -> tuple[TokenFile, ...]: ...

    @property
    def reading_seconds(self) -> float: ...

    def fingerprint(self) -> str:
        """Return what identifies its content and how it is mixed; see fingerprint.py."""

    def fingerprint_of_ends(self) -> str:
        """Return what checkpoints identified a text by before its content was hashed; empty for a mixture."""

    def padding(self) -> Mapping[str, float]:
        """Return the share of padding in the training samples of each source, by name; empty if none are fitted."""

    def note_hash(self, run_dir: Path) -> None:
        """Write hashes to the run directory if no note can be written beside the texts."""

    def viewed(self, config: Config, phase: int) -> Corpus:
        """Return it in windows of a configuration's length, its targets that do not count, in the order of a phase.

        Raises:
            ValueError: it is too short.
        """
