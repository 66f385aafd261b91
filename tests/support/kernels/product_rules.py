"""What must not happen to the sums of matrix products in a loop: triton compiles it wrongly for sm_100, without a word.

    faults(ttir) -> a line for each breach

    for ...:
        total = dot(a1, b1, total)
        total = dot(a2, b2, total)      # 1: a second product is added to the sum that the loop carries
        y = dot(total, b3)              # 2: the sum that the loop carries is another product's factor

One product per sum is right, also where the sum is changed between iterations, as attention scales it. So is a sum of
several products that begins anew in every iteration. The rules are read from a program's first form in triton (ttir),
which is the same for every target.

Source: triton-lang/triton issue 10821, mended by 10988 in no release that tpkernels allows; 10993, open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULTS = re.compile(r"\s*(%[\w$.-]+)(?::(\d+))? = (.*)")
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_COMMENT = re.compile(r"\s+loc\(.*\)$|\s*//.*$")


@dataclass(frozen=True)
class _Value:
    """How a value is made: from `operands`, of a product its summand alone; its factors are `factors`."""

    operands: tuple[str, ...]
    factors: tuple[str, ...] = ()


@dataclass
class _Region:
    """Lines between braces.

    Attributes:
        results: of the operation that has them.
        carried: what a loop carries, within it; empty for others.
        firsts: what it carries at first.
        yielded: what each of its blocks yields.
        values: those made within it, each after its operands.
        products: those of its values that are made in it and in no loop within it.
    """

    results: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    firsts: tuple[str, ...] = ()
    yielded: list[tuple[str, ...]] = field(default_factory=list)
    values: dict[str, _Value] = field(default_factory=dict)
    products: set[str] = field(default_factory=set)


def faults(ttir: str) -> list[str]:
    """Return what breaks the rules in the ttir of a kernel.

    Raises:
        ValueError: a `while` carries a tensor: this is not looked at.
    """
    return [line for loop in _loops_of(ttir) for line in _faults_of(loop)]


def _faults_of(loop: _Region) -> Iterator[str]:
    (yielded,) = loop.yielded
    for carried, last in zip(loop.carried, yielded, strict=True):
        # The most products on a way from what is carried to each value that depends on it.
        most = {carried: 0}
        for name, value in loop.values.items():
            ways = [most[operand] for operand in value.operands if operand in most]
            if ways:
                most[name] = max(ways) + (name in loop.products)
        num_products = most.get(last, 0)
        if num_products > 1:
            yield f"{num_products} products are added to {carried}, which a loop carries"
        for name in sorted(loop.products) if num_products else ():
            if any(factor in most for factor in loop.values[name].factors):
                yield f"{carried}, a sum of products that a loop carries, is a factor of {name}"


def _loops_of(ttir: str) -> Iterator[_Region]:
    """Yield the loops that carry something, each when it ends."""
    regions = [_Region()]
    for written in ttir.splitlines():
        line = _COMMENT.sub("", written)
        results, text = _results_of(line)
        if line.lstrip().startswith("}"):
            if line.endswith("{"):
                continue  # the other branch of the same operation
            region = regions.pop()
            _close(region, regions[-1])
            if region.carried:
                yield region
        elif text.startswith("scf.yield"):
            regions[-1].yielded.append(tuple(_VALUE.findall(text.partition(" : ")[0])))
        elif line.endswith("{"):
            if text.startswith("scf.while") and "tensor<" in text:
                raise ValueError(f"a while that carries a tensor is not looked at: {text}")
            pairs = _CARRIED.findall(text.partition("iter_args(")[2]) if text.startswith("scf.for") else ()
            regions.append(_Region(results, tuple(a for a, _ in pairs), tuple(b for _, b in pairs)))
        else:
            _add(regions[-1], results, text)


def _results_of(line: str) -> tuple[tuple[str, ...], str]:
    """Return the names of what an operation makes, and the rest of its line."""
    match = _RESULTS.match(line)
    if match is None:
        return (), line.strip()
    name, count, text = match.groups()
    return tuple(f"{name}#{k}" for k in range(int(count))) if count else (name,), text


def _add(region: _Region, results: tuple[str, ...], text: str) -> None:
    operands = tuple(_VALUE.findall(text))
    is_product = text.startswith("tt.dot ")
    for name in results:
        region.values[name] = _Value(operands[2:3], operands[:2]) if is_product else _Value(operands)
        if is_product:
            region.products.add(name)


def _close(region: _Region, around: _Region) -> None:
    """Put a region's values into the one around it; its results come from what it carries and from what it yields."""
    around.values |= {name: _Value((first,)) for name, first in zip(region.carried, region.firsts, strict=True)}
    around.values |= region.values
    if not region.carried:
        around.products |= region.products
    for k, name in enumerate(region.results):
        yielded = [values[k] for values in region.yielded if k < len(values)]
        around.values[name] = _Value((*yielded, *region.firsts[k : k + 1]))
