"""A rank's control area and data as kernels of signals find them, set up as the host does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tpkernels.launch import jit, run, tl
from tpkernels.symmetric import signals_kernel as signals
from tpkernels.symmetric.device_clock import NS_PER_SECOND
from tpkernels.symmetric.memory import HostMemory
from tpkernels.symmetric.signals_kernel import begin, claim, control_at, end_launch, is_last_claim

# More than any test waits for in vain, and few enough to end a test that would hang.
LIMIT_NS = 100 * NS_PER_SECOND
CALL = 77
# What a rank sends to each, in one, two or four items.
NUM_ELEMENTS = 32
DATA_OFFSET = 1 << 14


class Area:
    """This rank's control area and two generations of data, as the host sets them up.

    Attributes:
        rank, world: as the group's.
        words: the control area, int32.
        record: what kernels tell this rank's host.
        data: [2, world, NUM_ELEMENTS], what each rank sends here.
    """

    def __init__(self, epoch: int = 0, limit_ns: int = LIMIT_NS) -> None:
        assert dist.group.WORLD is not None, "ranks of a pool have a group"
        self._memory = memory = HostMemory.allocate(dist.group.WORLD, 1 << 15)
        self.rank, self.world = memory.rank, memory.world
        self.words = memory.block(self.rank, 0, (signals.NUM_LINES * signals.LINE_WORDS,), torch.int32)
        self.record = torch.zeros(signals.LINE_WORDS, dtype=torch.int32)
        self.data = self.data_of(self.rank)
        self.data.fill_(torch.nan)
        flags = self.words[: signals.POISON * signals.LINE_WORDS].view(-1, signals.LINE_WORDS)
        flags[:, 0] = epoch
        state = self.line(signals.STATE)
        state[:4] = torch.tensor([epoch, -1, self.rank, self.world])
        state[signals.LIMIT_NS : signals.LIMIT_NS + 2].view(torch.int64).fill_(limit_ns)
        state[signals.NO_AND_YES + 1] = 1
        table = memory.block(self.rank, 4 * signals.TABLE * signals.LINE_WORDS, (signals.MAX_WORLD + 1,), torch.int64)
        table[: self.world] = torch.tensor(memory.addresses)
        table[-1] = self.record.data_ptr()
        dist.barrier()

    def line(self, number: int) -> Tensor:
        return self.words[number * signals.LINE_WORDS :][: signals.LINE_WORDS]

    def address_of(self, rank: int) -> int:
        return self._memory.addresses[rank]

    def data_of(self, rank: int) -> Tensor:
        return self._memory.block(rank, DATA_OFFSET, (2, self.world, NUM_ELEMENTS), torch.float32)

    @property
    def verdict(self) -> list[int]:
        return self.record[: signals.VERDICT_WORDS].tolist()

    @property
    def poison(self) -> list[int]:
        return self.line(signals.POISON)[: signals.VERDICT_WORDS].tolist()

    def launch(self, kernel: Any, *arguments: Any, programs: int = 1, **constants: Any) -> None:
        run(kernel, (programs,), self.address_of(self.rank), *arguments, num_warps=4, **constants)


@jit
def begin_kernel(control: tl.int64, generation: tl.tensor, call: tl.tensor, NEXT_MEETS: tl.constexpr = False) -> None:
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    item = claim(p_control)
    if is_last_claim(item, 0):
        end_launch(p_control, epoch, generation, NEXT_MEETS)
