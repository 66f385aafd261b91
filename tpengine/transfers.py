"""Pipeline transfers: posts the plan's sends and receives, waits where the plan says so.

Everything is asynchronous between post and wait. A receive lands in the static slot the plan's live ranges give it;
slots are separate tensors (slices of one would share autograd's version counter) and are reused only when no live
micro-batch needs them, which the verifier has proved. Over gloo, tensors of a GPU are staged through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpengine.plan import Action, Kind, Plan, TensorSpec, receive_slots
from tpengine.plan.actions import RECEIVES


class Transfers:
    """The transfers of one pipeline rank for one plan.

    Args:
        plan: the verified plan.
        stage: this rank's place in the pipeline.
        group: the pipeline's ranks, in stage order.
        fetch: action -> tensor to send.
        deliver: (action, tensor) -> None, called when a receive is waited for; the tensor is a slot.
        device: where tensors live.

    Memory: the receive slots, whose number follows from the plan, and the tensors being sent.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        group: ProcessGroup,
        fetch: Callable[[Action], Tensor],
        deliver: Callable[[Action, Tensor], None],
        device: torch.device,
    ) -> None:
        self._plan, self._group, self._device = plan, group, device
        self._fetch, self._deliver = fetch, deliver
        self._staged = device.type == "cuda" and dist.get_backend(group) == "gloo"
        self._slot_numbers = receive_slots(plan.actions[stage])
        self._slots: dict[tuple[Kind, int, TensorSpec], Tensor] = {}
        self._pending: dict[Action, tuple[Any, Tensor]] = {}

    def post(self, action: Action) -> None:
        """Start a send, a receive, or all transfers of an exchange together."""
        operations = []
        tensors = []
        for transfer in action.transfers:
            receives = transfer.kind in RECEIVES
            tensor = self._slot(transfer) if receives else self._to_link(self._fetch(transfer))
            tensors.append(tensor)
            operations.append(
                dist.P2POp(
                    dist.irecv if receives else dist.isend,
                    tensor,
                    group=self._group,
                    group_peer=self._plan.peer(transfer),
                )
            )
        works = dist.batch_isend_irecv(operations)
        # NCCL returns one work for the whole batch, gloo one for each operation.
        shared = works * len(operations) if len(works) == 1 else works
        for transfer, work, tensor in zip(action.transfers, shared, tensors, strict=True):
            self._pending[transfer] = (work, tensor)

    def wait(self, transfer: Action) -> None:
        """Wait for one transfer; a received tensor is delivered, a sent one let go."""
        work, tensor = self._pending.pop(transfer)
        work.wait()
        if transfer.kind in RECEIVES:
            self._deliver(transfer, tensor.to(self._device) if self._staged else tensor)

    def _to_link(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._staged else tensor.contiguous()

    def _slot(self, receive: Action) -> Tensor:
        spec = self._spec(receive)
        key = (receive.kind, self._slot_numbers.slot(receive), spec)
        if key not in self._slots:
            device = torch.device("cpu") if self._staged else self._device
            self._slots[key] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        return self._slots[key]

    def _spec(self, receive: Action) -> TensorSpec:
        chunk = self._plan.chunks[receive.piece[0]]
        spec = chunk.input if receive.kind is Kind.RECV_F else chunk.output
        assert spec is not None, f"{receive}: the chunk has nothing to receive"
        return spec
