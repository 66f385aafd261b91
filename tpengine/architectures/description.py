"""What an architecture is: the parts of its blocks and their order, the table of its parameters, its numbers.

A file of this folder, or one of a user's (`--model.architecture FILE.py`), ends with

    ARCHITECTURE = Architecture("Qwen3ForCausalLM", table=..., block=..., numbers=...)

A part (part.py; norm.py, attention.py, feed_forward.py) says which parameters it has, what it computes and what it
keeps; model/parts.py makes the layer that computes it. No torch: the plan counts bytes with it.

How the parts of a block are put together:

    pre_norm         x = x + attention(norm(x));         y = x + mlp(norm(x))
    sandwich_norm    x = x + norm(attention(norm(x)));   y = x + norm(mlp(norm(x)))
    reordered_norm   x = x + norm(attention(x));         y = x + norm(mlp(x))

A block computes these in methods of its own (model/block.py). Any other order is a function of a block, of
x[T/tp, D], this rank's tokens, and of `seq`, the length of their sequences, or the documents that they are, which is
only handed on. It gets a tensor and returns one, calls the block's parts by their names, and may be written with `+`
alone. Plain Python over tensors: it works in fast and in exact mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tpengine.architectures.config_json import ConfigJson
from tpengine.architectures.ends import Ends
from tpengine.architectures.norm import NoNorm, Norm
from tpengine.architectures.part import Part
from tpengine.architectures.table import Table
from tpengine.config import ModelConfig


@dataclass(frozen=True)
class Half:
    """A part of a block with its norms: it adds behind(part(norm(x))) to x.

    Attributes:
        norm: of the part's input; where none stands before a part it is the one of the part before, counted again, or
            NoNorm where all are behind.
        name: of the part in its block.
        part: what it is.
        behind: norms of what it adds.
    """

    norm: Norm
    name: str
    part: Part
    behind: tuple[Norm, ...] = ()

    @property
    def changes_output(self) -> bool:
        """Return whether what is added is not the part's output itself, so that their gradients are two tensors."""
        return bool(self.behind) or self.part.residual_scale != 1.0


def halves_of(block: Mapping[str, Part], *, all_behind: bool = False) -> tuple[Half, ...]:
    """Return the halves of a block: of the norms between two parts the last is the next part's, unless `all_behind`."""
    halves: list[Half] = []
    norms: list[Norm] = []
    for name, part in block.items():
        if isinstance(part, Norm):
            norms.append(part)
            continue
        own: Norm = NoNorm()
        if not all_behind:
            own = norms.pop() if norms else halves[-1].norm if halves else Norm()
        if halves:
            halves[-1] = replace(halves[-1], behind=tuple(norms))
        halves.append(Half(own, name, part))
        norms = []
    if halves:
        halves[-1] = replace(halves[-1], behind=tuple(norms))
    return tuple(halves)


class OrderedBlock(Protocol):
    """What an order may call of its block, besides its parts; `Any` stands for tensors, since no file here needs torch.

    attend, feed    its attention and its feed-forward network, with what belongs behind them (bias of the output,
                    dropout)
    normed          (norm(x), x)
    normed_sum      (norm(x + branch), x + branch), in one pass
    left            x + branch
    again           runs a function so that backward can compute it once more (`--parallel.recompute attention`)
    """

    def in_order(self, x: Any, seq: Any, order: Order | None = None) -> Any: ...
    def attend(self, x: Any, seq: Any) -> Any: ...
    def feed(self, x: Any) -> Any: ...
    def normed(self, norm: Any, x: Any) -> tuple[Any, Any]: ...
    def normed_sum(self, norm: Any, x: Any, branch: Any) -> tuple[Any, Any]: ...
    def left(self, x: Any, branch: Any) -> Any: ...
    def again(self, forward: Callable[..., Any], *inputs: Any) -> Any: ...


Order = Callable[[OrderedBlock, Any, Any], Any]


def pre_norm(block: OrderedBlock, x: Any, seq: Any) -> Any:
    """x = x + attention(norm(x));  y = x + mlp(norm(x))."""
    return block.in_order(x, seq, pre_norm)


def sandwich_norm(block: OrderedBlock, x: Any, seq: Any) -> Any:
    """x = x + norm(attention(norm(x)));  y = x + norm(mlp(norm(x)))."""
    return block.in_order(x, seq, sandwich_norm)


def reordered_norm(block: OrderedBlock, x: Any, seq: Any) -> Any:
    """x = x + norm(attention(x));  y = x + norm(mlp(x)), as OLMo 2 and 3."""
    return block.in_order(x, seq, reordered_norm)


def _plain_ends(_: ModelConfig) -> Ends:
    return Ends()


@dataclass(frozen=True)
class Architecture:
    """One kind of transformer.

    Attributes:
        name: as `architectures` in config.json has it.
        table: a rule for each parameter.
        block: the parts of a model's layer number i, by name, in the order of their use.
        numbers: config.json -> the model.
        order: how a block's parts are put together: pre_norm, sandwich_norm, reordered_norm, or one of your own.
        ends: what stands before and behind the blocks.
        prefix: what the names in the files begin with, the output head's apart.
        undecayed: patterns of names (our names, as fnmatch has them) of matrices that weight decay passes over, such as
            "embed_*". Norm weights and biases never decay.
    """

    name: str
    table: Table
    block: Callable[[ModelConfig, int], Mapping[str, Part]]
    numbers: Callable[[ConfigJson], ModelConfig]
    order: Order = pre_norm
    ends: Callable[[ModelConfig], Ends] = _plain_ends
    prefix: str = "model."
    undecayed: tuple[str, ...] = ()
