"""Which operators the actions of another engine's chunk have: ours (modelled/chunk.py), and its own besides."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.planner.published.engine import Engine
from benchmarks.planner.published.operators import EngineAttention, EngineOperators
from tpengine.config import Config
from tpengine.layout.step_plan import Layout
from tpengine.plan import Chunk, Kind, Plan, Recompute
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.chunk import ChunkActions, TimedHalf
from tpengine.planner.modelled.costs import machine_of_ranks, seconds_of_chunks
from tpengine.planner.modelled.operators import ActionSeconds, KnownSums, OperatorSum


def engine_seconds(
    config: Config, layout: Layout, plan: Plan, machine: Machine, engine: Engine
) -> dict[tuple[Kind, int], ActionSeconds]:
    """Return what `action_seconds` does, of another engine.

    Args:
        config, layout, plan, machine: as for `action_seconds`.
        engine: what it does differently from ours.
    """
    operators = EngineOperators(config, layout.tp, machine_of_ranks(config, layout, plan, machine), engine)
    known: KnownSums = {}

    def of_chunk(chunk: Chunk, is_first: bool, is_last: bool) -> Mapping[Kind, ActionSeconds]:
        return EngineChunk(operators, config, chunk, is_first, is_last, known).by_kind()

    return seconds_of_chunks(config, plan, of_chunk)


class EngineChunk(ChunkActions):
    """One chunk's actions on one tp rank of another engine.

    Args:
        operators: of the rank.
        config, chunk, is_first, is_last, known: as for ours.
    """

    def __init__(
        self,
        operators: EngineOperators,
        config: Config,
        chunk: Chunk,
        is_first: bool,
        is_last: bool,
        known: KnownSums,
    ) -> None:
        super().__init__(operators, config.model, chunk, is_first, is_last, known)
        self.own, self.engine, self.attention = operators, operators.engine, EngineAttention(operators)
        assert len(self.blocks) <= 1, "the blocks of a published model must be alike: one has a window"

    def again(self, attention: OperatorSum, blocks: OperatorSum, forward: OperatorSum) -> OperatorSum:
        """Return what backward computes again: parts of forward, or of each block what the engine does not keep."""
        if self.chunk.recompute is not Recompute.NONE:
            return super().again(attention, blocks, forward)
        if self.engine.computes_half_again:
            return self._half_of_block() * self.num_blocks
        return self.attention.attend() * self.num_blocks if self.engine.computes_scores_again else OperatorSum()

    def _half_of_block(self) -> OperatorSum:
        """Return what selective checkpointing by operator computes again of one block.

        Of the products q, k, v, attention's output, gate, up, down every second is: k, attention's output, up. Gathers
        are made again, scatters and attention are not.
        """
        operators, size = self.own, self.own.size
        parts = (
            operators.norm(self.model_ends.norm),
            operators.norm(self.model_ends.norm, residual=True),
            operators.by_columns(size.kv_heads * size.head_size, 1),
            operators.rope(),
            operators.by_rows(size.heads * size.head_size, 0),
            operators.by_columns(size.ffn, 1),
            operators.activation(),
            operators.steps(),
        )
        return sum(parts, OperatorSum())

    def unpacked_weights(self) -> OperatorSum:
        """Return the copies of gathered weights out of their buffer."""
        return self.own.copied_weights() * self.num_blocks

    def first_half(self, half: TimedHalf) -> OperatorSum:
        """Return the attention half of a block forward; what is behind its last product may be a kernel."""
        operators = self.own
        qkv, output, _, _ = operators.products(1)
        norm = operators.norm(half.norm, residual=self.leaves_sums)
        return norm + qkv + operators.rope() + self.attention.attend() + output + operators.dropped()

    def later_half(self, half: TimedHalf) -> OperatorSum:
        """Return the feed-forward half of a block forward; a norm may not add the residual."""
        operators = self.own
        _, _, gate_up, down = operators.products(1)
        return (
            gate_up
            + down
            + operators.norm(half.norm, residual=self.engine.joins_residuals)
            + operators.activation()
            + operators.dropped()
            + operators.steps()
        )

    def input_half_of_block(self, halves: tuple[TimedHalf, ...]) -> OperatorSum:
        """Return the input half of a block's backward."""
        operators = self.own
        between = (
            operators.rope(backward=True)
            + self.attention.attend(backward=True)
            + operators.norm(halves[0].norm, backward=True)
            + operators.norm(halves[1].norm, residual=True, backward=True)
            + operators.activation(backward=True)
            + operators.dropped() * 2
            + operators.norms_again()
            + operators.steps(backward=True)
            + operators.gate_apart()
        )
        return sum((between, *operators.products(1, "input_gradient")), OperatorSum())

    def weight_half_of_block(self, halves: tuple[TimedHalf, ...], rows_again: int) -> OperatorSum:
        """Return the weight half of a block's backward; a kernel may add to the gradients of other micro-batches."""
        qkv, _, gate_up, _ = self.own.products(self.columns_again, "weight_gradient")
        _, output, _, down = self.own.products(rows_again, "weight_gradient")
        return sum((qkv, output, gate_up, down), OperatorSum()) + self.own.added_gradients()

    def ends(self) -> OperatorSum:
        """Return what is before the first block and behind the last, with all logits and a loss step by step."""
        total = super().ends()
        if self.is_last:
            total += self.own.gathered_logits() + self.own.wide_loss()
        return total

    def input_half_of_ends(self) -> OperatorSum:
        """Return the gradients of the ends, with a loss step by step."""
        total = super().input_half_of_ends()
        if self.is_last:
            total += self.own.wide_loss(backward=True)
        return total
