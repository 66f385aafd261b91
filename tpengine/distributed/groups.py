"""The mesh's groups as communicators, and which of them exchange through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from tpkernels.exchange.arena import exchange_bytes
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.launch import accumulation_dtype

from tpengine.config import Config
from tpengine.distributed.mesh import Mesh
from tpengine.distributed.process import hosts_of_ranks

# Sums of gradients are exchanged in pieces of a quarter of this (rows exchange/all_reduce/... of benchmarks/results).
SUM_ARENA_BYTES = 16_000_000
# How long to wait for a living peer if --train.timeout-seconds leaves it to the communication library: gloo's limit.
_GLOO_SECONDS = 1800.0


@dataclass(frozen=True)
class Communicators:
    """A communicator for each group of the mesh."""

    tp: Communicator
    pp: Communicator
    dp: Communicator
    replica: Communicator | None
    dp_tp: Communicator
    dp_replica: Communicator
    ends: Communicator

    def over(self, axes: Sequence[str]) -> Communicator:
        """Return the ranks that one sum over these axes joins: ("dp", "tp") are those of `dp_tp`.

        Args:
            axes: names of axes, in the order in which the fields of this class name them.
        """
        comm: Communicator | None = getattr(self, "_".join(axes))
        assert comm is not None, f"no rank shares anything over {axes}"
        return comm

    @classmethod
    def of(cls, mesh: Mesh, config: Config, device: torch.device) -> Communicators:
        """Return a communicator for each group of the mesh; collective.

        The tp ranks of a host exchange through an arena unless `parallel.tp_comm` is plain: on a CPU everything, on
        GPUs what fused matmuls exchange.
        """
        hosts = hosts_of_ranks(device)

        def through_memory(group: ProcessGroup, arena_bytes: int) -> Communicator:
            if device.type != "cpu":
                return Communicator(group)
            return Communicator(group, arena_bytes=arena_bytes, timeout_seconds=exchange_seconds(config))

        def for_sums(group: ProcessGroup | None) -> Communicator:
            """Return a communicator through memory if the ranks share a host; elsewhere plain, without a message."""
            if group is None or len({hosts[rank] for rank in dist.get_process_group_ranks(group)}) > 1:
                return Communicator(group)
            return through_memory(group, SUM_ARENA_BYTES)

        def members(group: ProcessGroup | None) -> list[int]:
            return [] if group is None else dist.get_process_group_ranks(group)

        def for_matmuls(group: ProcessGroup) -> Communicator:
            if device.type == "cpu":
                return through_memory(group, tp_arena_bytes(config))
            # Exact mode's matmuls use all tokens, and so are not fused.
            fused = config.train.reduction == "fast"
            return Communicator(
                group,
                arena_bytes=tp_arena_bytes(config) if fused else 0,
                device=device,
                timeout_seconds=exchange_seconds(config),
            )

        dp = for_sums(mesh.dp)
        return cls(
            tp=for_matmuls(mesh.tp),
            pp=Communicator(mesh.pp),
            dp=dp,
            replica=None if mesh.replica is None else Communicator(mesh.replica),
            # One memory if two axes consist of the same ranks.
            dp_tp=dp if members(mesh.dp_tp) == members(mesh.dp) else for_sums(mesh.dp_tp),
            dp_replica=dp if mesh.dp_replica is mesh.dp else for_sums(mesh.dp_replica),
            ends=for_sums(mesh.ends),
        )

    def describe(self, mailbox: Mailbox | None) -> str:
        """Return how this rank exchanges per axis: "tp, dp through 20.2 MB of shared memory per rank; pp by gloo"."""
        sizes = {"tp": self.tp.size, "pp": self.pp.size, "dp": self.dp.size}
        through_memory = {"tp": self.tp.arena, "pp": mailbox, "dp": self.dp.arena}
        used = [axis for axis, found in through_memory.items() if found is not None]
        others = [axis for axis, size in sizes.items() if size > 1 and axis not in used]
        parts = []
        if used:
            size = f"{self._host_bytes(mailbox) / 1e6:.1f} MB"
            parts.append(f"{', '.join(used)} through {size} of shared memory per rank")
        kernels = self.tp.device_arena
        if kernels is not None and self.tp.may_use_kernels():
            size = f"{kernels.memory.num_bytes / 1e6:.1f} MB"
            parts.append(f"tp's matmuls by kernels through {size} of symmetric memory per rank")
        if others:
            parts.append(f"{', '.join(others)} by {dist.get_backend()}")
        return "; ".join(parts) or "none, one process"

    def arena_bytes(self, mailbox: Mailbox | None) -> int:
        """Return the bytes that this rank has for exchanging tensors with others: arenas and mailbox."""
        kernels = self.tp.device_arena
        return self._host_bytes(mailbox) + (kernels.memory.num_bytes if kernels is not None else 0)

    def _host_bytes(self, mailbox: Mailbox | None) -> int:
        # Sums over two axes at once, of norm weights and tied embeddings, have memory of their own.
        arenas = {comm.arena for comm in (self.tp, self.dp, self.dp_tp, self.dp_replica, self.ends) if comm.arena}
        return sum(arena.memory.num_bytes for arena in arenas) + (mailbox.memory.num_bytes if mailbox else 0)

    def connect(self, device: torch.device) -> None:
        """Exchange one number over every group, in the same order on all ranks.

        NCCL needs all members in a group's first call; a pipeline's first transfer does not have them all. And a group
        that cannot connect fails here, not in the middle of a step.
        """
        for comm in (self.tp, self.pp, self.dp, self.replica, self.dp_tp, self.dp_replica, self.ends):
            if comm is not None:
                comm.all_reduce_(torch.zeros(1, device=device))
                # An exchange through an arena does not use the group itself, so it is not connected yet.
                comm.all_reduce_max_(torch.zeros(1, device=device))


def exchange_seconds(config: Config) -> float:
    """Return how long an exchange through memory waits for a living peer."""
    return config.train.timeout_seconds or _GLOO_SECONDS


def tp_arena_bytes(config: Config) -> int:
    """Return the bytes of arena per rank for exchanging a micro-batch's x[T, D]; 0 if collectives exchange it."""
    assert config.parallel.tp is not None, "resolve the layout first: config.resolve_layout"
    if config.parallel.tp_comm == "plain" or config.parallel.tp == 1:
        return 0
    tokens = config.train.micro_batch_size * config.train.seq_len
    dtype = getattr(torch, config.train.dtype)
    # Exact mode's partial sums are exchanged in the accumulation dtype.
    item_bytes = (accumulation_dtype(dtype) if config.train.reduction == "exact" else dtype).itemsize
    return exchange_bytes(tokens, config.model.hidden_size * item_bytes, config.parallel.tp)
