"""A norm of the queries of all heads together, and one of the keys, where each rank has some of the heads.

    msq[T] = (sum over ranks of the sum of squares of this rank's columns) / (H E)         2 T numbers are exchanged
    q[T, H E/tp] = x_q / sqrt(msq + eps) * w[H E/tp];   k alike, over G E

The weights are cut as the columns are. Where ranks share a KV head, its squares count once, and each rank's gradient of
it is a part of the sum over those ranks, as that of k itself is.

The decision a reader will question: sums of ranks are gathered and added in a tree by everybody, and not all-reduced.
So a rank that computes several shards, in exact mode, adds the same numbers in the same order as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import is_recorded, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.tree import tree_sum
from tpkernels.launch import accumulation_dtype

from tpengine.layers.collectives import of_all_ranks
from tpengine.layers.gradient_sink import GradientSink, check_reaches
from tpengine.layers.placement import Placement, check_divides, cut


class WidthNorm(nn.Module):
    """The weight[C/tp] of a norm over C columns, C = H E or G E; `norm_over_ranks` computes it.

    Args:
        size: C.
        comm: the tp ranks.
        eps: added to the mean square.
        replicas: as ColumnParallelLinear.
        sink: where the gradient goes; default `weight.grad`.
        dtype, device: of the weight, as torch.
    """

    def __init__(
        self,
        size: int,
        comm: Communicator,
        *,
        eps: float = 1e-5,
        replicas: Communicator | None = None,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.size, self.comm, self.replicas, self.eps = size, comm, replicas, eps
        self.sink: GradientSink = sink or GradientSink()
        columns = check_divides("a norm over all heads", size, comm.size // self.num_sharing)
        self.weight = Parameter(torch.ones(columns, dtype=dtype, device=device))

    @property
    def num_sharing(self) -> int:
        """How many ranks have the same columns."""
        return 1 if self.replicas is None else self.replicas.size

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: cut as the columns are."""
        return {"weight": cut(self.comm, 0, shared_by=self.replicas)}

    def borrow(self, owner: WidthNorm) -> None:
        """Share the weight of another layer of the same columns."""
        self.weight = owner.weight


class _Columns(NamedTuple):
    """One of the two norms of each shard: the columns [first, last) of qkv.

    Attributes:
        norms: of each shard that this rank holds.
        first, last: of its columns, the same in each shard.
    """

    norms: tuple[WidthNorm, ...]
    first: int
    last: int

    def of(self, x: Tensor) -> Tensor:
        """Return the columns in the dtype of sums."""
        return x[:, self.first : self.last].to(accumulation_dtype(x.dtype))


def _sums(terms: Sequence[Sequence[Tensor]], comm: Communicator) -> Tensor:
    """Return [V, 2, T]: of each shard of all ranks what it has of both sums; terms[n][2] are [T, C] of this rank's."""
    return of_all_ranks(torch.stack([torch.stack([term.sum(1) for term in of]) for of in terms]), comm)


def _normed(
    qkvs: Sequence[Tensor], both: tuple[_Columns, _Columns], comm: Communicator
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the shards' columns, normed, and rstd[T] of queries and of keys."""
    found = _sums([[of.of(qkv).square() for of in both] for qkv in qkvs], comm)
    rstds = []
    for i, columns in enumerate(both):
        norm = columns.norms[0]
        total = tree_sum(found[:: norm.num_sharing, i].unbind())
        rstds.append((total / norm.size + norm.eps).rsqrt())
    outputs = []
    for number, qkv in enumerate(qkvs):
        y = qkv.clone(memory_format=torch.contiguous_format)
        for columns, rstd in zip(both, rstds, strict=True):
            weight = columns.norms[number].weight.detach()
            y[:, columns.first : columns.last] = columns.of(qkv) * rstd[:, None] * weight
        outputs.append(y)
    return outputs, rstds


class _NormOverRanks(torch.autograd.Function):
    """Local shapes: qkv_v, y_v[T, C_q + 2 C_k] of each of n shards v; w[C] of its columns; rstd[T] over all shards.

    forward:  rstd = (sum over shards of x^2 / size + eps)^(-1/2);  y = x * rstd * w;  v is copied
    dgrad:    h = x * rstd;  dx = rstd * (dy*w - h * (sum over shards of dy*w*h) / size)      2 T numbers, gathered
    wgrad:    dw = sum over tokens of dy*h                  of its own columns, into the sink

    Where ranks share columns, dy is a part of a sum over them, and so is dx: each takes its share of the second term.
    """

    @staticmethod
    def forward(ctx: Any, comm: Communicator, both: tuple[_Columns, _Columns], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.both = comm, both
        qkvs = tensors[: len(both[0].norms)]
        outputs, rstds = _normed(qkvs, both, comm)
        ctx.save_for_backward(*tensors, *rstds)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a norm over all heads")
        both, num = ctx.both, len(dys)
        *tensors, q_rstd, k_rstd = ctx.saved_tensors
        rstds = q_rstd[:, None], k_rstd[:, None]

        def operands(number: int, i: int) -> tuple[Tensor, Tensor]:
            """Return h and dy*w of one shard's norm; they are made twice, instead of being kept for all shards."""
            weight = tensors[(1 + i) * num + number]
            return both[i].of(tensors[number]) * rstds[i], both[i].of(dys[number]) * weight

        terms: list[list[Tensor]] = []
        dws: list[list[Tensor | None]] = [[], []]
        for number in range(num):
            terms.append([])
            for i, columns in enumerate(both):
                h, g = operands(number, i)
                terms[-1].append((g * h).sum(1, keepdim=True))
                norm = columns.norms[number]
                dw = None
                if ctx.needs_input_grad[2 + (1 + i) * num + number]:
                    dw = norm.sink.add(norm.weight, (columns.of(dys[number]) * h).sum(0), norm.replicas)
                dws[i].append(dw)
        found = _sums(terms, ctx.comm)
        means = []
        for i, columns in enumerate(both):
            norm = columns.norms[0]
            means.append(tree_sum(found[:, i].unbind())[:, None] / (norm.size * norm.num_sharing))
        dxs = []
        for number, dy in enumerate(dys):
            dx = dy.clone(memory_format=torch.contiguous_format)
            for i, columns in enumerate(both):
                h, g = operands(number, i)
                dx[:, columns.first : columns.last] = rstds[i] * (g - h * means[i])
            dxs.append(dx)
        return None, None, *dxs, *dws[0], *dws[1]


def norm_over_ranks(
    qkvs: Sequence[Tensor], norms: Sequence[tuple[WidthNorm, WidthNorm]], comm: Communicator
) -> list[Tensor]:
    """Norm queries and keys over all heads of all ranks; see above.

    Args:
        qkvs: of each shard that this rank holds, [T, (H + 2G) E / V] columns of V shards; in fast mode one, and V is
            tp.
        norms: of each, that of its queries and that of its keys.
        comm: the real tp ranks, which hold equally many shards.

    Returns:
        Tensors of the same shapes, new; values are copied.

    Cost: gathers 2 T numbers of each shard forward, and as many backward; keeps qkvs and 2 T numbers.
    Numerics: in promote_types(dtype, float32), rounded once.
    Source: OLMo Team, "2 OLMo 2 furious", arXiv 2501.00656, section 3.2: QK-norm.
    """
    queries, keys = zip(*norms, strict=True)
    num_q, num_k = len(queries[0].weight), len(keys[0].weight)
    both = _Columns(queries, 0, num_q), _Columns(keys, num_q, num_q + num_k)
    for norm in (*queries, *keys):
        check_reaches(norm.sink, norm.weight, "the weight of a norm over all heads")
    if not is_recorded():
        return _normed(qkvs, both, comm)[0]
    weights = [norm.weight for norm in (*queries, *keys)]
    return list(_NormOverRanks.apply(comm, both, *qkvs, *weights))
