"""What an architecture is: the parts of its blocks and their order, the table of its parameters, its numbers.

A file of this folder, or one of a user's (`--model.architecture FILE.py`), ends with

    ARCHITECTURE = Architecture("Qwen3ForCausalLM", table=..., block=..., numbers=...)

A part says which parameters it has, of which shapes, in the order of their use in forward; model/parts.py makes the
layer that computes it. No torch: the plan counts bytes with it.

How the parts of a block are put together:

    pre_norm         x = x + attention(norm(x));         y = x + mlp(norm(x))
    sandwich_norm    x = x + norm(attention(norm(x)));   y = x + norm(mlp(norm(x)))

A block computes these two in methods of its own (model/block.py). Any other order is a function of a block, of
x[T/tp, D], this rank's tokens, and of `seq`, the length of their sequences, or the documents that they are, which is
only handed on. It gets a tensor and returns one, calls the block's parts by their names, and may be written with `+`
alone. Plain Python over tensors: it works in fast and in exact mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tpengine.architectures.config_json import ConfigJson
from tpengine.architectures.table import Table
from tpengine.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Norm:
    """A norm of each token.

    rms:         y = x / sqrt(mean(x^2) + eps) * w
    rms_offset:  the same, times 1 + w (Gemma)
    layer:       y = (x - mean(x)) / sqrt(var(x) + eps) * w + b
    """

    kind: Literal["rms", "rms_offset", "layer"] = "rms"

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part: those of a norm of x[T/tp, D]."""
        return self.over(model.hidden_size)

    def over(self, size: int) -> Shapes:
        """Return the parameters of a norm over `size` elements."""
        return {"weight": (size,), "bias": (size,)} if self.kind == "layer" else {"weight": (size,)}

    @property
    def first_weight(self) -> float:
        """The initial weight, with which the norm scales by one."""
        return 0.0 if self.kind == "rms_offset" else 1.0


@dataclass(frozen=True)
class Attention:
    """Causal self-attention over H query and G key and value heads of size E.

    Attributes:
        qkv_bias, output_bias: whether the projections have biases.
        head_norm: a norm of each head's queries and keys, before they are rotated.
        rotates: whether queries and keys are rotated by their positions.
        window: how many tokens back a query sees, its own included; 0 for all.
        rope_theta: base of the rotary frequencies; 0 for the model's, with the model's scaling.
        scale: of the scores; 0 for E^(-1/2).
    """

    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: Norm | None = None
    rotates: bool = True
    window: int = 0
    rope_theta: float = 0.0
    scale: float = 0.0

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part."""
        d, size = model.hidden_size, model.head_size
        rows = {"q": model.num_heads * size, "k": model.num_kv_heads * size, "v": model.num_kv_heads * size}
        shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": (n, d) for name, n in rows.items()}
        if self.qkv_bias:
            shapes |= {f"{name}_proj.bias": (n,) for name, n in rows.items()}
        if self.head_norm:
            shapes |= {f"{of}_norm.{name}": s for of in "qk" for name, s in self.head_norm.over(size).items()}
        shapes["o_proj.weight"] = (d, rows["q"])
        if self.output_bias:
            shapes["o_proj.bias"] = (d,)
        return shapes


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward network of width F.

    gated:  y = (act(x w_gate.T) * (x w_up.T)) w_down.T         otherwise:  y = act(x w_up.T + b_up) w_down.T + b_down
    """

    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    bias: bool = False

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the parameters by their names in the part."""
        d, f = model.hidden_size, model.ffn_size
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (f, d) for name in names}
        if self.bias:
            shapes |= {f"{name}.bias": (f,) for name in names}
        shapes["down_proj.weight"] = (d, f)
        if self.bias:
            shapes["down_proj.bias"] = (d,)
        return shapes


Part = Norm | Attention | FeedForward


@dataclass(frozen=True)
class Ends:
    """What stands before the first block and behind the last.

    Attributes:
        embedding_scale: what the rows of the embedding are multiplied by.
        has_positions: whether a row of a learned table of positions is added to each token.
        norm: of the last block's output.
    """

    embedding_scale: float = 1.0
    has_positions: bool = False
    norm: Norm = Norm()


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
        order: how a block's parts are put together: pre_norm, sandwich_norm, or one of your own.
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
