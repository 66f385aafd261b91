"""What a misspelled name was meant to be: only what it plausibly is a misspelling of, else nothing. No torch.

A suggestion that is another thing is worse than none: fp8 is no float64, cp no tp, llama_8b no llama_1b. So a name is
suggested only if few letters differ for its length, and no digit does; names of up to three letters have no letter to
spare. Where a letter begins a name with digits, its first and last letter are its kind, and neither may differ: h300 is
no b300, mi300a no mi300x. Who suggests nothing lists the choices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Names of other things, one letter away from ours, and what ours is called where we have it.
_OTHER_THINGS = {"gpu": "cuda", "mixtral": ""}
# Up to so many letters a word may differ in none, one, or two of them; longer ones in three.
_NONE, _ONE, _TWO = 3, 6, 13


def meant(text: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a text is a misspelling of; None if there is none, or several are as near."""
    known = list(choices)
    word = _plain(text)
    if word in _OTHER_THINGS:
        return next((choice for choice in known if choice == _OTHER_THINGS[word]), None)
    distances = {choice: _distance(word, _plain(choice)) for choice in known if _is_near(word, _plain(choice))}
    near = [choice for choice, distance in distances.items() if distance == min(distances.values())]
    return near[0] if len(near) == 1 and _is_of_its_kind(word, _plain(near[0])) else None


def use(text: str, choices: Iterable[str], otherwise: str = "one of these") -> str:
    """Return the remedy for a wrong choice: "use bfloat16", or "use one of these"."""
    return f"use {meant(text, choices) or otherwise}"


def choose(value: object, choices: Sequence[object]) -> str:
    """Return the remedy for a value that is no choice: for a number the nearest, else what `use` says."""
    numbers = [choice for choice in choices if type(choice) is int]
    if numbers and type(value) is int:
        return f"use {min(numbers, key=lambda number: abs(number - value))}"
    return use(str(value), map(str, choices))


def did_you_mean(text: str, choices: Sequence[str], prefix: str = "") -> str:
    """Return the remedy for an unknown key: "did you mean train.steps?", or which keys there are.

    Args: text: without the prefix. choices: those that are known. prefix: of all, as "train.".
    """
    near = meant(text, choices)
    return f"use one of {', '.join(choices)}" if near is None else f"did you mean {prefix}{near}?"


def _plain(text: str) -> str:
    return re.sub(r"[-_ .]", "", text.lower())


def _is_near(word: str, choice: str) -> bool:
    if re.sub(r"[^0-9]", "", word) != re.sub(r"[^0-9]", "", choice):
        return False
    length = max(len(word), len(choice))
    allowed = 0 if length <= _NONE else 1 if length <= _ONE else 2 if length <= _TWO else 3
    # Nobody looks for a word in a text of any length.
    return abs(len(word) - len(choice)) <= allowed and _distance(word, choice) <= allowed


def _is_of_its_kind(word: str, choice: str) -> bool:
    """Whether the letters at both ends are the choice's, where a letter begins a name with digits."""
    if not re.fullmatch("[a-z].*[0-9].*", choice):
        return True
    letters, of_choice = (re.sub("[0-9]", "", name) for name in (word, choice))
    return letters[:1] == of_choice[:1] and letters[-1:] == of_choice[-1:]


def _distance(one: str, other: str) -> int:
    """Return how many letters are left out, added, replaced or exchanged with their neighbour between two words."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        above, row = row, [i]
        for j, letter_of_other in enumerate(other, start=1):
            differs = letter != letter_of_other
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + differs))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == letter_of_other:
                row[j] = min(row[j], before[j - 2] + 1)
        before = above
    return row[-1]
