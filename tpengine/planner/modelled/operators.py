"""What single operators of parts take on a tp rank: products with their exchanges, kernels, exchanges. No torch.

An exchange belongs to the operator that gathers its input or scatters its output. Where they are fused, both take the
longer of their times; else their sum. So an action knows which part of it is an exposed exchange. Which
operators a chunk's actions have is in chunk.py; seconds are added up, by cause, in `OperatorSum` and `ActionSeconds`.

Attention is one kernel, over whole sequences or their documents. Packed documents do not see each other, so what
attention computes of a micro-batch depends on their lengths (architectures/attention.py): a document of n tokens has
n (n + 1) / 2 pairs of a query and a key. So of two micro-batches with equally many tokens one may cost many times as
much as the other: in a pipeline every stage waits for the dearest.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from tpkernels.work import Work

from tpengine.architectures.norm import Norm
from tpengine.architectures.part import Exchange, Operator, Packed, Product, Sizes
from tpengine.config import Config
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.caches import prepares


@dataclass(frozen=True)
class ActionSeconds:
    """What a compute action takes, by cause; the parts add up to the whole.

    Attributes:
        compute: operators that a plain forward and backward have.
        again: operators that backward runs a second time.
        exchange: of tensor-parallel ranks, as far as no operator hides it.
        host: starting operators, as far as it takes longer than they do.
        exact: what exact mode takes longer: smaller products, exchanges that nothing hides and whose partial sums are
            wide, and sums in trees.
    """

    compute: float = 0.0
    again: float = 0.0
    exchange: float = 0.0
    host: float = 0.0
    exact: float = 0.0

    @property
    def total(self) -> float:
        """Return how long the action occupies its rank."""
        return self.compute + self.again + self.exchange + self.host + self.exact

    def __mul__(self, times: float) -> ActionSeconds:
        return ActionSeconds(*(times * part for part in astuple(self)))


@dataclass(frozen=True)
class OperatorSum:
    """Operators that run one after another.

    Attributes:
        operators: their seconds.
        exchanges: seconds of exchanges that none of them hides.
        number: how many there are, each of which the host starts.
    """

    operators: float = 0.0
    exchanges: float = 0.0
    number: int = 0

    def __add__(self, other: OperatorSum) -> OperatorSum:
        return OperatorSum(
            self.operators + other.operators, self.exchanges + other.exchanges, self.number + other.number
        )

    def __mul__(self, times: int) -> OperatorSum:
        return OperatorSum(self.operators * times, self.exchanges * times, self.number * times)


# What blocks and ends take, by what they depend on: chunks of one configuration have them in common.
KnownSums = dict[tuple[object, ...], OperatorSum]


class Operators:
    """A tp rank's operators for one micro-batch.

    Args:
        config, tp, machine: sizes, the number of tensor-parallel ranks, rates.
        shards: that the rank computes one after another, in exact mode; 0 in fast mode.
        packed: the documents of micro-batches, where attention does not cross them.
        load: as of Sizes.
    """

    def __init__(
        self,
        config: Config,
        tp: int,
        machine: Machine,
        shards: int = 0,
        packed: Packed | None = None,
        load: float = 1.0,
    ) -> None:
        self.tp, self.machine, self.shards = tp, machine, shards
        self.size = replace(self.size_of(config, tp), packed=packed, load=load)
        # Rows between products: each rank has its share of the tokens, gathered before a product, scattered behind it.
        self.rows = self.size.own_tokens
        self.dtype, self.is_fused = config.train.dtype, config.parallel.tp_comm == "fused" and not shards
        self.num_replicas, link = config.parallel.dp or 1, machine.link(tp, 1)
        exchanged = self.size.x * tp
        exchange_seconds = link.exchange_seconds if self.is_fused else link.gather_seconds
        self.exchange_seconds = exchange_seconds(exchanged, tp)
        # What a fused matmul takes longer, where it was measured: nothing of that is hidden.
        self.fused_seconds = link.fused_seconds(exchanged, tp) if self.is_fused else None
        # Weights are converted once per step for the products of a CPU (Trainer); ZeRO's come and go.
        self.prepares = prepares(config, machine)

    def size_of(self, config: Config, tp: int) -> Sizes:
        """Return the sizes of a block on one of `tp` ranks."""
        return Sizes.of(config, tp)

    def operator(self, operator: Operator) -> OperatorSum:
        """Return what an operator of a part takes, a product in forward."""
        match operator:
            case Product():
                return self.product(operator, 1)
            case Exchange():
                return OperatorSum(exchanges=self._exchanged(operator))
        if operator.seq:
            seconds = self.machine.attention_seconds(operator.work, self.dtype, seq=operator.seq, name=operator.name)
            return OperatorSum(seconds, 0.0, 1)
        if operator.exchanges:
            seconds = self.machine.other_seconds(operator.work, self.dtype, operator.name)
            return self._with_exchanges(seconds, operator.exchanges)
        return self.others(operator.work, name=operator.name)

    def _exchanged(self, exchange: Exchange) -> float:
        """Return the seconds of an exchange among the ranks of its axes, as the links have them."""
        sizes = {"tp": self.tp, "dp": self.num_replicas, "ep": self.size.ep}
        num = math.prod(sizes.get(axis, 1) for axis in exchange.over)
        link = self.machine.link(num, self.tp if exchange.over == ("dp",) else 1)
        seconds = link.exchange_seconds if self.is_fused else link.gather_seconds
        return seconds(exchange.num_bytes, num)

    def others(self, *works: Work, name: str = "") -> OperatorSum:
        """Return kernels that are no products: by their rate under `name` where it was measured, else by their bytes.

        Args:
            works: of each kernel.
            name: of the operator among the machine's rates.
        """
        seconds = sum(self.machine.other_seconds(work, self.dtype, name) for work in works)
        return OperatorSum(seconds, 0.0, len(works))

    def product(self, product: Product, exchanges: int, kind: str = "forward") -> OperatorSum:
        """Return a product with a weight whose columns or inner dimension the ranks share, and a rank's shards.

        Args:
            product: of a part.
            exchanges: of the product, unless its part exchanges by itself.
            kind: forward, input_gradient or weight_gradient.
        """
        rows, num, cut = product.rows or self.size.tokens, max(1, self.shards), product.cut
        batch, exchanges = product.num_weights, exchanges * product.exchanged
        rows = -(-rows // batch)
        if num == 1:
            return self._matmul(rows, product.columns, product.inner, exchanges, kind, batch)
        columns = -(-product.columns // num) if cut == "columns" else product.columns
        inner = -(-product.inner // num) if cut == "inner" else product.inner
        once = self._matmul(rows, columns, inner, 0, kind, batch)
        return once * num + OperatorSum(exchanges=exchanges * self.exchange_seconds)

    def tree(self) -> OperatorSum:
        """Return what a scatter of partial sums [T, D] takes longer in exact mode: it is wide, and adds in a tree.

        A rank reads two and writes one for each sum of its own shards, and of the ranks' sums for its tokens.
        """
        if not self.shards:
            return OperatorSum()
        size, elements = self.size, self.size.tokens * self.size.hidden
        num_sums = (self.shards - 1) + (self.tp - 1) / self.tp
        added = Work(int(num_sums * elements), int(num_sums * 3 * elements * size.wide))
        return self.others(added) + OperatorSum(exchanges=(size.wide / size.item - 1) * self.exchange_seconds)

    def norm(self, norm: Norm, *, residual: bool = False, backward: bool = False) -> OperatorSum:
        """Return a norm, or its gradients; with `residual` of x and what it is added to."""
        return self.operator(norm.kernel(self.size, residual=residual, backward=backward))

    @property
    def knows_additions(self) -> bool:
        """Return whether the additions of residuals that no norm is known to make are counted: where a rate is."""
        return self.dtype in self.machine.measured

    @property
    def leaves_sums(self) -> bool:
        """Return whether a block's last sum is the next norm's (model/block.py): on a GPU, in fast mode.

        On a CPU a norm makes it too, in a pass of its own.
        """
        return self.knows_additions and not self.shards and self.machine.is_asynchronous

    def added(self) -> OperatorSum:
        """Return the addition of a residual that no norm takes over, where its rate was measured."""
        elements = self.rows * self.size.hidden
        work = Work(elements, 3 * elements * self.size.item)
        return self.others(work, name="add") if self.knows_additions else OperatorSum()

    def _matmul(self, rows: int, columns: int, inner: int, exchanges: int, kind: str, batch: int = 1) -> OperatorSum:
        # The weights of several are read as they lie.
        of = f"prepared_{kind}" if self.prepares and kind != "weight_gradient" and batch == 1 else kind
        seconds = self.machine.product_seconds(rows, columns, inner, self.size.item, self.dtype, batch=batch, kind=of)
        return self._with_exchanges(seconds, exchanges)

    def _with_exchanges(self, seconds: float, exchanges: int) -> OperatorSum:
        """Return an operator with its exchanges, which overlap with it where they are fused."""
        if self.fused_seconds is not None:
            return OperatorSum(seconds, exchanges * self.fused_seconds, 1)
        links = exchanges * self.exchange_seconds
        return OperatorSum(seconds, max(0.0, links - seconds) if self.is_fused else links, 1)
