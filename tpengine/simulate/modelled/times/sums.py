"""Seconds that are added up: of operators one after another, and of an action by cause. No torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class ActionSeconds:
    """What a compute action takes, by cause; the parts add up to the whole.

    Attributes:
        compute: operators that a plain forward and backward have.
        again: operators that backward runs a second time.
        exchange: of tensor-parallel ranks, as far as no operator hides it.
        host: starting operators, as far as it takes longer than they do.
        exact: what exact mode takes longer: smaller products, exchanges that nothing hides and whose partial sums are
            wide, and sums in trees.
    """

    compute: float = 0.0
    again: float = 0.0
    exchange: float = 0.0
    host: float = 0.0
    exact: float = 0.0

    @property
    def total(self) -> float:
        """Return how long the action occupies its rank."""
        return self.compute + self.again + self.exchange + self.host + self.exact

    def __mul__(self, times: float) -> ActionSeconds:
        return ActionSeconds(*(times * part for part in astuple(self)))


@dataclass(frozen=True)
class OperatorSum:
    """Operators that run one after another.

    Attributes:
        operators: their seconds.
        exchanges: seconds of exchanges that none of them hides.
        number: how many there are, each of which the host starts.
    """

    operators: float = 0.0
    exchanges: float = 0.0
    number: int = 0

    def __add__(self, other: OperatorSum) -> OperatorSum:
        return OperatorSum(
            self.operators + other.operators, self.exchanges + other.exchanges, self.number + other.number
        )

    def __mul__(self, times: int) -> OperatorSum:
        return OperatorSum(self.operators * times, self.exchanges * times, self.number * times)


# What blocks and ends take, by what they depend on: chunks of one configuration have them in common.
KnownSums = dict[tuple[object, ...], OperatorSum]
