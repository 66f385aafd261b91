"""Which rule each module of another model has; everything that cannot be cut is refused here, by name.

Nothing is exchanged: ranks that have the same model and arguments raise alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn import Parameter

from tpengine.architectures.describe.table import Rule, Table, check_table, find, is_named, num_packed
from tpengine.model.foreign.cut import Cut


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


def rule_all(model: nn.Module, table: Table, prefix: str, head_size: int | None, num_ranks: int) -> list[Ruled]:
    """Return the rule of each module that has parameters; see `parallelize` for the arguments and what is raised."""
    held = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if next(module.parameters(recurse=False), None) is not None
    }
    in_files = {pattern: rule.of("") for pattern, rule in table.items()}
    check_table(in_files, [name.removeprefix(prefix) for name in held])
    ruled = []
    for name, module in held.items():
        (found,) = find(in_files, name.removeprefix(prefix))
        pattern = next(pattern for pattern, rule in in_files.items() if is_named(pattern, name.removeprefix(prefix)))
        if found.rule.cut == "replicate":
            ruled.append(Ruled(name, module, found.rule))
            continue
        _check_kind(name, module, found.rule)
        num_parts = num_packed(pattern, table[pattern])
        ruled.append(Ruled(name, module, found.rule, _cuts(name, module, found.rule, num_parts, head_size, num_ranks)))
    _check_head_norms(ruled, head_size)
    _check_ties(ruled)
    _check_dropout(model)
    return ruled


def divided(
    model: nn.Module, divide: Mapping[str, Sequence[str]], prefix: str, num_ranks: int
) -> list[tuple[nn.Module, str, int]]:
    """Return module, attribute and new value of each attribute that counts what is cut."""
    found = []
    for pattern, attributes in divide.items():
        modules = [(name, part) for name, part in model.named_modules() if is_named(pattern, name.removeprefix(prefix))]
        if not modules:
            raise ValueError(f"divide names modules of the model: {pattern} fits none: correct the pattern")
        for name, part in modules:
            for attribute in attributes:
                value = getattr(part, attribute, None)
                if not isinstance(value, int) or isinstance(value, bool) or value % num_ranks:
                    raise ValueError(
                        f"divide names whole numbers that tp divides: {name}.{attribute} is {value!r}, tp {num_ranks}: "
                        "name another attribute, or use a tp that divides it"
                    )
                found.append((part, attribute, value // num_ranks))
    return found


def _check_kind(name: str, module: nn.Module, rule: Rule) -> None:
    """Refuse a module whose forward is not that of the layer that would take its place."""
    kind = type(module)
    # transformers' Conv1D is known by its name: the engine runs without transformers.
    if rule.is_transposed:
        wanted, fits = "Conv1D", kind.__name__ == "Conv1D" and getattr(module, "weight", None) is not None
    elif rule.cut == "vocab":
        wanted, fits = "nn.Linear or nn.Embedding", kind in (nn.Linear, nn.Embedding)
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
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError(f"a module that is replaced would lose its hooks: {name} has some: remove them first")


def _cuts(
    name: str, module: nn.Module, rule: Rule, num_parts: int, head_size: int | None, num_ranks: int
) -> dict[str, Cut]:
    """Return how the parameters of a module are cut; refuse sizes that do not divide."""
    weight = module.weight
    assert isinstance(weight, Parameter), name
    bias = getattr(module, "bias", None)
    out, into = (1, 0) if rule.is_transposed else (0, 1)
    dim = into if rule.cut == "row" else out
    size = weight.shape[dim]
    if rule.cut == "vocab":
        # Padded: any number of rows will do.
        cut = Cut(dim, size)
    else:
        unit = 1
        if rule.by_heads:
            if head_size is None:
                raise ValueError(f"a cut between heads needs their size: {name} has a rule (heads): give head_size")
            unit = head_size
        if size % (num_parts * unit * num_ranks):
            what = f"{size // (num_parts * unit)} heads of {unit}" if rule.by_heads else f"{size // num_parts} features"
            of_parts = f" in each of {num_parts} parts" if num_parts > 1 else ""
            raise ValueError(
                f"tp must divide the {'heads' if rule.by_heads else 'features'}: {name} has {what}{of_parts}, tp "
                f"{num_ranks}: use a tp that divides them"
            )
        cut = Cut(dim, size, num_parts)
    cuts = {"weight": cut}
    if bias is not None and rule.cut != "row":
        cuts["bias"] = Cut(0, size, num_parts)
    return cuts


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
    for name, part in model.named_modules():
        if isinstance(part, nn.Dropout) and part.p > 0:
            raise ValueError(
                f"dropout would differ between ranks that hold the same tokens: {name} has p {part.p}: set it to 0"
            )
