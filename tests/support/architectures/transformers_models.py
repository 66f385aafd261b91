"""The same model in transformers and here: drawn configurations, weights by name, transformers in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures.describe import ConfigJson
from tpengine.architectures.registry import architecture_of, rule_of
from tpengine.config import ModelConfig
from tpengine.layout.parameters import ParameterSpec
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer


class Widened(TorchFunctionMode):
    """Compute in float64 where float32 is asked for, as Hugging Face's models do whatever their dtype."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def tensor_of(model: ModelConfig, spec: ParameterSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the global tensor of one of our parameters out of transformers' state dict, padded rows zero."""
    module, _, kind = spec.name.rpartition(".")
    found, architecture = rule_of(model, module), architecture_of(model)
    prefix = "" if module == "lm_head" else architecture.prefix
    name = f"{prefix}{found.name}.{kind}"
    if found.is_stacked:
        names = [name.replace("#", str(number)) for number in range(spec.shape[0])]
        return torch.stack([weights[of] for of in names]) if names[0] in weights else _in_memory(module, weights)
    # In memory Mixtral's router has the name that all others have.
    tensor = weights[name if name in weights else f"{prefix}{spec.name}"]
    if found.rule.is_transposed and tensor.dim() == 2:
        tensor = tensor.T
    if len(found.packed) > 1:
        size, ffn = model.head_size, model.ffn_size
        sizes = {"q": model.num_heads * size, "k": model.num_kv_heads * size, "v": model.num_kv_heads * size}
        sizes |= {"gate": ffn, "up": ffn}
        rows = [sizes[name.rpartition(".")[2].removesuffix("_proj")] for name in found.packed]
        tensor = tensor.split(rows)[found.packed.index(module)]
    if spec.valid_rows is not None:
        tensor = nn.functional.pad(tensor, (0, 0, 0, spec.shape[0] - spec.valid_rows))
    assert tensor.shape == spec.shape, (spec, tensor.shape)
    return tensor


def _in_memory(module: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Return a projection of all experts as transformers 5 has them in memory: gate and up are one tensor."""
    parent, _, name = module.rpartition(".")
    if name == "down_proj":
        return weights[f"model.{module}"]
    return weights[f"model.{parent}.gate_up_proj"].chunk(2, 1)[name == "up_proj"]


def in_files(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights, or gradients, of a model of transformers by the names that its files have: experts apart."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return found


def config_json(config: Any) -> ConfigJson:
    """Return what transformers would write into config.json."""
    values = json.loads(config.to_json_string(use_diff=False))
    return ConfigJson({**values, "architectures": [type(built(config)).__name__]})


def built(config: Any, seed: int = 0) -> Any:
    """Return transformers' model in float64, all weights drawn, also those that it begins with 0 or 1."""
    from transformers import AutoModelForCausalLM

    with Widened():
        model = AutoModelForCausalLM.from_config(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.4)
    return model


def ours(model: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> Transformer:
    """Return our model in one process with these weights."""
    net = Transformer(FastParts(model, Communicator(None), dtype=dtype))
    with torch.no_grad():
        for name, parameter in net.held.items():
            parameter.copy_(tensor_of(model, net.pieces[name].spec, weights))
    return net
