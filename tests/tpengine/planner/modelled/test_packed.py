"""Rung: pure. What packed documents cost: pairs counted one by one, and `tpengine schedule --data.path`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tpengine.architectures.part import Packed, packed_of
from tpengine.cli import main
from tpengine.config.presets import preset_config
from tpengine.data import open_corpus


def pairs_of(documents: list[int], window: int | None) -> int:
    """Count what each query sees."""
    return sum(min(place + 1, window or place + 1) for length in documents for place in range(length))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_pairs_are_those_that_queries_see(window: int | None) -> None:
    starts = [[], [5], [1, 2, 15], [8], [3]]
    packed = packed_of(starts, 16, 2)
    # The fifth sample fills no micro-batch.
    assert packed.lengths == ((16, 5, 11), (1, 1, 13, 1, 8, 8))
    counted = [pairs_of(list(of), window) for of in packed.lengths]
    assert packed.pairs(window) == round(sum(counted) / 2)
    assert packed.worst == Packed(((16, 5, 11),)) and packed.num_tokens == 32


@pytest.mark.parametrize("packing", ["documents", "fit"])
def test_a_schedule_of_a_text_tells_what_its_documents_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: str
) -> None:
    text, tokens = tmp_path / "t.jsonl", tmp_path / "t"
    lengths = np.random.default_rng(0).integers(2, 300, 400)
    text.write_text("".join(f'{{"text": "{"x" * length}"}}\n' for length in lengths))
    main(["data", "--from", str(text), "--out", str(tokens)])
    main(["data", "--fit", str(preset_config("tiny").train.seq_len), str(tokens)])
    (tmp_path / "c.toml").write_text(f'[data]\npacking = "{packing}"\n')
    capsys.readouterr()
    main(["schedule", "--model", str(tmp_path / "c.toml"), "--pp", "2", "--data.path", str(tokens)])
    said = capsys.readouterr().out
    found = re.search(r"pairs of a micro-batch: mean ([\d,]+) \(\d+% of uncut sequences\), worst ([\d,]+) \(", said)
    assert found is not None, said
    # Counted anew, from the documents of the run's first samples.
    config = preset_config("tiny")
    train = config.train
    config = replace(config, data=replace(config.data, path=str(tokens), packing=packing))
    samples = open_corpus(config).train
    counted = []
    for first in range(0, samples.num_windows - train.micro_batch_size + 1, train.micro_batch_size):
        numbers = np.arange(first, first + train.micro_batch_size)
        counted.append(0)
        for starts in samples.document_starts(numbers):
            counted[-1] += pairs_of(np.diff([0, *starts, train.seq_len]).tolist(), None)
    assert [int(number.replace(",", "")) for number in found.groups()] == [round(np.mean(counted)), max(counted)]
    seconds = re.search(r"slowest stage: mean (\S+) s, worst (\S+) s, uncut (\S+) s", said)
    assert seconds is not None and float(seconds[1]) < float(seconds[2]) <= float(seconds[3])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data.path", "FILE"], "--data.path is for a model: got no --model"),
        (["--model", "tiny", "--data.path", "FILE"], "needs to know where they begin: "),
    ],
)
def test_what_cannot_be_told_of_a_text_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    file = tmp_path / "ids.bin"
    file.write_bytes(np.arange(200, dtype=np.uint16).tobytes())
    (tmp_path / "ids.json").write_text('{"vocab_size": 256, "dtype": "uint16"}')
    assert main(["schedule", *[word.replace("FILE", str(file)) for word in argv]]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
