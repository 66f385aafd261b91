"""What the processes do whose data path is measured; each starts anew, so that nothing is in its memory."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from tpengine.config import Config
from tpengine.data import Samples, open_corpus, open_source
from tpengine.data.documents import DocumentReader
from tpengine.data.encode import tokens_of
from tpengine.runs.trainer import Trainer
from tpengine.tokenizer import TextTokenizer

_CPU = torch.device("cpu")


class Opening:
    """Opens a text as a run does. Args: config: validated; data.path is the text."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def open(self) -> tuple[float, float]:
        """Return the seconds that opening takes, and the resident bytes that it leaves."""
        before, begin = _resident_bytes(), time.perf_counter()
        corpus = open_corpus(self._config)
        seconds = time.perf_counter() - begin
        held = _resident_bytes() - before
        assert corpus.train.num_windows, "a text has windows"
        return seconds, float(held)


class Reading:
    """Reads single samples at random.

    Args:
        path: of the files.
        seq_len: of a sample.
        num_reads: how many are timed.
    """

    def __init__(self, path: str, seq_len: int, num_reads: int) -> None:
        self._samples = Samples(open_source(path).tokens, seq_len, 256, seed=1)
        self._num_reads = num_reads

    def read(self) -> list[float]:
        """Return the seconds of each read, after as many that warm up the files' pages."""
        numbers = np.random.default_rng(0).integers(0, self._samples.num_windows, self._num_reads)
        # The same windows twice: the second time they are in the page cache.
        for number in numbers:
            self._samples.batch(int(number), 1)
        taken = []
        for number in numbers:
            begin = time.perf_counter()
            self._samples.batch(int(number), 1)
            taken.append(time.perf_counter() - begin)
        return taken


class Training:
    """A rank that trains steps.

    Args:
        config: validated.
        num_steps: that are timed.
    """

    def __init__(self, config: Config, num_steps: int) -> None:
        torch.set_num_threads(1)
        self._trainer = Trainer(config, open_corpus(config), _CPU)
        self._num_steps = num_steps

    def train(self) -> tuple[list[float], list[float]]:
        """Return, by step, the seconds of the step and those that this rank waited for its samples."""
        steps, waits = [], []
        for step in range(self._num_steps + 2):
            begin = time.perf_counter()
            self._trainer.step.run(step)
            steps.append(time.perf_counter() - begin)
            waits.append(self._trainer.step.reader.seconds)
        self._trainer.close()
        # Before the first step nothing was asked for yet; it also makes what later ones find.
        return steps[2:], waits[2:]


class Tokenizing:
    """One worker that tokenizes documents.

    Args:
        text: a file of JSON lines.
        directory: of the tokenizer.
    """

    def __init__(self, text: str, directory: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._text, self._tokenizer = Path(text), TextTokenizer(Path(directory))
        self._library = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
        lines = self._text.read_text().splitlines()
        self._documents: list[str] = [json.loads(line)["text"] for line in lines]

    def ours(self) -> tuple[int, float]:
        """Return the number of tokens of the file, read and tokenized as `tpengine data` does, and the seconds."""
        begin = time.perf_counter()
        number = sum(len(chunk.ids) for chunk in tokens_of(DocumentReader([self._text]), self._tokenizer))
        return number, time.perf_counter() - begin

    def library(self) -> tuple[int, float]:
        """Return the number of tokens that the library gives documents in memory, in batches, and the seconds."""
        begin, number = time.perf_counter(), 0
        for first in range(0, len(self._documents), 256):
            batch = self._library.encode_batch(self._documents[first : first + 256], add_special_tokens=False)
            number += sum(len(encoding.ids) for encoding in batch)
        return number, time.perf_counter() - begin


def of_text(config: Config, path: Path) -> Config:
    """Return the configuration with another text."""
    return replace(config, data=replace(config.data, path=str(path)))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
