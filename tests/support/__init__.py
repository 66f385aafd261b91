"""What several tests use: ranks, kernels looked at, engines that are compared, plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The top of the checkout."""

CountMutations = Callable[[str, int, int], None]
"""The fixture `count_mutations`: what was mutated, how many mutants were noticed, how many there were."""
