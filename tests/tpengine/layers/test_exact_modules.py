"""Rung: pure. Exact mode's layers as modules of torch: what shards share stays shared, whatever torch does to them.

Their numbers are in test_exact_layers.py.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn

from tpengine.config import ModelConfig
from tpengine.layers.collectives import Communicator
from tpengine.layers.exact import Shards
from tpengine.model.parts import ExactParts

SEQ = 4
MODEL = ModelConfig(hidden_size=16, num_heads=8, num_kv_heads=2, ffn_size=16, vocab_size=16)


def parts() -> ExactParts:
    return ExactParts(MODEL, Shards(Communicator(None), 4), dtype=torch.float64)


def layers() -> nn.Sequential:
    """Attention whose shards share KV heads, and a norm, all of whose shards have one weight."""
    return nn.Sequential(parts().attention(None), parts().norm())


def num_parameters(module: nn.Module) -> list[int]:
    """How many each layer has."""
    return [len(list(layer.parameters())) for layer in module.children()]


def outputs(module: nn.Module) -> Tensor:
    attention, norm = module.children()
    x = torch.arange(16.0 * SEQ, dtype=torch.float64).sin().view(SEQ, 16)
    y: Tensor = norm(attention(x, SEQ))
    return y


def test_memory_after_the_meta_device_is_shared() -> None:
    filled = layers()
    moved = layers().to("meta")
    assert num_parameters(moved) == num_parameters(filled)
    moved.to_empty(device="cpu")
    assert num_parameters(moved) == num_parameters(filled) == [2 * 4 + 2 * 2, 1]
    moved.load_state_dict(filled.state_dict())
    torch.testing.assert_close(outputs(moved), outputs(filled), rtol=0, atol=0)


def test_parameters_that_a_state_dict_brings_are_shared() -> None:
    source, target = layers(), layers()
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    target.load_state_dict(state, assign=True)
    assert num_parameters(target) == num_parameters(source)
    torch.testing.assert_close(outputs(target), outputs(source), rtol=0, atol=0)


def test_layers_of_one_process_are_pickled() -> None:
    module = layers()
    copied = pickle.loads(pickle.dumps(module))
    assert num_parameters(copied) == num_parameters(module)
    torch.testing.assert_close(outputs(copied), outputs(module), rtol=0, atol=0)


def test_under_the_compiler_a_shards_layer_computes_the_same() -> None:
    """The operators that the compiler sees find ranks by name, and would take the shards for them."""
    torch.manual_seed(0)
    layer: Any = parts().mlp(None).shards["1"].get_submodule("gate_proj")
    x = torch.randn(SEQ, 16, dtype=torch.float64)
    try:
        compiled = torch.compile(lambda x: layer(x).view(SEQ, 4), backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))
    finally:
        torch._dynamo.reset()
