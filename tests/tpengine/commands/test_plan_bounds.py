"""Rung: pure. Whatever number is typed, a planning command, and the rules of a run, answer after bounded work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from tpengine.cli import main
from tpengine.config import Config, validate
from tpengine.config.ranges import divisors, nearest_multiples, nearest_of
from tpengine.planner.advice.question import Question, shapes
from tpengine.planner.machine import MACHINES

# A prime, a power of two that some settings take, and what nobody counts to.
HUGE = (999_999_937, 2**24, 10**30)
# Lines of Python; a layout of tiny that is worked out takes some 200,000.
MOST_LINES = 2_000_000
OF_ALL = ("tp", "pp", "dp", "chunks", "micro-batch", "bucket-bytes", "seq-len", "memory-limit", "global-batch")
OF_EACH = {
    "plan": ("ranks", "steps"),
    "advise": ("ranks", "top", "seconds", "explain", "tokens"),
    "schedule": ("micro-batches", "phase", "steps"),
}


class TooMuch(BaseException):
    """More lines were run than an answer may take."""


def lines_of(work: Callable[[], Any]) -> int:
    """Run something; return how many lines of Python that took."""
    num = 0

    def count(*_: object) -> Any:
        nonlocal num
        num += 1
        if num > MOST_LINES:
            raise TooMuch
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return num


def questions() -> Iterator[tuple[str, str]]:
    for command, own in OF_EACH.items():
        yield from ((command, flag) for flag in (*OF_ALL, *own))


@pytest.mark.parametrize(("command", "flag"), list(questions()))
def test_a_huge_number_is_answered(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number in HUGE:
        argv = [command, "--model", "tiny", f"--{flag}", str(number)]
        if command != "schedule" and flag != "ranks":
            argv += ["--ranks", "1"]
        if command == "advise" and flag == "global-batch" and number <= 2**32 and divisors(number)[1] == 2:
            continue  # a question of its own: searched for as long as --seconds says
        codes: list[int] = []
        lines_of(lambda argv=argv, codes=codes: codes.append(main(argv)))  # type: ignore[misc]
        error = capsys.readouterr().err
        assert codes[0] in (0, 2) and error.count("\n") == (codes[0] != 0), error


def test_work_without_a_bound_is_noticed() -> None:
    with pytest.raises(TooMuch):
        lines_of(lambda: next(number for number in range(10**9) if number < 0))


@pytest.mark.parametrize("section", ["model", "parallel", "train", "data", "optim"])
def test_a_huge_setting_of_a_run_is_answered(section: str) -> None:
    owner = getattr(Config(), section)
    for field in fields(owner):
        if "int" not in str(field.type):
            continue
        for number in HUGE:
            config = replace(Config(), **{section: replace(owner, **{field.name: number})})
            for world in (1, number):

                def check(config: Config = config, world: int = world) -> None:
                    try:
                        validate(config, world)
                    except ValueError as error:
                        assert "\n" not in str(error) and ": " in str(error)

                lines_of(check)


def test_a_huge_machine_has_as_many_layouts_as_its_divisors_allow() -> None:
    question = Question(Config(), MACHINES["h200"], 2**24, 2**32)
    lines_of(lambda: list(shapes(question)))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (nearest_of("tp", 3, divisors(4)), "tp 2 or 4"),
        (nearest_of("tp", 10**30, divisors(4)), "tp 4"),
        (nearest_of("tp", 2, divisors(4)), "tp 2"),
        (nearest_of("tp", 2, []), "another tp"),
        (nearest_multiples("seq_len", 127, 2), "seq_len 126 or 128"),
        (nearest_multiples("seq_len", 1, 10**30), f"seq_len {10**30}"),
        (nearest_multiples("seq_len", 127, 2, most=126), "seq_len 126"),
    ],
)
def test_the_nearest_legal_values(found: str, words: str) -> None:
    assert found == words


def test_divisors_are_all_that_there_are() -> None:
    for number in range(1, 200):
        assert divisors(number) == tuple(of for of in range(1, number + 1) if number % of == 0)
