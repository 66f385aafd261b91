"""How the next token is drawn. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drawing:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; below 1 makes likely tokens likelier. 0 takes the likeliest.
        top_k: draw among the k likeliest, and those as likely as the last of them; 0 for all.
        top_p: then among the likeliest that together have at least this probability.
        seed: of the draws.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Refuse numbers that say nothing.

        Raises:
            ValueError: names the flag.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature must be at least 0 and finite: got {self.temperature:g}: use 0.8, or 0")
        if self.top_k < 0:
            raise ValueError(f"--top-k must be at least 0, which keeps all: got {self.top_k}: use 40")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be above 0 and at most 1: got {self.top_p:g}: use 0.9")
