"""What a rank does before it posts its first receive over NCCL: connect to its peers, and load every kernel of a step.

Two things of a first step may wait for the whole GPU, or for another rank, where nobody expects it:

    connections    NCCL connects two ranks when the first transfer between them is posted, and that blocks the host
                   until the peer has posted one too. A receive that is posted early would block before the send that
                   the peer waits for.
    kernels        CUDA loads a kernel when it is first launched, and loading may wait for all that runs on the device.
                   A receive that has been posted runs until its message arrives. If the message depends on what this
                   rank has yet to launch, neither ends.

So `connect` exchanges one number with every peer, in one group call for each direction. And `preload` runs the rank's
list of actions once, without its transfers: small numbers stand for what would be received. This launches every kernel
that the step launches while receives are posted, with the same shapes (but for experts' rows), gathers and reductions,
whatever the schedule, ZeRO or exact mode do. The caller discards the gradients. Rows of experts that go into buffers
and rows at their exact number have kernels of their own: before a step first changes over, its caller does it again.

What is left: the clipping and the update, which come when every receive has been waited for. And evaluation, whose
messages go in one direction only: a rank that waits for the device waits for ranks before it, never in a circle.

The decision a reader will question: a whole step is computed for nothing, once a run. A list of kernels would have to
know what cuBLAS and torch launch; a part of the list would miss what only the last micro-batch does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpengine.pipeline.executor import Handler
from tpengine.pipeline.stage import Stage
from tpengine.pipeline.transfers import direction_groups
from tpengine.plan import Action, Kind, Plan, TensorSpec
from tpengine.plan.actions import ACTIVATIONS, INPUT_GRADIENT, TRANSFERS

# They come after the last receive of a step.
_LATER = frozenset({Kind.TIE_REDUCE, Kind.CLIP, Kind.STEP})


def must_preload(group: ProcessGroup) -> bool:
    """Return whether a pipeline over `group` needs `connect` and `preload`: over NCCL, between several ranks."""
    return dist.get_world_size(group) > 1 and dist.get_backend(group) == "nccl"


def connect(
    plan: Plan, stage: int, group: ProcessGroup, device: torch.device, backward: ProcessGroup | None = None
) -> None:
    """Exchange one number with every rank that this rank has transfers with; collective over the pipeline.

    Each direction is connected by itself, activations first: they may have a communicator each.

    Args:
        plan: the verified plan.
        stage: this rank's place in the pipeline.
        group: the pipeline's ranks, in stage order.
        device: where the group's tensors live.
        backward: the same ranks again, to carry gradients; default `group`.
    """
    groups = direction_groups(group, backward)
    for kinds in (ACTIVATIONS, TRANSFERS - ACTIVATIONS):
        peers = sorted({plan.peer(action) for action in plan.actions[stage] if action.kind in kinds})
        operations = []
        for peer in peers:
            for operation in (dist.isend, dist.irecv):
                number = torch.zeros(1, device=device)
                operations.append(dist.P2POp(operation, number, group=groups[next(iter(kinds))], group_peer=peer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def preload(
    plan: Plan, stage: int, stages: Mapping[int, Stage], handlers: Mapping[Kind, Handler], device: torch.device
) -> None:
    """Run a rank's list without its transfers, so that every kernel of the step has been launched.

    Args:
        plan: the verified plan, of a training step.
        stage: this rank's place in the pipeline.
        stages: this rank's chunks, by number, with a batch to read.
        handlers: those of the step.
        device: where tensors live.

    The gradients and losses of this pass mean nothing: the caller clears them.
    """
    for action in without_transfers(plan.actions[stage]):
        forward, backward = action.kind is Kind.F, action.kind in INPUT_GRADIENT
        if not forward and not backward:
            handlers[action.kind](action)
            continue
        number, microbatch = action.piece
        chunk, own = plan.chunks[number], stages[number]
        # Something for what another rank would have sent; what this rank would send is dropped.
        if forward:
            if chunk.input is not None and number - 1 not in stages:
                own.receive_input(microbatch, _drawn(chunk.input, device))
            handlers[action.kind](action)
            if chunk.output is not None and number + 1 not in stages:
                own.take_output(microbatch)
        else:
            if chunk.output is not None and number + 1 not in stages:
                own.receive_output_grad(microbatch, _drawn(chunk.output, device))
            handlers[action.kind](action)
            if plan.gives_gradient(number) and number - 1 not in stages:
                own.take_input_grad(microbatch)


def without_transfers(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return a rank's list without sends, receives, the waits for them, and all that follows the last receive."""
    kept = []
    for action in actions:
        if action.kind is Kind.WAIT:
            subs = tuple(sub for sub in action.subs if sub.kind not in TRANSFERS)
            if subs:
                kept.append(Action(Kind.WAIT, subs=subs))
        elif action.kind not in TRANSFERS | _LATER:
            kept.append(action)
    return tuple(kept)


def _drawn(spec: TensorSpec, device: torch.device) -> Tensor:
    """Of zeros all scores of a router are equal: one rank's experts would get every row, and others launch nothing."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(spec.shape, dtype=getattr(torch, spec.dtype), device=device, generator=generator)
