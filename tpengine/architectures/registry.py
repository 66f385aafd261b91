"""Which architectures there are: those of this folder, and files of a user's own."""

from __future__ import annotations

import functools
import types
from dataclasses import replace
from pathlib import Path

from tpengine import trust
from tpengine.architectures import (
    gemma3,
    gpt2,
    granite,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from tpengine.architectures.config_json import quantization_of
from tpengine.architectures.describe import Architecture, ConfigJson, Experts
from tpengine.architectures.description import Half, halves_of, reordered_norm
from tpengine.architectures.table import FittingRule, check_table, find
from tpengine.config import ModelConfig
from tpengine.config.ranges import check_model_sizes
from tpengine.spelling import use

BUILT_IN: dict[str, Architecture] = {
    "llama": llama.ARCHITECTURE,
    "qwen2": qwen2.ARCHITECTURE,
    "qwen3": qwen3.ARCHITECTURE,
    "mistral": mistral.ARCHITECTURE,
    "gpt2": gpt2.ARCHITECTURE,
    "gemma3": gemma3.ARCHITECTURE,
    "granite": granite.ARCHITECTURE,
    "smollm3": smollm3.ARCHITECTURE,
    "phi3": phi3.ARCHITECTURE,
    "olmo3": olmo3.ARCHITECTURE,
    "ministral3": ministral3.ARCHITECTURE,
    "qwen3_moe": qwen3_moe.ARCHITECTURE,
    "mixtral": mixtral.ARCHITECTURE,
}


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the architecture of a model by its setting.

    Raises:
        ValueError: there is none of that name, or the file has none, or the user has not permitted it (trust.py).
    """
    return _named(model.architecture)


@functools.lru_cache(maxsize=64)
def _named(name: str) -> Architecture:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not name.endswith(".py"):
        raise ValueError(
            f"model.architecture must be one of {', '.join(BUILT_IN)} or a Python file: got {name!r}: "
            f"{use(name, BUILT_IN)}, or FILE.py"
        )
    return _of_file(Path(name))


def _of_file(path: Path) -> Architecture:
    if not path.is_file():
        raise ValueError(f"model.architecture must be a file that exists: {path}: check the path")
    source = trust.permitted_file(path)
    module = types.ModuleType(f"tpengine_architecture_{path.stem}")
    module.__file__ = str(path)
    try:
        # Not through an import: that would take a compiled file beside it, which nobody has permitted.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise ValueError(
            f"an architecture's file must run: {path}: {type(error).__name__}: {error}: correct the file"
        ) from error
    architecture = getattr(module, "ARCHITECTURE", None)
    if not isinstance(architecture, Architecture):
        raise ValueError(
            f"an architecture's file must define ARCHITECTURE: {path}: got {type(architecture).__name__}: end it with "
            "ARCHITECTURE = Architecture(...)"
        )
    return architecture


def model_of(config: ConfigJson, architecture: str | None = None) -> ModelConfig:
    """Return the model that a config.json describes.

    Args:
        config: the file.
        architecture: a name or a file of one's own; default the one that the file names.

    Raises:
        ValueError: an architecture that is not there, or numbers that it does not know.
    """
    if architecture is None:
        names = {known.name: name for name, known in BUILT_IN.items()}
        if config.architecture not in names:
            raise ValueError(
                f"{config.path}: {config.architecture} is not there: the architectures are {', '.join(names)}: write "
                "one of your own (--model.architecture FILE.py)"
            )
        architecture = names[config.architecture]
    if (method := quantization_of(config.values)) is not None:
        raise ValueError(
            f"weights must not be quantized: {config.path} has quantization_config {method}: dequantize them first, "
            "with transformers' model.dequantize()"
        )
    model = replace(_named(architecture).numbers(config), architecture=architecture)
    try:
        check_model_sizes(model)
    except ValueError as error:
        raise ValueError(f"{config.path}: {error}") from None
    return model


def rule_of(model: ModelConfig, module: str) -> FittingRule:
    """Return the rule of a module with parameters, by our name.

    Raises:
        ValueError: the table has none, or two.
    """
    return _rule(model.architecture, module)


@functools.lru_cache(maxsize=65536)
def _rule(architecture: str, module: str) -> FittingRule:
    table = _named(architecture).table
    check_table(table, [module], all_used=False)
    return find(table, module)[0]


def modules_of(model: ModelConfig) -> list[str]:
    """Return our names of all modules that have parameters, the output head's too if it is tied."""
    architecture = architecture_of(model)
    ends = architecture.ends(model)
    names = ["embed_tokens", *(["embed_positions"] if ends.has_positions else [])]
    for layer in range(model.num_layers):
        for part_name, part in architecture.block(model, layer).items():
            parameters = (f"layers.{layer}.{part_name}.{name}" for name in part.shapes(model))
            names += dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    return [*names, "norm", "lm_head"]


def check_architecture(model: ModelConfig) -> None:
    """Refuse an architecture whose table does not say one thing of each parameter, or whose layers have other experts.

    Raises:
        ValueError: as check_table; or its experts are not as many as the model's numbers say.
    """
    check_table(architecture_of(model).table, modules_of(model))
    said, which = model.details.num_experts, model.details.has_experts
    parts = (part for i in range(model.num_layers) for part in architecture_of(model).block(model, i).values())
    found = {part.num_experts for part in parts if isinstance(part, Experts)}
    if found != ({said} if said and (any(which) or not which) else set()):
        raise ValueError(
            f"the experts of an architecture's layers must be model.details.num_experts: that is {said}, and "
            f"{model.architecture} has {sorted(found) or 'none'}: use --model.architecture qwen3_moe, or "
            "Experts.of(model) in a file of your own"
        )


@functools.lru_cache(maxsize=65536)
def layer_halves(model: ModelConfig, layer: int) -> tuple[Half, ...]:
    """Return the halves of a model's layer number `layer`: each part with its norms."""
    architecture = architecture_of(model)
    return halves_of(architecture.block(model, layer), all_behind=architecture.order is reordered_norm)


@functools.lru_cache(maxsize=64)
def layers_are_alike(model: ModelConfig) -> bool:
    """Return whether all layers of a model have the same parts."""
    return all(layer_halves(model, layer) == layer_halves(model, 0) for layer in range(model.num_layers))


def lacks_bias(model: ModelConfig) -> bool:
    """Return whether routers have biases that files of the architecture have no place for, so that no export holds."""
    return model.details.router_bias and model.architecture in BUILT_IN
