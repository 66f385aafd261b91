"""Which rule each module of another model has, and which part of a tensor a rank holds by it.

Everything that cannot be cut is refused here, by name. Nothing is exchanged: ranks that have the same model and
arguments raise alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.dropout import _DropoutNd

from tpengine.architectures.table import Rule, Table, check_table, find, is_named, num_packed

# What a module or a parameter that is replaced would lose.
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_load_state_dict_pre_hooks", "_post_accumulate_grad_hooks"),
)


@dataclass(frozen=True)
class Cut:
    """A dim of a tensor, cut over the ranks.

    Attributes:
        dim: the dim.
        parts: elements of the tensors that lie behind each other in that dim, such as queries, keys and values. Each is
            cut; one that does not divide, such as a vocabulary, has zeros behind its last element.
    """

    dim: int
    parts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the whole tensor in that dim."""
        return sum(self.parts)

    def take(self, whole: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Return a copy of the part of a rank."""
        pieces = []
        for part in whole.split(list(self.parts), self.dim):
            behind = [0, 0] * (whole.dim() - 1 - self.dim) + [0, -part.shape[self.dim] % num_ranks]
            padded = nn.functional.pad(part, behind) if behind[-1] else part
            pieces.append(padded.chunk(num_ranks, self.dim)[rank])
        return torch.cat(pieces, self.dim)

    def join(self, shards: Tensor) -> Tensor:
        """Return the whole tensor of shards[rank, ...], without what was padded."""
        num_ranks = len(shards)
        per_rank = [-(-part // num_ranks) for part in self.parts]
        pieces = []
        for part, piece in zip(self.parts, shards.split(per_rank, self.dim + 1), strict=True):
            behind_each_other = piece.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
            pieces.append(behind_each_other.narrow(self.dim, 0, part))
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True)
class Ruled:
    """A module with parameters of its own, and what its rule says.

    Attributes:
        name: in the model.
        module: the module itself.
        rule: of the table.
        cuts: how its parameters are cut, by name; the others stay whole.
    """

    name: str
    module: nn.Module
    rule: Rule
    cuts: Mapping[str, Cut] = field(default_factory=dict)


def rule_all(
    model: nn.Module,
    table: Table,
    prefix: str,
    head_size: int | None,
    parts: Mapping[str, Sequence[int]],
    num_ranks: int,
) -> list[Ruled]:
    """Return the rule of each module that has parameters; see `parallelize` for the arguments and what is raised."""
    held = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if next(module.parameters(recurse=False), None) is not None
    }
    in_files = {pattern: rule.of("") for pattern, rule in table.items()}
    check_table(in_files, [name.removeprefix(prefix) for name in held])
    _check_patterns("parts", parts, [name.removeprefix(prefix) for name in held])
    ruled = []
    for name, module in held.items():
        (found,) = find(in_files, name.removeprefix(prefix))
        pattern = next(pattern for pattern, rule in in_files.items() if is_named(pattern, name.removeprefix(prefix)))
        if found.rule.cut == "replicate":
            ruled.append(Ruled(name, module, found.rule))
            continue
        _check_kind(name, module, found.rule)
        given = [sizes for of, sizes in parts.items() if is_named(of, name.removeprefix(prefix))]
        sizes = _sizes_of_parts(name, module, found.rule, num_packed(pattern, table[pattern]), given)
        ruled.append(Ruled(name, module, found.rule, _cuts(name, module, found.rule, sizes, head_size, num_ranks)))
    _check_packed_heads(ruled)
    _check_head_norms(ruled, head_size)
    _check_ties(ruled)
    _check_dropout(model)
    return ruled


def divided(
    model: nn.Module, divide: Mapping[str, Sequence[str]], prefix: str, num_ranks: int
) -> list[tuple[Any, str, int]]:
    """Return object, attribute and new value of each attribute that counts what is cut."""
    _check_patterns("divide", divide, [name.removeprefix(prefix) for name, _ in model.named_modules()])
    found: dict[tuple[int, str], tuple[Any, str, int]] = {}
    for pattern, attributes in divide.items():
        for name, part in model.named_modules():
            if not is_named(pattern, name.removeprefix(prefix)):
                continue
            for attribute in attributes:
                path, _, last = attribute.rpartition(".")
                holder = functools.reduce(lambda held, step: getattr(held, step, None), path.split("."), part)
                holder = holder if path else part
                value = getattr(holder, last, None)
                if not isinstance(value, int) or isinstance(value, bool) or value % num_ranks:
                    raise ValueError(
                        f"divide names whole numbers that tp divides: {name}.{attribute} is {value!r}, tp {num_ranks}: "
                        "name another attribute, or use a tp that divides it"
                    )
                # What several modules hold is divided once.
                found[id(holder), last] = holder, last, value // num_ranks
    return list(found.values())


def _check_patterns(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(is_named(pattern, name) for name in names):
            raise ValueError(f"{argument} names modules of the model: {pattern} fits none: correct the pattern")


def _check_kind(name: str, module: nn.Module, rule: Rule) -> None:
    """Refuse a module whose forward is not that of the layer that would take its place."""
    kind = type(module)
    # transformers' Conv1D is known by its name: the engine runs without transformers.
    if rule.is_transposed:
        wanted, fits = "Conv1D", kind.__name__ == "Conv1D" and getattr(module, "weight", None) is not None
    elif rule.cut == "vocab":
        wanted, fits = "nn.Linear or nn.Embedding", kind in (nn.Linear, nn.Embedding)
    elif rule.cut == "column":
        wanted, fits = "nn.Linear or nn.PReLU", kind in (nn.Linear, nn.PReLU)
    else:
        wanted, fits = "nn.Linear", kind is nn.Linear
    if not fits:
        raise ValueError(
            f"the rule {rule.cut}{'.transposed' if rule.is_transposed else ''} is for {wanted}: {name} is a "
            f"{kind.__name__}: write the rule for what it is, or replicate"
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        raise ValueError(
            f"a table that is cut takes neither max_norm nor scale_grad_by_freq nor sparse: {name} has one: set it off"
        )
    kept = (module, *module.parameters(recurse=False))
    if any(getattr(one, kind, None) for one in kept for kind in _HOOKS):
        raise ValueError(f"a module that is replaced would lose its hooks: {name} has some: remove them first")


def _sizes_of_parts(
    name: str, module: nn.Module, rule: Rule, num_parts: int, given: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Return the features of each tensor that lies in a weight: what was given, or equally many."""
    weight = module.weight
    assert isinstance(weight, Parameter), name
    size = weight.shape[_dim_of(rule)]
    if given:
        sizes = tuple(given[0])
        if len(given) > 1 or rule.cut != "column" or sum(sizes) != size or num_parts not in (1, len(sizes)):
            raise ValueError(
                f"parts give the features of each tensor in a column's weight, once: {name} has {size} features and "
                f"rule {rule.cut} of {num_parts}, got {' and '.join(str(list(one)) for one in given)}: correct parts"
            )
        return sizes
    if size % num_parts:
        raise ValueError(
            f"tensors that lie in one must be equally large, or be given: {name} has {size} features of {num_parts}: "
            f"give parts={{'{name}': [...]}}"
        )
    return (size // num_parts,) * num_parts


def _dim_of(rule: Rule) -> int:
    """Return the dim of a weight that a rule cuts."""
    dim = rule.dim_of(2)
    assert dim is not None, rule
    return 1 - dim if rule.is_transposed else dim


def _cuts(
    name: str, module: nn.Module, rule: Rule, parts: tuple[int, ...], head_size: int | None, num_ranks: int
) -> dict[str, Cut]:
    """Return how the parameters of a module are cut; refuse sizes that do not divide."""
    # A vocabulary is padded: any number of rows will do.
    if rule.cut != "vocab":
        unit = 1
        if rule.by_heads:
            if head_size is None:
                raise ValueError(f"a cut between heads needs their size: {name} has a rule (heads): give head_size")
            unit = head_size
        if wrong := [size for size in parts if size % (unit * num_ranks)]:
            what = f"{wrong[0] / unit:g} heads of {unit}" if rule.by_heads else f"{wrong[0]} features"
            of_parts = f" in one of {len(parts)} parts" if len(parts) > 1 else ""
            raise ValueError(
                f"tp must divide the {'heads' if rule.by_heads else 'features'}: {name} has {what}{of_parts}, tp "
                f"{num_ranks}: use a tp that divides them"
            )
    cuts = {"weight": Cut(_dim_of(rule), parts)}
    if getattr(module, "bias", None) is not None and (dim := rule.dim_of(1)) is not None:
        cuts["bias"] = Cut(dim, parts)
    return cuts


def _check_packed_heads(ruled: Sequence[Ruled]) -> None:
    """Refuse queries, keys and values of one weight that cannot be equally large: o_proj beside it says how many."""
    queries = {
        one.name.rpartition(".")[0]: (one.name, one.cuts["weight"].size)
        for one in ruled
        if one.rule.cut == "row" and one.rule.by_heads
    }
    for one in ruled:
        parent = one.name.rpartition(".")[0]
        if one.rule.cut != "column" or not one.rule.by_heads or parent not in queries:
            continue
        parts, (beside, wanted) = one.cuts["weight"].parts, queries[parent]
        if parts[0] > wanted or (len(parts) > 1 and parts[0] != wanted):
            keys = (sum(parts) - wanted) // 2
            raise ValueError(
                f"queries have as many features as the row beside them: {one.name} has {list(parts)}, {beside} "
                f"{wanted}: give those of each tensor in it, as parts={{'{one.name}': {[wanted, keys, keys]}}}"
            )


def _check_head_norms(ruled: Sequence[Ruled], head_size: int | None) -> None:
    """Refuse `replicate` for what looks like a norm of heads: without the sum over tp it would train wrongly."""
    parents = {one.name.rpartition(".")[0] for one in ruled if one.rule.cut == "column" and one.rule.by_heads}
    for one in ruled:
        is_beside = one.name.rpartition(".")[0] in parents
        sizes = {parameter.numel() for parameter in one.module.parameters(recurse=False)}
        if one.rule.cut == "replicate" and not one.rule.by_heads and is_beside and sizes == {head_size}:
            raise ValueError(
                f"what sees a rank's own heads needs its gradient summed over tp: {one.name} has the size of a head "
                f"({head_size}), and stands beside column(heads): write replicate(heads)"
            )


def _check_ties(ruled: Sequence[Ruled]) -> None:
    """Refuse a parameter under two names that are not cut alike."""
    first: dict[Parameter, tuple[str, Cut | None]] = {}
    for one in ruled:
        for kind, parameter in one.module.named_parameters(recurse=False):
            name, cut = f"{one.name}.{kind}", one.cuts.get(kind)
            other, other_cut = first.setdefault(parameter, (name, cut))
            if cut != other_cut:
                raise ValueError(f"tied parameters are cut alike: {other} and {name} are not: correct the table")


def _check_dropout(model: nn.Module) -> None:
    """Refuse modules of dropout, and rates by which a forward may drop by itself: attention_dropout, drop_prob."""
    for name, part in model.named_modules():
        rates = {"p": part.p} if isinstance(part, _DropoutNd) else {}
        rates |= {key: value for key, value in vars(part).items() if "drop" in key and isinstance(value, int | float)}
        for key, rate in rates.items():
            if not isinstance(rate, bool) and rate > 0:
                raise ValueError(
                    f"dropout would differ between ranks that hold the same tokens: {name} has {key} {rate}: set it to "
                    "0"
                )
