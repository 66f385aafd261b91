"""Rung: one process, host paths. A block's last sum is left to the next norm: the same bits as added before it.

Blocks and norms that somebody watches or replaces are called as modules.

That the kernels add as they should is tests/kernels/ops/test_norm.py's; whole layouts are test_layers.py's and those of
training. What only a GPU shows: that it is faster.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures.registry import architecture_of
from tpengine.config import ModelConfig
from tpengine.config.settings import ModelDetails
from tpengine.layers.norm import Norm, RMSNorm
from tpengine.model import block as block_module
from tpengine.model import transformer as transformer_module
from tpengine.model.block import Block, Sum, computed_again, is_watched
from tpengine.model.exact import Shards
from tpengine.model.parts import ExactParts, FastParts
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
        block.order = halved
    numbers(model)
    assert seen == [Tensor] * LLAMA.num_layers
    parts = FastParts(LLAMA, Communicator(None))
    assert not Block(parts, architecture_of(LLAMA).block(LLAMA, 0), halved).takes_sums


Noted = Callable[[nn.Module, Any, Any], None]


def with_own_hooks(modules: list[nn.Module], noted: Noted, _: pytest.MonkeyPatch) -> None:
    for module in modules:
        module.register_forward_hook(lambda module, args, y: noted(module, args[0], y))


def with_global_hooks(_: list[nn.Module], noted: Noted, patch: pytest.MonkeyPatch) -> None:
    # The hook goes where the patch takes it away after the test.
    patch.setattr(torch_module, "_global_forward_hooks", torch_module._global_forward_hooks.copy())
    torch_module.register_module_forward_hook(lambda module, args, y: noted(module, args[0], y))


def with_global_backward_hooks(_: list[nn.Module], noted: Noted, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch_module, "_global_backward_pre_hooks", torch_module._global_backward_pre_hooks.copy())
    torch_module.register_module_full_backward_pre_hook(lambda module, dy: noted(module, dy[0], dy[0]))


def noting(module: nn.Module, forward: Callable[..., Any], noted: Noted) -> Callable[..., Any]:
    """Forward, whose calls are noted."""

    def called(x: Any, *rest: Any) -> Any:
        y = forward(x, *rest)
        noted(module, x, y)
        return y

    return called


def with_another_forward(modules: list[nn.Module], noted: Noted, patch: pytest.MonkeyPatch) -> None:
    for module in modules:
        patch.setattr(module, "forward", noting(module, module.forward, noted))


def of_a_subclass(modules: list[nn.Module], noted: Noted, _: pytest.MonkeyPatch) -> None:
    for module in modules:
        plain: Any = type(module)

        class Mine(plain):
            def forward(self, *args: Any) -> Any:
                return noting(self, super().forward, noted)(*args)

        module.__class__ = Mine


def of_a_subclass_with_another_call(modules: list[nn.Module], noted: Noted, _: pytest.MonkeyPatch) -> None:
    for module in modules:
        plain: Any = type(module)

        class Mine(plain):
            def __call__(self, *args: Any) -> Any:
                return noting(self, super().__call__, noted)(*args)

        module.__class__ = Mine


def of_a_class_that_is_patched(_: list[nn.Module], noted: Noted, patch: pytest.MonkeyPatch) -> None:
    def noting_method(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args: noting(self, functools.partial(plain, self), noted)(*args)

    for kind in (Block, Norm):
        patch.setattr(kind, "forward", noting_method(kind.forward))


def compiled(modules: list[nn.Module], noted: Noted, patch: pytest.MonkeyPatch) -> None:
    for module in modules:
        # In the compiler's place stands what notes the calls of what it was to compile.
        patch.setattr(torch, "compile", functools.partial(noting, module, noted=noted))
        module.compile()


@pytest.mark.parametrize(
    "watch",
    [
        with_own_hooks,
        with_global_hooks,
        # The embedding's tokens need no gradient.
        pytest.param(with_global_backward_hooks, marks=pytest.mark.filterwarnings("ignore:Full backward hook")),
        with_another_forward,
        of_a_subclass,
        of_a_subclass_with_another_call,
        of_a_class_that_is_patched,
        compiled,
    ],
)
def test_a_block_or_norm_that_somebody_watches_or_replaces_is_called(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors; the numbers stay. Before layer 1 and before the last norm stands a block that leaves a sum."""
    calls: list[nn.Module] = []

    def noted(module: nn.Module, x: Any, y: Any) -> None:
        assert (type(x), type(y)) == (Tensor, Tensor)
        calls.append(module)

    want, model = numbers(made()), made()
    names = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "layers.1", "norm")
    watched = {name: model.get_submodule(name) for name in names}
    watch(list(watched.values()), noted, monkeypatch)
    assert_equal_bits(numbers(model), want)
    assert {name: calls.count(module) for name, module in watched.items()} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("hooks", ["forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"])
def test_every_kind_of_hook_is_noticed(hooks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RMSNorm(4, Communicator(None))
    for holder, name in ((norm, f"_{hooks}"), (torch_module, f"_global_{hooks}")):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, {0: print})
            assert is_watched(norm)
        assert not is_watched(norm)


class Doubled(nn.Module):
    """Twice what another module computes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        y: Tensor = self.inner(*args)
        return 2 * y


class DoubledWithAttributes(Doubled):
    """It has the other module's attributes too, as what torch.compile returns."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)


@pytest.mark.parametrize("kind", [Doubled, DoubledWithAttributes])
@pytest.mark.parametrize(
    ("parent", "name"),
    [("layers", "1"), ("layers.1", "input_layernorm"), ("layers.1", "post_attention_layernorm"), ("", "norm")],
)
def test_other_modules_take_the_place_of_blocks_and_norms(parent: str, name: str, kind: type[Doubled]) -> None:
    tokens, model, want = torch.arange(TOKENS), made(), made()
    holder = model.get_submodule(parent)
    holder.register_module(name, kind(holder.get_submodule(name)))
    want.get_submodule(parent).get_submodule(name).register_forward_hook(lambda *called: 2 * called[-1])
    assert torch.equal(model(tokens, SEQ), want(tokens, SEQ))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.ATTENTION])
def test_what_is_computed_again_may_have_several_inputs(recompute: Recompute) -> None:
    def order(block: Any, x: Any, seq: Any) -> Any:
        attended = block.again(lambda x, y: block.attend(x + y, seq), x, block.input_layernorm(x))
        return x + block.feed(block.post_attention_layernorm(x + attended))

    def plain(block: Any, x: Any, seq: Any) -> Any:
        attended = block.attend(x + block.input_layernorm(x), seq)
        return x + block.feed(block.post_attention_layernorm(x + attended))

    model, want = made(recompute=recompute), made()
    for transformer, of in ((model, order), (want, plain)):
        for block in transformer.layers.values():
            block.order = of
    assert_equal_bits(numbers(model), numbers(want))


def test_a_taken_sum_holds_nothing() -> None:
    """Callers still have it while the next block runs."""
    x, branch = torch.zeros(2), torch.zeros(2)
    gone, left = weakref.ref(branch), Sum(x, branch)
    del branch
    left.taken()
    gc.collect()
    assert gone() is None
