"""Arenas made hostile, and the fused operators with the answers they must give: what several test files' ranks run.

A hostile arena fills the generation that a call is about to write with NaN and sleeps at random before each step that
another rank can see. Only this rank's own generation may be filled: peers may still read the other one.

Inputs are small integers and every rank can draw those of all ranks, so that the specification (the `*_reference`
functions, in float64, differentiated by autograd) gives each rank's outputs and gradients exactly.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from tpkernels.exchange.arena import Arena, shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.all_gather_matmul import all_gather_matmul, all_gather_matmul_reference
from tpkernels.fused.matmul_all_reduce import matmul_all_reduce, matmul_all_reduce_reference
from tpkernels.fused.matmul_reduce_scatter import matmul_reduce_scatter, matmul_reduce_scatter_reference
from tpkernels.symmetric.signals import Signals

# What no rank that still works exceeds, on a machine that is a hundred times slower.
PATIENT_SECONDS = 600.0
_NAN_BYTE = b"\xff"  # NaN in every floating-point format when repeated
_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


class HostileArena(Arena):
    """An arena whose memory holds NaN until it is written, and whose ranks dawdle."""

    delays: random.Random
    most_seconds: float

    def pause(self) -> None:
        # A call has as many pauses as ranks, and any of them delays all.
        if self.delays.random() < 0.5 / self.world:
            time.sleep(self.delays.uniform(0, self.most_seconds))

    def begin(self, call: tuple[int, ...]) -> int:
        self.pause()
        generation = super().begin(call)
        offset = self._data_offset + generation * self.generation_bytes
        self.memory.bytes_of(self.rank, offset, self.generation_bytes)[:] = _NAN_BYTE * self.generation_bytes
        self.pause()
        return generation

    def wait(self, peer: int, generation: int, call: tuple[int, ...]) -> None:
        super().wait(peer, generation, call)
        self.pause()


class LateSignals(Signals):
    """Signals that come some time after the data."""

    arena: HostileArena

    def notify(self, peer: int, epoch: int) -> None:
        self.arena.pause()
        super().notify(peer, epoch)


def make_hostile(arena: Arena, seed: int, kind: type[HostileArena] = HostileArena, most_seconds: float = 2e-3) -> None:
    """Turn an arena into a hostile one; the delays are drawn from `seed` and the rank."""
    arena.__class__ = kind
    assert isinstance(arena, HostileArena)
    arena.delays, arena.most_seconds = random.Random(1000 * seed + arena.rank), most_seconds
    arena.signals.__class__ = LateSignals
    arena.signals.arena = arena  # type: ignore[attr-defined]


def hostile_communicator(
    group: ProcessGroup,
    arena_bytes: int,
    seed: int = 0,
    *,
    kind: type[HostileArena] = HostileArena,
    timeout_seconds: float = PATIENT_SECONDS,
    first_epoch: int = 0,
    most_seconds: float = 2e-3,
) -> Communicator:
    """A communicator over a hostile arena, or over collectives where `arena_bytes` is 0.

    A bound that is the thing under test is reached by standstill.py's clock.
    """
    comm = Communicator(group)
    if arena_bytes and comm.size > 1:
        comm.arena = Arena.open(group, arena_bytes, timeout_seconds=timeout_seconds, first_epoch=first_epoch)
        make_hostile(comm.arena, seed, kind, most_seconds)
    return comm


@dataclass(frozen=True)
class Case:
    """A call of one operator; `widths` are the F_i of all_gather_matmul, else (F/tp,)."""

    operator: str
    num_tokens: int
    dim: int = 5
    widths: tuple[int, ...] = (7,)
    dtype: torch.dtype = torch.float32
    biased: bool = False
    keep_gathered: bool = True
    return_gathered: bool = False
    strided: bool = False


def integers(seed: str, shape: tuple[int, int], case: Case) -> Tensor:
    """A matrix of small integers; with `case.strided` no two of its elements are neighbours in memory."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(32))
    if case.strided:
        return torch.randint(-2, 3, (shape[1], 2 * shape[0]), generator=generator).to(case.dtype)[:, ::2].T
    return torch.randint(-2, 3, shape, generator=generator).to(case.dtype)


@dataclass
class Inputs:
    """One rank's inputs of a case, and the gradients of its outputs."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    dys: list[Tensor]

    def leaves(self) -> list[Tensor]:
        return [self.x, *self.weights, *self.biases]


def inputs_of(case: Case, rank: int, world: int) -> Inputs:
    tokens, dim = case.num_tokens, case.dim
    rows = shard_rows(tokens, world, rank)
    own = rows.stop - rows.start
    at = f"{case.operator} {tokens} {rank}"
    if case.operator == "all_gather_matmul":
        x = integers(f"x {at}", (own, dim), case)
        weights = [integers(f"w{i} {at}", (width, dim), case) for i, width in enumerate(case.widths)]
        biases = [integers(f"b{i} {at}", (1, width), case)[0] for i, width in enumerate(case.widths)]
        dys = [integers(f"dy{i} {at}", (tokens, width), case) for i, width in enumerate(case.widths)]
        if case.return_gathered:
            dys.append(integers(f"dx {at}", (tokens, dim), case))
    else:
        x = integers(f"x {at}", (tokens, case.widths[0]), case)
        weights = [integers(f"w {at}", (dim, case.widths[0]), case)]
        biases = [integers("b", (1, dim), case)[0]]  # equal on all ranks
        if case.operator == "matmul_reduce_scatter":
            dys = [integers(f"dy {at}", (own, dim), case)]
        else:
            dys = [integers("dy", (tokens, dim), case)]  # equal on all ranks
    return Inputs(x, weights, biases if case.biased else [], dys)


def results(case: Case, comm: Communicator, mine: Inputs | None = None) -> list[Tensor]:
    """This rank's outputs, then its gradients: of x, of each weight, of each bias."""
    mine = inputs_of(case, comm.rank, comm.size) if mine is None else mine
    leaves = [leaf.detach().requires_grad_() for leaf in mine.leaves()]
    x, weights, biases = leaves[0], leaves[1 : 1 + len(mine.weights)], leaves[1 + len(mine.weights) :]
    if case.operator == "all_gather_matmul":
        outputs: Sequence[Tensor] = all_gather_matmul(
            x,
            weights,
            comm,
            biases=biases or None,
            num_tokens=case.num_tokens,
            keep_gathered=case.keep_gathered,
            return_gathered=case.return_gathered,
        )
    else:
        operator = {"matmul_reduce_scatter": matmul_reduce_scatter, "matmul_all_reduce": matmul_all_reduce}
        outputs = [operator[case.operator](x, weights[0], comm, bias=biases[0] if biases else None)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, mine.dys)]


def expected(case: Case, rank: int, world: int) -> list[Tensor]:
    """What `results` must be: the specification on all ranks' inputs in float64, differentiated by autograd."""
    everyone = [inputs_of(case, other, world) for other in range(world)]
    for inputs in everyone:
        inputs.x, *rest = [leaf.double().detach().requires_grad_() for leaf in inputs.leaves()]
        inputs.weights, inputs.biases = rest[: len(inputs.weights)], rest[len(inputs.weights) :]
    if case.operator != "all_gather_matmul":
        for inputs in everyone:  # one bias, of which every rank has a copy
            inputs.biases = everyone[rank].biases
    xs = [inputs.x for inputs in everyone]
    bias = everyone[rank].biases[0] if case.biased else None
    weights = [inputs.weights[0] for inputs in everyone]
    outputs: list[list[Tensor]]
    if case.operator == "all_gather_matmul":
        outputs = [
            all_gather_matmul_reference(xs, inputs.weights, inputs.biases)
            + ([torch.cat(xs)] if case.return_gathered else [])
            for inputs in everyone
        ]
        heard = range(world)
    elif case.operator == "matmul_reduce_scatter":
        outputs = [[matmul_reduce_scatter_reference(xs, weights, other, bias)] for other in range(world)]
        heard = range(world)
    else:
        outputs = [[matmul_all_reduce_reference(xs, weights, bias)]] * world
        heard = range(1)  # dy is the gradient of the one result that all ranks hold
    ys = [y for other in heard for y in outputs[other]]
    dys = [dy.double() for other in heard for dy in everyone[other].dys]
    leaves = everyone[rank].leaves()
    exact = [*(y.detach() for y in outputs[rank]), *torch.autograd.grad(ys, leaves, dys)]
    assert all(t.abs().max() <= _EXACT[case.dtype] for t in exact if t.numel()), f"{case} is not exact in its dtype"
    return [t.to(case.dtype) for t in exact]


def differences(case: Case, comm: Communicator) -> str:
    """Where this rank's results differ from the specification in any bit; empty if nowhere."""
    got, want = results(case, comm), expected(case, comm.rank, comm.size)
    assert len(got) == len(want)
    wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a.dtype != b.dtype or not torch.equal(a, b)]
    return f"rank {comm.rank} of {comm.size}: results {wrong} of {case}" if wrong else ""


def cases(token_counts: Sequence[int], **changes: object) -> list[Case]:
    """Every operator with every option, over these numbers of tokens."""
    found: list[Case] = []
    for tokens in token_counts:
        for options in (
            {"operator": "all_gather_matmul"},
            {"operator": "all_gather_matmul", "widths": (7, 1), "biased": True, "return_gathered": True},
            {"operator": "all_gather_matmul", "widths": (3, 5, 9), "biased": True, "keep_gathered": False},
            {"operator": "matmul_reduce_scatter"},
            {"operator": "matmul_reduce_scatter", "biased": True},
            {"operator": "matmul_all_reduce"},
            {"operator": "matmul_all_reduce", "biased": True},
        ):
            found.append(Case(**{"num_tokens": tokens, **options, **changes}))  # type: ignore[arg-type]
    return found
