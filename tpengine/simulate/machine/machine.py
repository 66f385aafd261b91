"""A machine as the planner sees it: what one rank computes, reads and sends in a second, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpkernels.work import Work

from tpengine.simulate.machine.curve import Curve
from tpengine.simulate.machine.link import Link


@dataclass(frozen=True)
class Machine:
    """Rates of one rank (a GPU, or a CPU core), and the links of all.

    Peaks are a data sheet's; curves say which share of them is attained. So a machine of which only the data sheet is
    known differs from a measured one by its curves alone.

    Attributes:
        name: as the user writes it.
        source: where the numbers come from, in words.
        is_asynchronous: kernels run behind the host (a GPU); else the host's time is added to theirs.
        flops_per_s: peak of matmuls by dtype.
        matmul, attention: shares of that peak by the floating-point operations of one call.
        memory_bytes_per_s: peak, read and written.
        memory: share of that peak by the bytes of one call.
        kernel_s: what each operator takes besides: launch, first and last wave.
        host_s_per_operator, host_s_per_action: the host's time to start an operator, and an action of the plan.
        ranks_per_node: how many ranks `within` connects; ranks of several nodes are connected by `between`, of which
            each rank has its own, and which all ranks of a node may use at once.
        within, between: links.
        memory_bytes: of one rank; 0 where that is not limited.
        num_nodes: nodes that there are; 0 where that is not said.
    """

    name: str
    source: str
    is_asynchronous: bool
    flops_per_s: Mapping[str, float]
    matmul: Curve
    attention: Curve
    memory_bytes_per_s: float
    memory: Curve
    kernel_s: float
    host_s_per_operator: float
    host_s_per_action: float
    ranks_per_node: int
    within: Link
    between: Link
    memory_bytes: int = 0
    num_nodes: int = 0

    def matmul_seconds(self, work: Work, dtype: str) -> float:
        """Return the time of a matmul: of its operations or of its bytes, whichever is longer."""
        return self._longer(work, self.peak(dtype) * self.matmul.at(max(1, work.flops)))

    def attention_seconds(self, work: Work, dtype: str) -> float:
        """Return the time of attention, forward or backward."""
        return self._longer(work, self.peak(dtype) * self.attention.at(max(1, work.flops)))

    def other_seconds(self, work: Work, dtype: str) -> float:
        """Return the time of an operator that reads and writes more than it computes."""
        return self._longer(work, self.peak(dtype))

    def peak(self, dtype: str) -> float:
        """Return the operations per second of a dtype.

        Raises:
            ValueError: the machine does not say it.
        """
        if dtype not in self.flops_per_s:
            known = ", ".join(self.flops_per_s)
            raise ValueError(
                f"a machine must have a rate for the run's dtype: {self.name} has {known}: got {dtype}: use one of "
                "these, or add the rate to the machine's file"
            )
        return self.flops_per_s[dtype]

    def link(self, num_ranks: int, stride: int) -> Link:
        """Return what connects `num_ranks` ranks whose numbers are `stride` apart.

        If they are on several nodes, the node's members of such a group share its way out: with g of them on a node, a
        ring has g ranks' links to the next node.
        """
        if (num_ranks - 1) * stride < self.ranks_per_node:
            return self.within
        members = max(1, self.ranks_per_node // stride)
        ring = min(self.within.ring_bytes_per_s, members * self.between.ring_bytes_per_s)
        return replace(self.between, ring_bytes_per_s=ring if members > 1 else self.between.ring_bytes_per_s)

    def _longer(self, work: Work, flops_per_s: float) -> float:
        bandwidth = self.memory_bytes_per_s * self.memory.at(max(1, work.memory_bytes))
        return max(work.flops / flops_per_s, work.memory_bytes / bandwidth) + self.kernel_s
