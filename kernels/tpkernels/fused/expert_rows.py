"""The two ways that rows of experts travel behind one set of functions: at their exact number, or bounded.

    rows_to_experts   x[t, D] -> rows[R', D]                                    dispatch
    rows_to_sums      h[R', D] -> y[t, D]: a token's k rows, added              combine, and dispatch's backward
    combine_gradients dy[t, D] -> dh[R', D], dweights[t, k]                     combine's backward

Which way it is, routes say: those of exchange_counts know every number, for which the host has waited
(exchange/experts.py); those of exchange_bounded_counts know a bound (bounded_rows.py). Where all rows fit, the bits are
the same. Callers with a Function of their own use these; operators with gradients are in experts.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.exchange import experts as exact
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.experts import Routes
from tpkernels.fused.bounded_rows import BoundedRoutes, sum_rows, take_rows
from tpkernels.ops.experts.rows import combine_forward, launch_weight_gradients, take_backward


def rows_to_experts(x: Tensor, routes: Routes, comm: Communicator) -> Tensor:
    """Return the rows of this rank's experts, from the tokens of all ranks: rows[R', D] = x[t, D] of the pairs.

    Returns:
        [R', D] of x's dtype, a new tensor: by expert, then source rank, token, choice; if R' is a bound, then zeros.
    """
    if isinstance(routes, BoundedRoutes):
        return take_rows(x, routes, comm)
    return exact.rows_to_experts(x, routes, comm)


@torch.no_grad()
def rows_to_sums(
    h: Tensor, routes: Routes, comm: Communicator, *, weighted: bool, keeps: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y[t, D], the sum of each token's k rows of h in the order of its choice, and the rows themselves.

    Args:
        h: [R', D], in the order of rows_to_experts.
        weighted: multiply by routes.weights before they are added.
        keeps: whether to return ys[R, D], sorted as `order` is; else None. With one rank it is h itself.
    """
    if isinstance(routes, BoundedRoutes):
        return sum_rows(h, routes, comm, weighted=weighted, keeps=keeps)
    ys = exact.rows_to_tokens(h, routes, comm)
    if weighted:
        y = combine_forward(ys, routes.places, routes.weights)
    else:
        y = take_backward(ys, routes.places, routes.num_choices)
    return y, ys if keeps else None


@torch.no_grad()
def combine_gradients(
    dy: Tensor, ys: Tensor, routes: Routes, comm: Communicator, *, of_weights: bool = True, of_rows: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weighted sums: dh[R', D] at the experts' owner, and dweights[t, k].

    Args:
        dy: [t, D].
        ys: [R, D], as rows_to_sums returned it.
        of_weights, of_rows: as exchange.experts.combine_gradients.
    """
    if not isinstance(routes, BoundedRoutes):
        return exact.combine_gradients(dy, ys, routes, comm, of_weights=of_weights, of_rows=of_rows)
    dh = take_rows(dy, routes, comm, scaled=True) if of_rows else None
    return dh, launch_weight_gradients(dy, ys, routes.places, routes.weights) if of_weights else None
