"""Work of each operator as pure functions: floating-point operations, bytes in memory, bytes on links. No torch.

One formula feeds launch metadata, benchmarks, the training log and the planner, so they cannot disagree.
Conventions: a multiply-add is 2 operations; bytes in memory count each operand once (an ideal cache);
bytes on links are what one rank sends, ring volume. Units are in the field names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What one call costs on one rank.

    Attributes:
        flops: floating-point operations.
        memory_bytes: bytes read and written in the rank's own memory, each operand once.
        link_bytes: bytes this rank sends to others.
    """

    flops: int = 0
    memory_bytes: int = 0
    link_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.memory_bytes + other.memory_bytes,
            self.link_bytes + other.link_bytes,
        )


def matmul_work(m: int, n: int, k: int, item_bytes: int) -> Work:
    """C[m, n] = A[m, k] @ B[k, n]: 2*m*n*k operations; A and B read, C written once."""
    return Work(flops=2 * m * n * k, memory_bytes=item_bytes * (m * k + k * n + m * n))


def attention_work(
    batch: int, seq: int, heads: int, kv_heads: int, head_size: int, item_bytes: int, *, causal_half: bool
) -> Work:
    """Self-attention forward: q @ k.T and p @ v over `heads` query heads.

    Args:
        causal_half: count only the half of the scores at or below the diagonal (the work a causal kernel does);
            False counts the full square, the convention of the PaLM paper's MFU (appendix B).
    """
    full = 4 * batch * heads * seq * seq * head_size
    memory = item_bytes * batch * seq * head_size * (2 * heads + 2 * kv_heads)
    return Work(flops=full // 2 if causal_half else full, memory_bytes=memory)


def all_gather_work(shard_bytes: int, world: int) -> Work:
    """Each rank ends with all `world` shards: a ring sends (world - 1) shards a rank."""
    sent = (world - 1) * shard_bytes
    return Work(memory_bytes=2 * world * shard_bytes if world > 1 else 0, link_bytes=sent)


def reduce_scatter_work(full_bytes: int, world: int) -> Work:
    """Each rank ends with the sum of its slice: a ring sends (world - 1) / world of the tensor a rank."""
    sent = (world - 1) * (full_bytes // world)
    return Work(memory_bytes=2 * full_bytes if world > 1 else 0, link_bytes=sent)


def all_reduce_work(full_bytes: int, world: int) -> Work:
    """A reduce-scatter followed by an all-gather."""
    return reduce_scatter_work(full_bytes, world) + all_gather_work(full_bytes // world, world)
