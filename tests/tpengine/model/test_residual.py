"""Rung: one process, host paths. A block's last sum is left to the next norm: the same bits as added before it.

That the kernels add as they should is tests/kernels/ops/test_norm.py's; whole layouts are test_layers.py's and those of
training. What only a GPU shows: that it is faster.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpengine.architectures.registry import architecture_of
from tpengine.config import ModelConfig
from tpengine.config.details import ModelDetails
from tpengine.layers.collectives import Communicator
from tpengine.model import block as block_module
from tpengine.model import transformer as transformer_module
from tpengine.model.block import Block, computed_again
from tpengine.model.exact import Shards
from tpengine.model.parts import ExactParts, FastParts
from tpengine.model.residual import Sum
from tpengine.model.transformer import Transformer
from tpengine.plan import Recompute

SEQ, TOKENS = 4, 8
LLAMA = ModelConfig(hidden_size=16, num_layers=3, num_heads=2, num_kv_heads=1, ffn_size=24, vocab_size=40)
MODELS = {
    "llama": LLAMA,
    "gemma3": replace(
        LLAMA, architecture="gemma3", tie_embeddings=True, details=ModelDetails(windows=(2, 0, 2), head_size=8)
    ),
    "gpt2": replace(LLAMA, architecture="gpt2", num_kv_heads=2, details=ModelDetails(max_positions=8)),
    "dropout": replace(LLAMA, residual_dropout=0.25),
}


def made(
    model: ModelConfig = LLAMA,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = Recompute.NONE,
    chunks: tuple[tuple[int, int], ...] | None = None,
    exact: bool = False,
) -> Transformer:
    """A model with drawn weights."""
    comm = Communicator(None)
    parts: Any = ExactParts(model, Shards(comm, 2), dtype=dtype) if exact else FastParts(model, comm, dtype=dtype)
    transformer = Transformer(parts, recompute=recompute, chunks=chunks)
    transformer.initialise(0)
    transformer.position.training = True
    return transformer


def with_hooks(model: Transformer) -> Transformer:
    """The model, whose hooks want each block's tensors, so that all sums are made where a block ends."""
    for block in model.layers.values():
        block.register_forward_hook(lambda *_: None)
    return model


def numbers(model: Transformer) -> dict[str, Tensor]:
    """Logits and all gradients of one micro-batch, through all chunks."""
    x = torch.arange(TOKENS) * 7 % model.model.vocab_size
    for chunk in range(len(model.chunks)):
        x = model(x, SEQ, chunk)
    (x.float() * torch.linspace(-1, 1, x.numel()).view_as(x)).sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"logits": x.detach()} | found


def shared_uses(y: Tensor) -> int:
    """Count the additions that autograd will make: of gradients of tensors with several uses, parameters apart."""
    uses: dict[Any, int] = {}
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, number in node.next_functions:
            if following is None or type(following).__name__ == "AccumulateGrad":
                continue
            uses[following, number] = uses.get((following, number), 0) + 1
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return sum(number - 1 for number in uses.values())


def nodes_named(y: Tensor, name: str) -> int:
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return sum(type(node).__name__ == name for node in seen)


def assert_equal_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    differing = [name for name in want if not torch.equal(got[name], want[name])]
    assert not differing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_sums_left_to_norms_have_the_bits_of_sums_made(name: str, dtype: torch.dtype) -> None:
    left, plain = made(MODELS[name], dtype), with_hooks(made(MODELS[name], dtype))
    assert_equal_bits(numbers(left), numbers(plain))


@pytest.mark.parametrize("name", MODELS)
def test_no_addition_is_left_outside_of_norms(name: str) -> None:
    """Not of activations, and not of their gradients: a hook, which needs a block's output, brings both back."""
    tokens, num = torch.arange(TOKENS), LLAMA.num_layers
    y = made(MODELS[name])(tokens, SEQ)
    assert (nodes_named(y, "AddBackward0"), shared_uses(y)) == (0, 0)
    hooked = with_hooks(made(MODELS[name]))(tokens, SEQ)
    assert nodes_named(hooked, "AddBackward0") == num
    # Exact mode adds before its norms, and autograd adds the gradients of what is used twice.
    plain = made(MODELS[name], exact=True)(tokens, SEQ)
    assert nodes_named(plain, "AddBackward0") > num and shared_uses(plain) >= 2 * num


@pytest.mark.parametrize(
    "how",
    [
        {"recompute": Recompute.ATTENTION},
        {"recompute": Recompute.BLOCK},
        {"chunks": ((0, 1), (1, 3))},
        {"exact": True},
        {"exact": True, "recompute": Recompute.ATTENTION},
    ],
    ids=str,
)
def test_sums_are_made_where_one_tensor_must_be_handed_over(how: dict[str, Any]) -> None:
    """Before what is computed again, at a chunk's end; exact mode's norms add before."""
    plain = {name: value for name, value in how.items() if name == "exact"}
    assert_equal_bits(numbers(made(**how)), numbers(with_hooks(made(**plain))))


@pytest.mark.parametrize("recompute", [Recompute.ATTENTION, Recompute.BLOCK])
def test_what_is_computed_again_keeps_one_tensor_for_each_block(
    recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the two of a sum, of which memory_of knows nothing."""
    kept: list[type] = []

    def noted(forward: Any, x: Any, *rest: Any) -> Any:
        kept.append(type(x))
        return computed_again(forward, x, *rest)

    monkeypatch.setattr(block_module, "computed_again", noted)
    monkeypatch.setattr(transformer_module, "computed_again", noted)
    numbers(made(recompute=recompute))
    assert kept == [Tensor] * LLAMA.num_layers


def test_an_order_of_somebodys_own_gets_and_gives_tensors() -> None:
    """Also where it calls one of ours, and goes on with what that returns."""
    seen: list[type] = []
    order = architecture_of(LLAMA).order

    def halved(block: Any, x: Any, seq: Any) -> Any:
        seen.append(type(x))
        return order(block, x, seq) * 0.5

    model = made()
    for block in model.layers.values():
        assert isinstance(block, Block)
        block.order, block._takes_sums = halved, False
    numbers(model)
    assert seen == [Tensor] * LLAMA.num_layers
    parts = FastParts(LLAMA, Communicator(None))
    assert not Block(parts, architecture_of(LLAMA).block(LLAMA, 0), halved)._takes_sums


def test_a_taken_sum_holds_nothing() -> None:
    """Callers still have it while the next block runs."""
    x, branch = torch.zeros(2), torch.zeros(2)
    gone, left = weakref.ref(branch), Sum(x, branch)
    del branch
    left.taken()
    gc.collect()
    assert gone() is None
