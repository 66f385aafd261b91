"""How each parameter of a model is trained: groups by pattern (optim.groups). No torch.

    [[optim.groups]]                    # the embeddings stay as they are
    pattern = "model.embed_tokens.*"
    frozen = true

    [[optim.groups]]                    # queries, keys and values of all layers: a tenth of the rate, no decay
    pattern = "*.self_attn.[qkv]_proj.weight"
    lr = 0.1
    weight_decay = 0.0

Patterns are globs, as fnmatch has them, of the names that checkpoints and Hugging Face's files have. A parameter
belongs to the first group whose pattern it matches; one that matches none is trained as if there were no groups. Tied
embeddings are one parameter, `model.embed_tokens.weight`, in both roles.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from tpengine.config import Config, ModelConfig, ParameterGroup
from tpengine.layout.parameters import EMBEDDING, HEAD, POSITIONS, decays, hf_name, layer_specs, stage_specs

# Names that a message lists at most.
_MOST_NAMES = 3


def updates_of(config: Config) -> Mapping[str, tuple[float, float]]:
    """Return (factor of the learning rate, weight decay) of each parameter that is trained, by its name in the table.

    Raises:
        ValueError: as check_groups.
    """
    return _grouped(config.model, config.optim.groups, config.optim.weight_decay)[0]


def frozen_of(config: Config) -> frozenset[str]:
    """Return the names, in the table of parameters, of those that no gradient changes: frozen ones, routers' biases.

    Raises:
        ValueError: as check_groups.
    """
    return _grouped(config.model, config.optim.groups, config.optim.weight_decay)[1]


def moved_of(config: Config) -> frozenset[str]:
    """Return those of `frozen_of` that a step moves all the same: routers' biases with train.balance bias."""
    return _moved(config.model, config.optim.groups) if config.train.balance == "bias" else frozenset()


@functools.lru_cache(maxsize=64)
def _moved(model: ModelConfig, groups: tuple[ParameterGroup, ...]) -> frozenset[str]:
    specs = {spec.name: spec for spec in stage_specs(model, 1, 0, model.num_layers)}
    group_of = _first_matches(model, groups, list(specs))
    is_frozen = {name for name, group in group_of.items() if group.frozen}
    return frozenset(name for name, spec in specs.items() if not spec.has_gradient and name not in is_frozen)


@functools.lru_cache(maxsize=64)
def first_trained(model: ModelConfig, frozen: frozenset[str]) -> int:
    """Return the first layer that backward comes to: 0 where lookups are trained; their number where none is."""
    if trains_lookup(model, frozen):
        return 0
    for layer in range(model.num_layers):
        if any(spec.name not in frozen for spec in layer_specs(model, 1, layer)):
            return layer
    return model.num_layers


def trains_lookup(model: ModelConfig, frozen: frozenset[str]) -> bool:
    """Return whether the embedding or learned positions are trained."""
    names = {spec.name for spec in stage_specs(model, 1, 0, 0)}
    return any(name in names and name not in frozen for name in (EMBEDDING, POSITIONS))


def trains_head(model: ModelConfig, frozen: frozenset[str]) -> bool:
    """Return whether the output head's weight is trained: the embedding's where they are tied."""
    return (EMBEDDING if model.tie_embeddings else HEAD) not in frozen


def check_groups(config: Config) -> None:
    """Check the groups against the parameters of the model.

    Raises:
        ValueError: a pattern matches nothing, or only what patterns before it have matched; or all is frozen.
    """
    updates_of(config)


@functools.lru_cache(maxsize=64)
def _grouped(
    model: ModelConfig, groups: tuple[ParameterGroup, ...], weight_decay: float
) -> tuple[Mapping[str, tuple[float, float]], frozenset[str]]:
    """Return what `updates_of` and `frozen_of` return."""
    specs = {spec.name: spec for spec in stage_specs(model, 1, 0, model.num_layers)}
    group_of = _first_matches(model, groups, list(specs))
    without_gradient = {name for name, spec in specs.items() if not spec.has_gradient}
    frozen = frozenset(name for name, group in group_of.items() if group.frozen) | without_gradient
    if len(frozen) == len(specs):
        patterns = ", ".join(repr(group.pattern) for group in groups if group.frozen)
        raise ValueError(
            f"optim.groups must leave something to train: {patterns} freeze all {len(specs)} parameters: name fewer, "
            "or leave a group out"
        )
    updates = {}
    for name, spec in specs.items():
        if name in frozen:
            continue
        group = group_of.get(name, ParameterGroup("*"))
        decay = group.weight_decay
        if decay is None:
            decay = weight_decay if decays(model, spec) else 0.0
        updates[name] = group.lr, decay
    return MappingProxyType(updates), frozen


def _first_matches(
    model: ModelConfig, groups: tuple[ParameterGroup, ...], names: list[str]
) -> dict[str, ParameterGroup]:
    """Return the first group that each parameter matches; those that match none are left out.

    Raises:
        ValueError: a group decides nothing.
    """
    found: dict[str, ParameterGroup] = {}
    for group in groups:
        matched = [name for name in names if fnmatchcase(hf_name(name), group.pattern)]
        if not matched:
            raise ValueError(
                f"optim.groups: a pattern must match a parameter of the model: got {group.pattern!r}: "
                f"{_nearest(model, group.pattern, names)}"
            )
        new = [name for name in matched if name not in found]
        if not new:
            before = ", ".join(dict.fromkeys(repr(found[name].pattern) for name in matched))
            raise ValueError(
                f"optim.groups: the first pattern that matches decides: all {len(matched)} parameters of "
                f"{group.pattern!r} are decided by {before} before it: put it before, or leave it out"
            )
        found |= dict.fromkeys(new, group)
    return found


def _nearest(model: ModelConfig, pattern: str, names: list[str]) -> str:
    """Return the remedy for a pattern that matches nothing."""
    if model.tie_embeddings and fnmatchcase(HEAD, pattern):
        return f"the embeddings are tied, and one parameter: use {hf_name(EMBEDDING)!r}"
    near = difflib.get_close_matches(pattern, map(hf_name, names), _MOST_NAMES, 0.0)
    return f"the nearest names are {', '.join(near)}: correct it, or leave the group out"
