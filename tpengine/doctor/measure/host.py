"""The host's time: of an operator in the engine's layers, and of an action between the executor and its stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.doctor.measure.clock import CallClock
from tpengine.layers.attention import Attention
from tpengine.layers.mlp import SwiGLU
from tpengine.layers.norm import RMSNorm
from tpengine.pipeline.executor import Executor
from tpengine.pipeline.stage import Stage
from tpengine.plan import Action, Kind

# Of a block, as the cost model counts them: forward norm, qkv, rotation, attention, output, norm, gate and up,
# activation, down, addition; backward the same, and four gradients of weights.
_OPERATORS = 10 + 14


class _Block(nn.Module):
    """A block of one head and a handful of features: its operators compute next to nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        comm, size = Communicator(None), 8
        self.norms = nn.ModuleList(RMSNorm(size, comm, device=device) for _ in range(2))
        self.attention, self.mlp = (
            Attention(size, 1, 1, comm, device=device),
            SwiGLU(size, size, comm, device=device),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        assert isinstance(second, RMSNorm)
        normed, x = second.add(self.attention(first(x), 2), x)
        y: Tensor = x + self.mlp(normed)
        return y


def seconds_per_operator(clock: CallClock) -> float:
    """Return the host's time of one operator of a block, forward or backward."""
    block = _Block(clock.device)
    times = clock.of_graph(lambda: torch.randn(2, 8, device=clock.device).requires_grad_(), block, 4, is_cold=False)
    return sum(times) / _OPERATORS


class _OneTensor:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def begin(self, microbatch: int) -> None:
        """See stage.Batch."""

    def tokens(self, microbatch: int) -> Tensor:
        """See stage.Batch."""
        return self.x

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """See stage.Batch."""
        return y.sum()


def seconds_per_action(clock: CallClock) -> float:
    """Return what an action takes whose stage computes nothing."""
    x = torch.ones(2, device=clock.device, requires_grad=True)
    stage = Stage(lambda x: x * 2.0, _OneTensor(x), is_first=True, is_last=True)
    handlers = {
        Kind.F: lambda action: stage.forward(action.piece[1]),
        Kind.B: lambda action: stage.backward(action.piece[1]),
    }
    executor = Executor(0, handlers)
    actions = [Action(kind, 0, number) for kind in (Kind.F, Kind.B) for number in range(8)]
    return clock.of_call([lambda: executor.run(actions)], is_cold=False) / len(actions)
