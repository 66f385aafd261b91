"""One group of ranks as operators, layers and buckets see it: gather, reduce-scatter, all-reduce, and their transport.

A communicator of one rank does nothing and copies nothing. Over an arena (ranks of one host, CPU tensors) ranks read
each other's memory; otherwise exchanges are collectives of the process group. Over a device arena (GPUs that can
address each other) the kernels of the fused matmuls make their exchanges themselves; all others are collectives. Which
transport is used is decided when the communicator is made, and printed once if the memory is refused.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.exchange.arena import Arena
from tpkernels.exchange.background import (
    Background,
    all_reduce_through,
    copied,
    gather_through,
    reduce_scatter_through,
)
from tpkernels.exchange.collectives import Collectives
from tpkernels.exchange.device_arena import DeviceArena, model_of
from tpkernels.exchange.pending import Done, Work
from tpkernels.exchange.strategies import checked
from tpkernels.exchange.tree import tree_sum
from tpkernels.launch import INTERPRETED
from tpkernels.ops.matmul.kernel import KERNEL_DTYPES
from tpkernels.processors import Budget, hold
from tpkernels.symmetric.host_memory import MemoryRefused
from tpkernels.symmetric.memory import check_num_bytes
from tpkernels.symmetric.processes import close_to_children

_ALONE = "alone"
# Every exchange uses one of these first; in a forked child they raise.
_CLOSED_TO_CHILDREN = (
    "group",
    "arena",
    "device_arena",
    "arena_for",
    "device_arena_for",
    "start_all_reduce",
    "start_all_reduce_in_tree",
    "start_all_gather",
    "start_reduce_scatter",
    "all_to_all_rows",
    "broadcast_",
    "_start",
)
# Dtypes that torch can add: not float8, and not unsigned integers of more than 8 bits.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SUMMABLE = frozenset((*_FLOATS, *_INTEGERS))


class Communicator:
    """One process group.

    Args:
        group: the ranks; None stands for this rank alone.
        arena_bytes: size of the arena per rank, through which CPU tensors are exchanged between ranks of one host;
            larger tensors move in pieces. 0 makes no arena; otherwise the constructor is collective. If the ranks are
            on several hosts, or the memory is refused, collectives are used, and the group's first rank prints so.
            With a GPU as `device`, an arena for the fused matmuls' kernels is made instead.
        device: where the exchanged tensors live. If kernels are interpreted (launch.py), an arena for kernels is made
            on a CPU too.
        strategy: how fused matmuls exchange over a device arena: "auto" chooses by sizes (fused/strategy.py), "plain"
            uses collectives, "fused" the copy engine, "push" gathers by stores of the kernel.
        timeout_seconds: how long an exchange through the arena waits for a peer that is alive.
        reserved_processors: how many processors of the device other communication of this process may hold at once: the
            sum over all groups that may have an operation under way (NCCL: of their max_ctas). Fused kernels leave them
            free, and our products on that device, also those that exchange nothing, then leave it to the hardware which
            processor computes a tile (processors.py). 0: nothing else communicates.

    Raises:
        ValueError: arena_bytes is not a legal number of bytes, or not the same on all ranks; an unknown strategy;
            reserved_processors is negative, differs between ranks with an arena for kernels, or leaves none.

    Attributes:
        rank, size: this rank's place in the group and the number of ranks.
        is_gloo: whether the group's backend is gloo, which works on host memory.
        name: registered operators find the communicator by this name, in this process.
        arena: None if collectives are used.
        device_arena: the arena of the fused matmuls' kernels, or None.
        strategy: as given.

    A copy (copy.deepcopy of a module that holds one, for an average of its weights) shares the communicator. Pickling
    one raises TypeError. In a forked child every exchange raises RuntimeError.

    Order: blocking calls return when the result may be read (on CUDA: by the current stream). All members must call
        in the same order. Numerics: reduce-scatters over gloo, all sums over the arena, and the methods `*_in_tree` add
        in a balanced tree of ranks (tree.py): the same bits on every run. If the group is gloo's and tensors live on a
        GPU (several ranks on one card), data is staged through the host.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        *,
        arena_bytes: int = 0,
        device: torch.device | None = None,
        strategy: str = "auto",
        timeout_seconds: float = 300.0,
        reserved_processors: int = 0,
    ) -> None:
        self.group, self.strategy = group, checked(strategy)
        if arena_bytes != 0:
            check_num_bytes("arena_bytes, or 0 for no arena,", arena_bytes)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.is_gloo = group is not None and dist.get_backend(group) == "gloo"
        if group is not None:
            self._collectives = Collectives(group)
        device = torch.device("cpu") if device is None else device
        if reserved_processors < 0:
            raise ValueError(Budget(0, reserved_processors).problem())
        if reserved_processors and device.type == "cuda":
            hold(torch.cuda.current_device() if device.index is None else device.index, reserved_processors)
        self.arena: Arena | None = None
        self.device_arena: DeviceArena | None = None
        if arena_bytes and self.size > 1:
            assert group is not None
            try:
                if device.type == "cpu":
                    self.arena = Arena.open(group, arena_bytes, timeout_seconds=timeout_seconds)
                if device.type != "cpu" or INTERPRETED:
                    self.device_arena = DeviceArena.open(
                        group,
                        arena_bytes,
                        device,
                        timeout_seconds=timeout_seconds,
                        reserved_processors=reserved_processors,
                    )
                    if self.rank == 0 and strategy == "auto" and self.device_arena.rates is None:
                        _say_that_nothing_is_chosen(model_of(device))
            except MemoryRefused as error:
                if self.rank == 0:
                    print(f"tpkernels: group {group.group_name} uses collectives: {error}", file=sys.stderr)
        self.name = _ALONE
        if group is not None and self.size > 1:
            self.name = next(name for i in itertools.count() if (name := f"{group.group_name}/{i}") not in _BY_NAME)
            _BY_NAME[self.name] = self
            close_to_children(self, f"the communicator of group {group.group_name}", *_CLOSED_TO_CHILDREN)
        self._background = Background(self.name)

    @property
    def row_part(self) -> int:
        """Which part of the rows of activations this rank holds."""
        return self.rank

    @property
    def num_row_parts(self) -> int:
        """Into how many parts those rows are cut; 1 where every rank holds them all."""
        return self.size

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: object) -> Communicator:
        """Return self: a copy of a layer communicates with the same ranks, in the same order of calls."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.size == 1 and self.group is None:
            return super().__reduce_ex__(protocol)
        raise TypeError(
            f"a communicator stands for running processes and cannot be saved or sent: got that of group "
            f"{self.name} in a pickle: save model.state_dict() of a module that holds one, or write a checkpoint, and "
            "build the module anew"
        )

    def arena_for(self, x: Tensor) -> Arena | None:
        """Return the arena if an exchange of `x` goes through it, else None; wait for an exchange that runs on it."""
        if torch.compiler.is_compiling():
            # torch.compile cannot trace what other processes write. The registered operators are opaque to it.
            torch._dynamo.graph_break()
        # Exchanges under way come first on all ranks.
        self._background.settle()
        return self.arena if x.device.type == "cpu" else None

    def device_arena_for(self, x: Tensor) -> DeviceArena | None:
        """Return the device arena if kernels can exchange and multiply `x`, else None."""
        if self.device_arena is None or x.dtype not in KERNEL_DTYPES:
            return None
        return self.device_arena if x.device == self.device_arena.control.device else None

    def may_use_kernels(self) -> bool:
        """Return whether kernels exchange for fused matmuls of some sizes; with "auto" only on GPUs of known rates."""
        arena = self.device_arena
        return arena is not None and self.strategy != "plain" and (self.strategy != "auto" or arena.rates is not None)

    def check(self) -> None:
        """Raise if a kernel of this group has given up waiting, as far as this rank knows; call it after synchronising.

        Raises:
            PeerError, CallMismatch: see DeviceArena.check.
        """
        if self.device_arena is not None:
            self.device_arena.check_all()

    def refuse(self, x: Tensor, message: str) -> NoReturn:
        """Raise ValueError for a call with `x` that cannot work; over an arena, make the other ranks raise too.

        Over collectives the other ranks wait for this one, as in any program whose ranks differ. A device arena is
        poisoned if kernels take x's dtype, since the other ranks may already have launched theirs.
        """
        by_kernels = self.device_arena_for(x)
        if by_kernels is not None:
            by_kernels.refuse(message)
        arena = self.arena_for(x)
        if arena is not None:
            arena.refuse(message)
        raise ValueError(message)

    @torch.no_grad()
    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along dim 0.

            y[R*n, ...] = all_gather(x[n, ...])

        Args:
            x: the same shape and dtype on every rank.

        Returns:
            A new tensor; with one rank `x` itself.

        Raises:
            ValueError: over an arena, a row (an element of dim 0) does not fit into it.
            PeerError: over an arena, a peer did not take part.

        The other exchanges raise the same. Sums also raise ValueError for a dtype that cannot be added: float8, and
        unsigned integers of more than 8 bits.

        Cost: each rank sends (R - 1) times its bytes.
        """
        return self.all_gather_rows(x, self.size * x.shape[0])

    @torch.no_grad()
    def all_gather_rows(self, x: Tensor, num_rows: int, *, operation: str = "all_gather") -> Tensor:
        """Concatenate shards of `num_rows` rows: y[num_rows, ...] = all_gather(x[shard_rows(num_rows), ...]).

        Returns:
            A new tensor; with one rank `x` itself.
        """
        if self.size == 1:
            return x
        arena = self.arena_for(x)
        if arena is None:
            return self._collectives.gather(x, num_rows)
        full = x.new_empty(num_rows, *x.shape[1:])
        flat = full.view(num_rows, full[:1].numel())
        for rows, shard in arena.gather(x.reshape(len(x), flat.shape[1]), num_rows, operation):
            flat[rows].copy_(shard)
        return full

    @torch.no_grad()
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors and keep this rank's slice of dim 0.

            y[shard_rows(T), ...] = sum over ranks of x[T, ...]

        Args:
            x: of the same shape on every rank. Each rank keeps ceil(T/R) rows, the last ranks fewer or none.

        Returns:
            A new tensor; with one rank `x` itself.

        Cost: each rank sends (R - 1)/R of its bytes. Over gloo it needs extra memory of one tensor.
        """
        if self.size == 1:
            return x
        self._check_sum(x, "reduce_scatter")
        arena = self.arena_for(x)
        if arena is None:
            return self._collectives.reduce_scatter(x)
        flat = x.reshape(len(x), x[:1].numel())
        total = arena.reduce_scatter(
            len(flat), flat.shape[1], x.dtype, lambda rows, out: copied(flat[rows], out), "reduce_scatter"
        )
        return total.view(len(total), *x.shape[1:])

    @torch.no_grad()
    def reduce_scatter_in_tree(self, terms: Sequence[Tensor]) -> Tensor:
        """Sum several tensors per rank over all ranks in one balanced tree, and keep this rank's slice of dim 0.

            y[shard_rows(T), ...] = tree over ranks r, terms i of x_ri[T, ...],   in the order x_00, x_01, ..., x_10

        If each rank has a power of two of terms, the bits depend on the terms only, not on how many ranks hold them.

        Args:
            terms: tensors of one shape and dtype, as many on every rank.

        Returns:
            A new tensor in promote_types(dtype, float32).

        Cost: each rank sends (R - 1)/R of a term's elements, in promote_types(dtype, float32).
        """
        if self.size == 1:
            return tree_sum(terms)
        self._check_sum(terms[0], "reduce_scatter_in_tree")
        arena = self.arena_for(terms[0])
        if arena is None:
            return self._collectives.reduce_scatter_in_tree(tree_sum(terms))
        flat = [term.reshape(len(term), -1) for term in terms]
        wide = torch.promote_types(terms[0].dtype, torch.float32)
        total = arena.reduce_scatter(
            len(flat[0]),
            flat[0].shape[1],
            wide,
            lambda rows, out: tree_sum([term[rows] for term in flat], out),
            "reduce_scatter",
        )
        return total.view(len(total), *terms[0].shape[1:])

    @torch.no_grad()
    def all_to_all_rows(self, x: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send each rank rows of x, and return the rows that came; always by the process group's all-to-all.

        Args:
            x: [sum(num_sent), ...]: the rows for rank 0, then those for rank 1, ...
            num_sent, num_received: rows to, and from, each rank; what i sends to j, j receives from i.

        Returns:
            [sum(num_received), ...]: the rows from rank 0, then those from rank 1, ...; with one rank `x` itself.
        """
        return x if self.size == 1 else self._collectives.exchange_rows(x, num_sent, num_received)

    @torch.no_grad()
    def all_reduce_in_tree_(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors in place, in a balanced tree of ranks over any transport. Return x."""
        self.start_all_reduce_in_tree(x).wait()
        return x

    def start_all_reduce_in_tree(self, x: Tensor) -> Work:
        """Begin as `start_all_reduce` does, but sum in a balanced tree of ranks over any transport.

        Without an arena the sum is complete when this returns.
        """
        if self.size == 1 or (self.arena is not None and x.device.type == "cpu"):
            return self.start_all_reduce(x)
        self._check_sum(x, "all_reduce")
        flat = x.reshape(-1)
        total = self._collectives.reduce_scatter_in_tree(flat)
        x.copy_(self._collectives.gather(total, len(flat)).view(x.shape))
        return Done()

    @torch.no_grad()
    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors in place: x = sum over ranks of x. Return x."""
        self._check_sum(x, "all_reduce")
        arena = self.arena_for(x)
        if arena is None:
            self._start(x, dist.ReduceOp.SUM).wait()
        else:
            all_reduce_through(arena, x)
        return x

    def all_reduce_max_(self, x: Tensor) -> Tensor:
        """Take the elementwise maximum over the ranks in place. Return x."""
        self._start(x, dist.ReduceOp.MAX).wait()
        return x

    def broadcast_(self, x: Tensor) -> Tensor:
        """Overwrite the ranks' tensors with that of the group's rank 0. Return x."""
        if self.size > 1:
            self._collectives.broadcast_(x)
        return x

    def start_all_reduce(self, x: Tensor) -> Work:
        """Begin to sum the ranks' tensors in place; do not read or write `x` before `wait()` of the result returns.

        Over an arena a thread of this communicator takes the sums, one after the other.
        """
        self._check_sum(x, "all_reduce")
        if self.arena is None or x.device.type != "cpu":
            return self._start(x, dist.ReduceOp.SUM)
        return self._background.submit(all_reduce_through, self.arena, x)

    def start_all_gather(self, own: Tensor, full: Tensor) -> Work:
        """Begin concatenating the ranks' tensors; both must not be touched before `wait()` of the result.

            full[R*n] = all_gather(own[n])

        Args:
            own: [n], contiguous, of one size and dtype on all ranks; it may be this rank's part of `full` itself.
            full: [R*n], contiguous.

        Over an arena a thread of this communicator does it, after what it began before. Over gloo ranks send each other
        their parts: gloo's own gather needs memory of one more `full`, and copies it. Whether messages have come is not
        known before `wait`.

        Cost: each rank sends (R - 1) times the bytes of `own`.
        """
        if self.size == 1:
            return _copied_to(full, own)
        if self.arena is not None and full.device.type == "cpu":
            return self._background.submit(gather_through, self.arena, own, full)
        return self._collectives.start_all_gather(own, full)

    def start_reduce_scatter(self, x: Tensor, out: Tensor, *, in_tree: bool = False) -> Work:
        """Begin summing the ranks' tensors, of which each keeps its part; both as in `start_all_gather`.

            out[n] = part `rank` of (sum over ranks of x[R*n])

        Args:
            x: [R*n], contiguous, of one size and dtype on all ranks.
            out: [n], contiguous; it may be this rank's part of `x` itself.
            in_tree: add in a balanced tree of ranks, whatever the transport.

        Cost: each rank sends (R - 1)/R of the bytes of `x`. Over gloo, and over NCCL with `in_tree`, memory of one more
            `x`.
        """
        self._check_sum(x, "reduce_scatter")
        if self.size == 1:
            return _copied_to(out, x)
        if self.arena is not None and x.device.type == "cpu":
            return self._background.submit(reduce_scatter_through, self.arena, x, out)
        return self._collectives.start_reduce_scatter(x, out, in_tree=in_tree)

    def _check_sum(self, x: Tensor, operation: str) -> None:
        """Refuse a dtype that cannot be added. Do so before the call begins: to fail within it poisons the group."""
        if x.dtype not in _SUMMABLE and self.size > 1:
            self.refuse(x, f"{operation} cannot add {x.dtype}: got {tuple(x.shape)}: convert it, to bfloat16 for one")

    def _start(self, x: Tensor, op: Any) -> Work:
        return Done() if self.size == 1 else self._collectives.start_all_reduce(x, op)


# Registered operators are given a communicator's name, not the object. Entries vanish with their communicators.
_BY_NAME: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


def communicator_named(name: str) -> Communicator:
    """Find a communicator by its name.

    Raises:
        ValueError: there is none of that name, or it has been freed.
    """
    communicator = Communicator(None) if name == _ALONE else _BY_NAME.get(name)
    if communicator is None:
        raise ValueError(f"an operator needs the communicator of its group: none is named {name!r}: keep it alive")
    return communicator


@functools.cache
def _say_that_nothing_is_chosen(model: str) -> None:
    """Print that "auto" takes collectives; once per process, however many groups it makes."""
    print(
        f"tpkernels: the rates and links of {model} are not known: strategy auto takes collectives: name fused or push "
        "to try the kernels",
        file=sys.stderr,
    )


def _copied_to(out: Tensor, x: Tensor) -> Work:
    """Return the exchange of a single rank."""
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return Done()
