"""Rung: host, interpreter, GPU. A Llama block of the operators, and the engine's own, against Hugging Face's layer.

Interpreted, the engine's layers take the Triton kernels that they take on a GPU. Only a GPU shows the compiled ones.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.architectures.transformers_models import Widened
from support.kernels.precision import check_errors, unwritten_is_nan
from support.kernels.rungs import Rung, every_grid_of_a_product, every_rung
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import INTERPRETED, Target, observed
from tpkernels.ops.activation import swiglu
from tpkernels.ops.attention import attention_qkv
from tpkernels.ops.norm.operator import add_rms_norm, rms_norm
from tpkernels.ops.rope_tables import rope_tables

from tpengine.architectures.registry import architecture_of
from tpengine.config import IGNORED_LABEL, ModelConfig
from tpengine.layers.vocabulary import vocab_parallel_cross_entropy
from tpengine.model.block import Block
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer

BATCH, SEQ = 2, 33
# Of the same logits with other labels: the rounding of a single number may be small by chance.
NUM_LOSSES = 8
THETA, EPS = 500.0, 1e-4
MODEL = ModelConfig(
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=96,
    vocab_size=100,
    rope_theta=THETA,
    norm_eps=EPS,
)


def llama_layer(x: Tensor, **weights: Tensor) -> Tensor:
    """Hugging Face's layer of x[T, D] in x's dtype."""
    with Widened() if x.dtype == torch.float64 else contextlib.nullcontext():
        layer, rotary = llama_modules()
        hidden = x.view(BATCH, SEQ, -1)
        tables = rotary.to(x.device)(hidden, torch.arange(SEQ, device=x.device)[None])
        mask = torch.full((SEQ, SEQ), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        given = {"attention_mask": mask, "position_embeddings": tables}
        y: Tensor = torch.func.functional_call(layer, weights, (hidden,), given)
    return y.view(x.shape)


def llama_modules() -> tuple[nn.Module, nn.Module]:
    from transformers.models.llama import modeling_llama

    config = modeling_llama.LlamaConfig(
        hidden_size=MODEL.hidden_size,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        intermediate_size=MODEL.ffn_size,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_implementation="eager",
    )
    return modeling_llama.LlamaDecoderLayer(config, 0), modeling_llama.LlamaRotaryEmbedding(config)


def drawn(dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """x[T, D] and the layer's weights by its names, of sizes that let each of them count."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"x": torch.randn(BATCH * SEQ, MODEL.hidden_size, generator=generator)}
    for name, weight in llama_modules()[0].named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        tensors[name] = 1 + values / 4 if weight.dim() == 1 else values / weight.shape[1] ** 0.5
    return {name: tensor.to(device, dtype).requires_grad_() for name, tensor in tensors.items()}


def block_of_operators(x: Tensor, **weights: Tensor) -> Tensor:
    """The same layer of x[T, D], of tpkernels' operators and plain matmuls."""

    def w(*names: str) -> Tensor:
        return torch.cat([weights[f"{name}.weight"] for name in names])

    cos, sin = rope_tables(SEQ, MODEL.head_size, THETA, device=x.device)
    qkv = F.linear(rms_norm(x, w("input_layernorm"), EPS), w(*(f"self_attn.{name}_proj" for name in "qkv")))
    attended = attention_qkv(qkv, MODEL.num_heads, MODEL.num_kv_heads, seq=SEQ, cos=cos, sin=sin)
    attended = F.linear(attended, w("self_attn.o_proj"))
    y, x = add_rms_norm(attended, x, w("post_attention_layernorm"), EPS)
    return x + F.linear(swiglu(F.linear(y, w("mlp.gate_proj", "mlp.up_proj"))), w("mlp.down_proj"))


class _EnginesBlock(torch.autograd.Function):
    """y[T, D] of x and the weights; the engine accumulates weight gradients aside, here autograd.grad gets them."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.block, ctx.x = block, x.detach().requires_grad_()
        with torch.no_grad():
            for parameter, weight in zip(block.parameters(), weights, strict=True):
                parameter.copy_(weight)
        with torch.enable_grad():
            ctx.y = block(ctx.x, SEQ)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.y.backward(dy)
        return None, ctx.x.grad, *(parameter.grad for parameter in ctx.block.parameters())


def engines_block(x: Tensor, **weights: Tensor) -> Tensor:
    parts, architecture = FastParts(MODEL, Communicator(None), dtype=x.dtype, device=x.device), architecture_of(MODEL)
    block = Block(parts, architecture.block(MODEL, 0), architecture.order)
    y: Tensor = _EnginesBlock.apply(block, x, *(weights[name] for name, _ in block.named_parameters()))
    return y


def check_block(device: str, dtype: torch.dtype, name: str, whole: bool) -> None:
    operator = {"operators": block_of_operators, "engine": engines_block}[name]
    # Interpreted, a draw takes seconds.
    num_draws = 1 + whole if INTERPRETED else 8
    check_errors(f"block of {name}", operator, llama_layer, lambda seed: drawn(dtype, device, seed), draws=num_draws)


# By default the engine's, which takes the same operators and its own layers.
@pytest.mark.by_default(
    "engine-host-bfloat16-whole", *(f"engine-gpu-{dtype}-whole" for dtype in ("float32", "float16", "bfloat16"))
)
@every_grid_of_a_product
@pytest.mark.parametrize("name", [pytest.param("operators", marks=pytest.mark.slow), "engine"])
def test_a_block_errs_at_most_twice_as_much_as_hugging_faces(
    rung: Rung, dtype: torch.dtype, whole: bool, name: str
) -> None:
    pytest.importorskip("transformers")
    rung(check_block, dtype, name, whole)


def losses_and_gradients(device: str, dtype: torch.dtype, tied: bool, seed: int) -> dict[str, Any]:
    """Return losses and the first loss's gradients of the engine's whole model of one layer, as numpy arrays."""
    comm, generator = Communicator(None), torch.Generator().manual_seed(seed)
    parts = FastParts(replace(MODEL, tie_embeddings=tied), comm, dtype=dtype, device=device)
    model = Transformer(parts)
    with torch.no_grad():
        for weight in model.parameters():
            values = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + values / 4 if weight.dim() == 1 else values / weight.shape[1] ** 0.5)
    tokens = torch.randint(MODEL.vocab_size, (BATCH * SEQ,), generator=generator)
    labels = torch.randint(MODEL.vocab_size, (NUM_LOSSES, BATCH * SEQ), generator=generator)
    labels[:, ::5] = IGNORED_LABEL
    with unwritten_is_nan():
        logits = model(tokens.to(device), SEQ)
        losses = [vocab_parallel_cross_entropy(logits, some, MODEL.vocab_size, comm) for some in labels.to(device)]
        losses[0].backward()
    gradients = {f"gradient of {name}": weight.grad for name, weight in model.named_parameters()}
    results = {"losses": torch.stack(losses), **gradients}
    return {name: tensor.detach().cpu().numpy() for name, tensor in results.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize(
    ("rung", "num_draws"), [pytest.param("interpreter", 2, marks=pytest.mark.slow), ("gpu", 2)], indirect=["rung"]
)
def test_a_transformer_errs_at_most_twice_as_much_as_on_the_host(rung: Rung, num_draws: int, tied: bool) -> None:
    check_a_transformer(rung, num_draws, tied)


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["interpreter"], indirect=True)
def test_a_transformer_once(rung: Rung) -> None:
    """Do what the test above does for one draw, with a model whose table is used twice."""
    check_a_transformer(rung, num_draws=1, tied=True)


def check_a_transformer(rung: Rung, num_draws: int, tied: bool) -> None:
    largest: dict[str, tuple[float, float]] = {}
    for seed in range(num_draws):
        exact, host = (losses_and_gradients("cpu", dtype, tied, seed) for dtype in (torch.float64, torch.float32))
        ours = rung(losses_and_gradients, torch.float32, tied, seed)
        assert ours.keys() == exact.keys() and len(ours) == (12 if tied else 13)
        for name, right in exact.items():
            error, of_host, rounding = (
                float(abs(got - right).max()) for got in (ours[name], host[name], right.astype("float32"))
            )
            before = largest.get(name, (0.0, 0.0))
            largest[name] = max(before[0], error), max(before[1], of_host, rounding)
    for name, (error, of_host) in largest.items():
        assert error <= 2 * of_host, f"{name} is wrong by {error:.3g}, on the host by {of_host:.3g}"


def kernels_launched(device: str) -> set[str]:
    """Return the modules whose kernels a step of the engine's model would launch, without launching any."""
    modules = set()

    def note(kernel: Any, *_: Any) -> None:
        module = kernel.fn.__module__.removeprefix("tpkernels.ops.")
        # This one has two kernels, of which a launch may need one.
        modules.add(f"{module}.{kernel.fn.__name__}" if module == "attention.gradients" else module)

    with observed(Target("cuda", 90), note):
        losses_and_gradients(device, torch.float32, False, 0)
    return modules


@every_rung
def test_the_engines_layers_take_the_kernels_where_there_are_some(rung: Rung) -> None:
    attention = {"attention.forward", "attention.backward", "attention.gradients.gradient_kernel"}
    attention |= {"attention.gradients.query_gradient_kernel"}  # in float32 a kernel of its own
    every = {"norm.kernel", "embedding", "rope", "activation", "cross_entropy.kernel"} | attention
    assert rung(kernels_launched) == (set() if rung.name == "host" else every)
