"""Rung: pure. Schedules that a user wrote: what is right is read as it stands, what is wrong is refused in one line.

The mutations break files on purpose. Whether a broken file is still a schedule is decided by a rule of its own,
`_is_legal` below, which shares no code with the reader: the words are those of the original, each chunk has one rank,
and playing the lists until nobody can go on plays all of them. The reader must refuse exactly what that rule refuses.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import SCHEDULES, make_schedule, parse_actions
from tpengine.plan.schedule_file import format_schedule, parse_schedule, read_schedule

Words = list[list[str]]

_TWO_RANKS = """\
# By hand.

rank 0: 0F0 0F1 0B0 0B1  # first
rank 1: 1F0 1I0 1F1\t1I1   1W0 1W1
"""

_NO_LINE = "a schedule has one line like `rank 0: 0F0 0B0` per rank: got none: write one for each rank"
_BAD_WORD = "an action is a chunk, F, B, I or W, and a micro-batch, like 2F0"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 16), st.integers(1, 3))
def test_round_trip(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
    assert parse_schedule(format_schedule(schedule), name) == schedule


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine v2.txt"
    file.write_text(_TWO_RANKS)
    schedule = read_schedule(file, 2, 2)
    assert schedule.name == "mine-v2"
    assert schedule.ranks == (0, 1)
    assert schedule.compute == (parse_actions("0F0 0F1 0B0 0B1"), parse_actions("1F0 1I0 1F1 1I1 1W0 1W1"))
    assert read_schedule(str(file), 2, 2) == schedule


def test_placement_follows_from_who_computes(tmp_path: Path) -> None:
    text = "rank 0: 1F0 1B0\nrank 1: 0F0 2F0 2B0 0B0\n"
    assert parse_schedule(text).ranks == (1, 0, 1)


def test_editors_of_other_systems(tmp_path: Path) -> None:
    file = tmp_path / "windows.txt"
    file.write_bytes(b"\xef\xbb\xbf" + _TWO_RANKS.replace("\n", "\r\n").encode())
    assert read_schedule(file, 2, 2).compute == parse_schedule(_TWO_RANKS).compute


@pytest.mark.parametrize(
    ("name", "expected"),
    [("zbv.v2.txt", "zbv.v2"), ("a b\nc.txt", "a-b-c"), ("größe_1.TXT", "gr--e_1"), ("plain", "plain")],
)
def test_names_fit_one_line(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).write_text("rank 0: 0F0 0B0")
    assert read_schedule(tmp_path / name, 1, 1).name == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"line 1: {_NO_LINE}"),
        (
            "# none\n",
            f"line 1: {_NO_LINE}",
        ),
        (
            "0F0 0B0",
            "line 1: a line reads like `rank 0: 0F0 0B0`: got '0F0 0B0': write one line per rank",
        ),
        (
            "rank 00: 0F0 0B0",
            "line 1: a line reads like `rank 0: 0F0 0B0`: got 'rank 00: 0F0 0B0': write one line per rank",
        ),
        (
            "rank 0: 0F0 0B0\n\nrank 2: 1F0 1B0",
            "line 3: ranks are listed in order from 0: got rank 2: write rank 1 here",
        ),
        (
            "rank 0: 0F0 0B0\nrank 0: 1F0 1B0",
            "line 2: ranks are listed in order from 0: got rank 0: write rank 1 here",
        ),
        (
            "rank 0: 0F0 0B0\nrank 1:",
            "line 2: every rank computes: rank 1 has no action: give it a chunk, or use fewer ranks",
        ),
        (
            "rank 0: 0F0 0SEND_F0 0B0",
            "line 1: a schedule has no sends and receives, lowering adds them: got '0SEND_F0': remove it",
        ),
        (
            "rank 0: 0F0 0B0[r0]",
            "line 1: a schedule has no sub-actions, lowering adds them: got '0B0[r0]': "
            "remove the brackets and what is in them",
        ),
        (
            "rank 0: 0F0 0B0 STEP",
            f"line 1: {_BAD_WORD}: got 'STEP': write it like that, or remove it",
        ),
        (
            "rank 0: 0F0 0B0 r0",
            f"line 1: {_BAD_WORD}: got 'r0': write it like that, or remove it",
        ),
        (
            "rank 0: 0F0 0B0000000000",
            f"line 1: {_BAD_WORD}: got '0B0000000000': write it like that, or remove it",
        ),
        (
            f"rank 0: 0F0 0B{'9' * 5000}",
            f"line 1: {_BAD_WORD}: got '0B{'9' * 38}...': write it like that, or remove it",
        ),
        (
            "rank 0: 0F0 0B\u0661",
            f"line 1: {_BAD_WORD}: got '0B\\u0661': write it like that, or remove it",
        ),
        (
            "rank 0: 0F0 0B0 0F0",
            "line 1: each kind of action occurs once per chunk and micro-batch: 0F0 twice: remove one",
        ),
        (
            "rank 0: 0F0 0B0\nrank 1: 0F1 0B1",
            "line 2: one rank computes a chunk: 0F1 on rank 1, but chunk 0 is on rank 0: move it",
        ),
        (
            "rank 0: 0F0 0B0\nrank 1: 2F0 2B0",
            "line 2: chunks are numbered from 0: got chunk 2, none is chunk 1: renumber them",
        ),
        (
            "rank 0: 0F0 0F1 0B0",
            "line 1: every chunk and micro-batch from 0 to 1 has one F and one B, or F, I and W: "
            "chunk 0, micro-batch 1 has F: add B",
        ),
        (
            "rank 0: 0F0 0B0\nrank 1: 1F0 1I0",
            "line 2: every chunk and micro-batch from 0 to 0 has one F and one B, or F, I and W: "
            "chunk 1, micro-batch 0 has F, I: add W",
        ),
        (
            "rank 0: 0F0 0B0 0W0",
            "line 1: every chunk and micro-batch from 0 to 0 has one F and one B, or F, I and W: "
            "chunk 0, micro-batch 0 has B, F, W: keep B, or I and W",
        ),
        (
            "rank 0: 0F1 0B1 0F999999999 0B999999999",
            "line 1: every chunk and micro-batch from 0 to 999999999 has one F and one B, or F, I and W: "
            "chunk 0, micro-batch 0 has none: add B, F",
        ),
        (
            "rank 0: 0F0 0B0 0F1 0B1 # before its gradient is there\nrank 1: 1F1 1B1 1F0 1B0",
            "lines 1 to 2: compute lists must finish: rank 0 waits in 0B0 for 1B0: list what it waits for earlier",
        ),
        *(
            (
                f"rank 0: 0F0 0B0\nrank 1: {words}",
                "line 2: of a chunk and micro-batch F is listed before B or I, and I before W: "
                f"got {got} before {first}: list {first} first",
            )
            for words, got, first in (
                ("1B0 1F0", "1B0", "1F0"),
                ("1F0 1W0 1I0", "1W0", "1I0"),
                ("1I0 1F0 1W0", "1I0", "1F0"),
                ("1W0 1F0 1I0", "1W0", "1I0"),
            )
        ),
    ],
)
def test_mistakes_in_the_text(text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_schedule(text)
    assert str(raised.value) == f"schedule text, {message}"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (4, 2),
            "line 4: a schedule lists the run's pipeline ranks: the file has 2, the run 4: "
            "run with 2 pipeline ranks, or write a file for 4",
        ),
        (
            (1, 2),
            "line 4: a schedule lists the run's pipeline ranks: the file has 2, the run 1: "
            "run with 2 pipeline ranks, or write a file for 1",
        ),
        (
            (2, 8),
            "line 4: a schedule lists the run's micro-batches: the file has 2, the run 8: "
            "run with 2 micro-batches, or write a file for 8",
        ),
    ],
)
def test_the_file_of_another_run(tmp_path: Path, sizes: tuple[int, int], message: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(_TWO_RANKS)
    with pytest.raises(ValueError) as raised:
        read_schedule(file, *sizes)
    assert str(raised.value) == f"schedule file {str(file)!r}, {message}"


def _missing(folder: Path) -> Path:
    return folder / "missing.txt"


def _directory(folder: Path) -> Path:
    (folder / "sub.txt").mkdir()
    return folder / "sub.txt"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.txt")
    return folder / "pipe.txt"


def _huge(folder: Path) -> Path:
    # Sparse: only its size is large.
    with open(folder / "huge.txt", "wb") as file:
        file.truncate(64_000_001)
    return folder / "huge.txt"


def _latin(folder: Path) -> Path:
    (folder / "latin.txt").write_bytes(b"rank 0: 0F0 0B0\n# gr\xf6\xdfe\n")
    return folder / "latin.txt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_missing, " cannot be read: No such file or directory: name a text file that exists"),
        (lambda folder: folder / "a\0b", " cannot be read: embedded null byte: name a text file that exists"),
        (_directory, " must be a regular file: got d.........: name a text file"),
        (_pipe, " must be a regular file: got p.........: name a text file"),
        (lambda _: Path(os.devnull), " must be a regular file: got c.........: name a text file"),
        (
            _huge,
            " must have at most 64000000 bytes: got 64000001: use fewer micro-batches, or the name of a generator",
        ),
        (_latin, ", line 2: must be UTF-8: byte 20 is not: save it as UTF-8"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ValueError) as raised:
        read_schedule(path, 1, 1)
    assert re.fullmatch(re.escape(f"schedule file {str(path)!r}") + message, str(raised.value))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(_TWO_RANKS)

    # The permission itself would not stop a test that runs as root.
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match="cannot be read: Permission denied: make it readable"):
        read_schedule(file, 2, 2)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.text(st.sampled_from("rank 01:F0BIW#\n\r[]SEND_\u2028\0"), max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        schedule = parse_schedule("rank 0: 0F0 0B0" + text)
    except ValueError as error:
        assert str(error).startswith("schedule text, line")
        assert len(str(error).splitlines()) == 1
    else:
        assert parse_schedule(format_schedule(schedule)) == schedule


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "num_chunks"),
    [("gpipe", 3, 2, 1), ("1f1b", 3, 3, 1), ("interleaved", 2, 2, 2), ("zb-h1", 2, 3, 1), ("zbv", 2, 2, 2)],
)
def test_mutations(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
    original = [[str(action) for action in actions] for actions in schedule.compute]
    tried: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    num_legal = 0
    for kind, mutant in _mutants(original):
        legal = mutant == original or _is_legal(mutant, original)
        try:
            parse_schedule("".join(f"rank {rank}: {' '.join(words)}\n" for rank, words in enumerate(mutant)))
            accepted = True
        except ValueError:
            accepted = False
        if legal:
            num_legal += 1
            assert accepted, (kind, mutant)
        else:
            tried[kind] += 1
            killed[kind] += not accepted
    with capsys.disabled():
        counts = ", ".join(f"{kind} {killed[kind]}/{tried[kind]}" for kind in sorted(tried))
        print(f"\n{name} p={num_ranks} m={num_microbatches}: killed / tried: {counts}; legal {num_legal}, all read")
    assert killed == tried
    assert set(tried) == {"drop", "duplicate", "swap", "move"}


def _mutants(original: Words) -> Iterator[tuple[str, Words]]:
    """Give every file in which one action is dropped, repeated, swapped with another, or moved, also between ranks."""
    places = [(rank, at) for rank, words in enumerate(original) for at in range(len(words))]
    gaps = [(rank, at) for rank, words in enumerate(original) for at in range(len(words) + 1)]
    for rank, at in places:
        dropped = [list(words) for words in original]
        word = dropped[rank].pop(at)
        yield "drop", dropped
        for to, before in gaps:
            repeated = [list(words) for words in original]
            repeated[to].insert(before, word)
            yield "duplicate", repeated
            moved = [list(words) for words in dropped]
            moved[to].insert(before, word)
            yield "move", moved
        for other, there in places:
            if (rank, at) < (other, there):
                swapped = [list(words) for words in original]
                swapped[rank][at], swapped[other][there] = swapped[other][there], swapped[rank][at]
                yield "swap", swapped


def _is_legal(mutant: Words, original: Words) -> bool:
    """Tell whether the lists are a schedule of the same actions, from the words alone."""
    words = [word for line in mutant for word in line]
    if sorted(words) != sorted(word for line in original for word in line):
        return False
    if any(not line for line in mutant):
        return False
    ranks_of_chunk: dict[str, set[int]] = {}
    for rank, line in enumerate(mutant):
        for word in line:
            ranks_of_chunk.setdefault(word[0], set()).add(rank)
    if any(len(ranks) > 1 for ranks in ranks_of_chunk.values()):
        return False
    return _plays_to_the_end(mutant)


def _plays_to_the_end(lists: Words) -> bool:
    """Play the lists, of chunks and micro-batches below ten, action after action for as long as any can go on."""
    last = max(int(word[0]) for line in lists for word in line)
    played: set[str] = set()
    position = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lists):
            while position[rank] < len(line) and _can_start(line[position[rank]], last, played):
                played.add(line[position[rank]])
                position[rank] += 1
                moved = True
    return all(at == len(line) for at, line in zip(position, lists, strict=True))


def _can_start(word: str, last: int, played: set[str]) -> bool:
    chunk, kind, microbatch = int(word[0]), word[1], word[2]
    if kind == "F":
        return chunk == 0 or f"{chunk - 1}F{microbatch}" in played
    if kind == "W":
        return f"{chunk}I{microbatch}" in played
    has_gradient = chunk == last or bool({f"{chunk + 1}B{microbatch}", f"{chunk + 1}I{microbatch}"} & played)
    return has_gradient and f"{chunk}F{microbatch}" in played
