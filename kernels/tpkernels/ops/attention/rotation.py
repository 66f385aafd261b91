"""Rotary embedding around attention's kernels, which take q and k rotated: by rope's kernel, positions by documents."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.ops.attention.problem import Options, Sides, Tables
from tpkernels.ops.rope import launch_rope


class Rotation:
    """Rotates heads of queries or keys, which have the same places, to those places and back.

    Args:
        like: queries or keys [B, S, heads, E].
        tables, sides, options: as of attention; there are tables.
    """

    def __init__(self, like: Tensor, tables: Tables, sides: Sides, options: Options) -> None:
        assert tables.cos is not None and tables.sin is not None, "only what has tables is rotated"
        self._interleaved = options.interleaved
        self._positions = _positions(like, sides.query_starts)
        # Without positions rope takes sequences of as many tokens as the tables have rows.
        num_rows = like.shape[1] if self._positions is None else len(tables.cos)
        self._cos, self._sin = tables.cos[:num_rows], tables.sin[:num_rows]

    def forth(self, x: Tensor) -> Tensor:
        """Return x[B, S, heads, E] rotated to its places, contiguous."""
        return self._rotated(x, False, None).view(x.shape)

    def back(self, x: Tensor, out: Tensor) -> None:
        """Write x[B, S, heads, E], rotated back, into `out`: of x's shape, in which sequences follow each other."""
        self._rotated(x, True, out.view(_tokens(out)))

    def _rotated(self, x: Tensor, inverse: bool, out: Tensor | None) -> Tensor:
        tokens = x.reshape(_tokens(x))
        return launch_rope(tokens, self._cos, self._sin, self._positions, self._interleaved, inverse, out)


def _tokens(x: Tensor) -> tuple[int, ...]:
    return (x.shape[0] * x.shape[1], *x.shape[2:])


def _positions(like: Tensor, starts: Tensor | None) -> Tensor | None:
    """Return the place of each token of one sequence in its document, [S]; None without documents."""
    if starts is None:
        return None
    token = torch.arange(like.shape[1], dtype=starts.dtype, device=like.device)
    return token - starts[torch.searchsorted(starts, token, right=True) - 1]
