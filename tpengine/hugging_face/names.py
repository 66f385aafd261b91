"""What each parameter of a model is called in a directory's files, and where it lies in them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tpengine.architectures.registry import architecture_of, rule_of
from tpengine.config import ModelConfig
from tpengine.hugging_face.directory import ModelDirectory
from tpengine.layout.parameters import EMBEDDING, HEAD, ParameterSpec, stage_specs
from tpengine.layout.stored import Stored

# Buffers that old versions of transformers wrote beside the weights.
IGNORABLE = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


def stored_of(model: ModelConfig) -> dict[str, tuple[ParameterSpec, Stored]]:
    """Return every parameter of a model and where it lies, by our name."""
    specs = {spec.name: spec for spec in stage_specs(model, 1, 0, model.num_layers)}
    return {name: (spec, _stored(model, specs, spec)) for name, spec in specs.items()}


def wanted(model: ModelConfig, directory: ModelDirectory | None = None) -> Iterator[Stored]:
    """Yield where each parameter lies, tensor by tensor: what a directory must hold, but for what begins at zero."""
    begun = frozenset() if directory is None else begun_at_zero(model, directory)
    for name, (_, stored) in stored_of(model).items():
        if name not in begun:
            yield from stored.apart()


def begun_at_zero(model: ModelConfig, directory: ModelDirectory) -> frozenset[str]:
    """Return our names of routers' biases, where a directory has none: training adds them (--train.balance bias)."""
    biases = {name: stored.name for name, (spec, stored) in stored_of(model).items() if not spec.has_gradient}
    return frozenset() if any(name in directory.tensors for name in biases.values()) else frozenset(biases)


def ignorable(model: ModelConfig) -> tuple[str, ...]:
    """Return the patterns of what a directory may hold besides: a tied output head among them."""
    return (*IGNORABLE, *([name_of(model, HEAD)] if model.tie_embeddings else []))


def tied_names(model: ModelConfig) -> tuple[str, str] | None:
    """Return the names of the output head and of the embedding that it is tied to; None if it is not."""
    return (name_of(model, HEAD), name_of(model, EMBEDDING)) if model.tie_embeddings else None


def name_of(model: ModelConfig, parameter: str) -> str:
    """Return the name in the files of one of our parameters; several may lie in one tensor."""
    module, _, kind = parameter.rpartition(".")
    # The output head stands beside the model, not inside it.
    prefix = "" if parameter == HEAD else architecture_of(model).prefix
    return f"{prefix}{rule_of(model, module).name}.{kind}"


def with_prefix(directory: ModelDirectory, model: ModelConfig) -> ModelDirectory:
    """Return a directory with the names of the whole model, where its files hold the body alone.

    GPT-2 was published so, and so is what `save_pretrained` of a model without a head writes: names begin with `h.`,
    not `transformer.h.`.
    """
    prefix, table = architecture_of(model).prefix, name_of(model, EMBEDDING)
    if not prefix or table in directory.tensors or table.removeprefix(prefix) not in directory.tensors:
        return directory
    head = name_of(model, HEAD)
    tensors = {name if name == head else f"{prefix}{name}": tensor for name, tensor in directory.tensors.items()}
    return replace(directory, tensors=tensors)


def _stored(model: ModelConfig, specs: dict[str, ParameterSpec], spec: ParameterSpec) -> Stored:
    module, _, kind = spec.name.rpartition(".")
    found = rule_of(model, module)
    if found.is_stacked:
        num, *shape = spec.shape
        return Stored(name_of(model, spec.name), tuple(shape), num_stacked=num)
    num_rows = {part: specs[f"{part}.{kind}"].shape[0] for part in found.packed}
    if spec.valid_rows is not None:
        # A file has no padding.
        num_rows[module] = spec.valid_rows
    first = sum(num for part, num in num_rows.items() if found.packed.index(part) < found.packed.index(module))
    of_file: tuple[int, ...] = (sum(num_rows.values()), *spec.shape[1:])
    transposed = found.rule.is_transposed and len(of_file) > 1
    rows = (first, first + num_rows[module]) if len(found.packed) > 1 or spec.valid_rows is not None else None
    return Stored(name_of(model, spec.name), of_file[::-1] if transposed else of_file, transposed, rows)
