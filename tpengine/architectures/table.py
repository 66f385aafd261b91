"""The table of an architecture: a rule for each parameter, which says how it is cut and where a file has it.

A rule's key is the name of a module in the files of the architecture, less their common prefix, as a pattern: `*`
stands for one part of a name (or a piece of one), `{q,k,v}` for either of them. Our name is the same, unless the rule
has `of(...)`. In that name braces mean parameters that lie in one tensor of the file, one behind the other. `#` in a
key stands for a number: the files have a tensor for each index of the first dim of ours, whose name lacks it.

    column       an output-parallel matrix [out, in]: rows cut over tp; its bias too
    row          an input-parallel matrix [out, in]: columns cut; its bias is whole on every rank
    vocab        a table by vocabulary: rows cut, padded
    replicate    whole on every rank; its gradient is summed over tp, since its input is a shard of tokens or of heads
    heads        column(heads), row(heads): cut between heads; ranks share the heads of which there are fewer than ranks
                 replicate(heads): its input is a shard of heads, or of features, as that of nn.PReLU between a column
                 and a row; `parallelize` sums over tp for this one alone
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal


class _Unit(Enum):
    HEADS = "heads"


heads = _Unit.HEADS


@dataclass(frozen=True)
class Rule:
    """How the parameters of a module are cut and stored.

    Attributes:
        cut: see above.
        by_heads: cut between heads.
        ours: pattern of our name, where it is not the file's.
        is_transposed: the file has the matrix as [in, out].
        is_optional: a model of the architecture may have none.
    """

    cut: Literal["column", "row", "vocab", "replicate"]
    by_heads: bool = False
    ours: str = ""
    is_transposed: bool = False
    is_optional: bool = False

    def __call__(self, unit: _Unit) -> Rule:
        """Return the rule for what is cut between heads: column(heads)."""
        return replace(self, by_heads=unit is heads)

    def dim_of(self, num_dims: int) -> int | None:
        """Return which dim of a parameter [out, in] or [out] is cut over tp; None: every rank holds it whole.

        The bias of an input-parallel product is whole: it is added to this rank's tokens. Of stacked matrices
        [E, out, in] each is cut alike.
        """
        first = max(num_dims - 2, 0)
        if self.cut == "row":
            return first + 1 if num_dims > 1 else None
        return None if self.cut == "replicate" else first

    def of(self, ours: str) -> Rule:
        """Return the rule for what the files have under another name; braces: packed(q, k, v) in one tensor."""
        return replace(self, ours=ours)

    @property
    def transposed(self) -> Rule:
        """The rule for a matrix that the files have as [in, out]."""
        return replace(self, is_transposed=True)

    @property
    def optional(self) -> Rule:
        """The rule for what some models of an architecture have not, as experts in a dense one."""
        return replace(self, is_optional=True)


column, row, vocab, replicate = Rule("column"), Rule("row"), Rule("vocab"), Rule("replicate")

Table = Mapping[str, Rule]


@dataclass(frozen=True)
class FittingRule:
    """The rule of one module.

    Attributes:
        rule: how it is cut.
        name: the module's name in a file, less the prefix; with `#` for the number of each of several tensors.
        packed: our names of the modules that lie in that one tensor, in order; only this one if it is alone.
    """

    rule: Rule
    name: str
    packed: tuple[str, ...]

    @property
    def is_stacked(self) -> bool:
        """Whether the files have its parameter as several tensors."""
        return NUMBER in self.name


# What stands in a file's name for the number of a tensor, where ours is several of them stacked.
NUMBER = "#"
_TOKEN = re.compile(r"\*|\{[^{}]*\}")


def find(table: Table, module: str) -> list[FittingRule]:
    """Return what each rule that fits a module of ours says: one, in a table without mistakes."""
    found = []
    for pattern, rule in table.items():
        ours = _ours(pattern, rule)
        if (match := re.fullmatch(_expression(ours), module)) is None:
            continue
        captures = list(match.groups())
        # Braces on our side alone are packed: the file's name has none to put the choice into.
        is_packed = "{" in ours and "{" not in pattern
        taken = [
            text for token, text in zip(_TOKEN.findall(ours), captures, strict=True) if token == "*" or not is_packed
        ]
        packed = tuple(_filled(choice, taken) for choice in _choices(ours)) if is_packed else (module,)
        found.append(FittingRule(rule, _filled(pattern, taken), packed))
    return found


def check_table(table: Table, modules: Iterable[str], *, all_used: bool = True) -> None:
    """Refuse a table that does not say one thing of each module.

    Args:
        table: of an architecture.
        modules: our names of the modules that have parameters.
        all_used: these are all modules, so that each rule is of one of them.

    Raises:
        ValueError: a module without a rule, with two, or a rule without a module; with the names.
    """
    names = list(modules)
    used: set[str] = set()
    for name in names:
        fitting = [pattern for pattern, rule in table.items() if re.fullmatch(_expression(_ours(pattern, rule)), name)]
        used.update(fitting)
        if len(fitting) != 1:
            got = f"rules {' and '.join(fitting)}" if fitting else "none"
            raise ValueError(f"a table has one rule for each parameter: {name} has {got}: correct the table")
    unused = [pattern for pattern, rule in table.items() if pattern not in used and not rule.is_optional]
    if all_used and unused:
        raise ValueError(
            f"every rule of a table is of a parameter: {', '.join(unused)} fits none of {len(names)}: correct the table"
        )


def is_named(pattern: str, module: str) -> bool:
    """Return whether a pattern fits the name of a module."""
    return re.fullmatch(_expression(pattern), module) is not None


def num_packed(pattern: str, rule: Rule) -> int:
    """Return how many parameters of ours lie in one tensor of a file, of the rule with this key."""
    return len(_choices(rule.ours)) if "{" in rule.ours and "{" not in pattern else 1


def _ours(pattern: str, rule: Rule) -> str:
    """Return the pattern of our name."""
    return rule.ours or pattern.replace(f".{NUMBER}", "")


def _expression(pattern: str) -> str:
    """Return the regular expression of a pattern, with a group for each `*` and each pair of braces."""
    expression, place = "", 0
    for token in _TOKEN.finditer(pattern):
        expression += re.escape(pattern[place : token.start()])
        text = token.group()
        expression += "([^.]+)" if text == "*" else "(" + "|".join(map(re.escape, text[1:-1].split(","))) + ")"
        place = token.end()
    return expression + re.escape(pattern[place:])


def _filled(pattern: str, captures: Iterable[str]) -> str:
    """Return a pattern with its `*` and braces replaced, in order."""
    texts = iter(captures)
    return _TOKEN.sub(lambda _: next(texts), pattern)


def _choices(pattern: str) -> list[str]:
    """Return the patterns without braces: one for each choice of the first pair."""
    braces = next(token for token in _TOKEN.findall(pattern) if token != "*")
    return [pattern.replace(braces, choice) for choice in braces[1:-1].split(",")]
