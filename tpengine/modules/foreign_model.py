"""Cut a model that somebody else wrote over tensor-parallel ranks, in place.

Only modules that hold a cut weight are replaced; all names stay. torch's `parallelize_module` and transformers'
`tp_plan` do the same with hooks around each module and DTensor or loose weights. Different here: a name without a rule,
a rule without a name and two rules for one are errors, and nothing is changed before all of it has been checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures.table import Table
from tpengine.distributed.agreement import check_same, describe_model, device_of
from tpengine.layers.replicated import hook_gradient, replicate, summed
from tpengine.model.meta_modules import is_on_meta
from tpengine.modules.foreign_layers import CutColumns, CutHead, CutLayer, CutPReLU, CutRows, CutTable, SameGradient
from tpengine.modules.rules import Cut, Ruled, divided, rule_all


def parallelize(
    module: nn.Module,
    table: Table,
    tp: Communicator,
    *,
    prefix: str = "",
    head_size: int | None = None,
    divide: Mapping[str, Sequence[str]] | None = None,
    parts: Mapping[str, Sequence[int]] | None = None,
    gather_logits: bool = True,
) -> None:
    """Cut a model over tensor-parallel ranks as a table says, in place; collective.

        parallelize(model, gpt2.TABLE, tp, prefix="transformer.", head_size=64, divide={"h.*.attn": ["split_size"]})

    The model's own forward runs on each rank, with all tokens and this rank's heads and features. Its parameters are
    new ones: make an optimizer afterwards.

        column      y[..., F/tp] = x @ w[F/tp, D].T;  dx = all_reduce_tp(dy @ w); of nn.PReLU: a slope per feature
        row         y[..., D] = all_reduce_tp(x[..., F/tp] @ w[D, F/tp].T) + b
        vocab       of nn.Embedding: all_reduce_tp of the rows found here; of nn.Linear: the logits, gathered
        replicate   as it is, on whole activations: every rank computes its whole gradient
        replicate(heads)   as it is, on this rank's heads or features: its gradient is summed over tp

    Args:
        module: the whole model, with the same values on every rank; weights are loaded before this. State dict names
            stay, and ties do.
        table: a rule for the module of each parameter: tpengine.architectures.describe. Patterns are of the model's own
            names, less `prefix`. `.of` is read for the number of tensors in one alone ("{q,k,v}").
        tp: the tensor-parallel ranks.
        prefix: taken off the names that begin with it.
        head_size: features of a head, for the rules with (heads); KV heads are cut too, so tp must divide them.
        divide: attributes, by pattern of their module's name, that count what is cut (GPT-2's `split_size`): each is
            divided by tp. A forward that takes its number of heads from the tensor's size (-1) needs none. A dot leads
            to an object that the module holds ("config.num_attention_heads"); one that several hold is divided once,
            and speaks of this rank's part from then on: to save a config, copy it before.
        parts: by pattern of a module's name, the features of each tensor that lies in its weight, where they are not
            equally large: {"layers.*.self_attn.qkv_proj": [2048, 512, 512]}.
        gather_logits: false: the head's output is z[..., ceil(V/tp)], for `layers.vocab_parallel_cross_entropy`.

    Raises:
        ValueError: on every rank alike, before anything is changed: ranks differ in model, values or arguments; a
            module with parameters has no rule, or two; a rule fits none; a rule is for another kind of module; heads or
            features that tp does not divide, in one of the tensors of a weight; tied parameters that are cut
            differently; an attribute to divide that is no such number; dropout; a norm of heads that is not
            replicate(heads); the meta device. From the first backward passes: gradients of what is whole differ between
            ranks, since a module under `replicate` sees this rank's features.

    Cost: per column layer an all-reduce of dx in backward, per row layer and table one of y in forward; T*V logits
        gathered. Each exchange waits for the matmul: faster are tpengine.layers, in a model written for them.
    Numerics: the sums of a row layer and of dx are taken in the activations' dtype, in the transport's order.
    """
    if is_on_meta(module):
        raise ValueError(
            "a model is cut with its values: parameters or buffers are on the meta device: load it first, on every rank"
        )
    ruled = rule_all(module, table, prefix, head_size, parts or {}, tp.size)
    numbers = divided(module, divide or {}, prefix, tp.size)
    if tp.size > 1:
        arguments = [f"prefix {prefix}", f"head_size {head_size}", f"divide {divide}", f"gather_logits {gather_logits}"]
        rules = [f"{one.name}: {one.rule} {one.cuts}" for one in ruled]
        check_same([*arguments, *rules, *describe_model(module), *_values(module)], device_of(module), tp)
    # Replace what is cut. A tied parameter is cut once.
    made: dict[Parameter, Parameter] = {}
    for one in ruled:
        if one.cuts:
            parent, _, child = one.name.rpartition(".")
            setattr(module.get_submodule(parent), child, _cut_layer(one, tp, made, gather_logits))
    # Declare what stays whole, for whoever sums, checks and clips gradients.
    for one in ruled:
        if one.cuts:
            continue
        if one.rule.by_heads:
            replicate(one.module, tp)
            continue
        summed(one.module, tp)
        for kind, parameter in one.module.named_parameters(recurse=False) if tp.size > 1 else ():
            hook_gradient(parameter, SameGradient(f"{one.name}.{kind}", tp))
    for part, attribute, value in numbers:
        setattr(part, attribute, value)


def whole_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that a module had before `parallelize`, with today's values; collective over tp.

    Args:
        module: a model that was parallelized, or a part of one, such as a stage.

    Returns:
        Name -> tensor, on every rank. What is cut is a new tensor, one for tied names; the others are the model's own.
    """
    state: dict[str, Tensor] = dict(module.state_dict())
    joined: dict[Parameter, Tensor] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if not isinstance(part, CutLayer):
            continue
        for kind, cut in part.cuts.items():
            parameter = part.get_parameter(kind)
            if parameter not in joined:
                joined[parameter] = _joined(parameter, cut, part.tp)
            state[f"{name}.{kind}" if name else kind] = joined[parameter]
    return state


def _joined(parameter: Parameter, cut: Cut, tp: Communicator) -> Tensor:
    rows = tp.all_gather(parameter.detach().contiguous())
    return cut.join(rows.unflatten(0, (tp.size, -1)))


def _cut_layer(one: Ruled, tp: Communicator, made: dict[Parameter, Parameter], gather_logits: bool) -> CutLayer:
    """Make the layer that takes a module's place, of this rank's part of its weights."""
    mine: dict[str, Parameter] = {}
    for kind, parameter in one.module.named_parameters(recurse=False):
        if parameter not in made:
            cut = one.cuts.get(kind)
            taken = parameter if cut is None else Parameter(cut.take(parameter.detach(), tp.rank, tp.size))
            taken.requires_grad_(parameter.requires_grad)
            made[parameter] = taken
        mine[kind] = made[parameter]
    weight, bias, is_transposed = mine["weight"], mine.get("bias"), one.rule.is_transposed
    layer: CutLayer
    if isinstance(one.module, nn.Embedding):
        layer = CutTable(tp, one.cuts, weight, one.module.padding_idx)
    elif isinstance(one.module, nn.PReLU):
        layer = CutPReLU(tp, one.cuts, weight)
    elif one.rule.cut == "vocab":
        layer = CutHead(tp, one.cuts, weight, bias, is_transposed=is_transposed)
        layer.gathers = gather_logits
    else:
        kind_of_layer: type[CutLayer] = CutColumns if one.rule.cut == "column" else CutRows
        layer = kind_of_layer(tp, one.cuts, weight, bias, is_transposed=is_transposed)
    if isinstance(layer, CutRows | CutTable) and tp.size > 1:
        layer.same_gradient = SameGradient(f"the output of {one.name}", tp)
    layer.train(one.module.training)
    return layer


@torch.no_grad()
def _values(module: nn.Module) -> list[str]:
    """Return lines of text that are equal on all ranks if the values are."""
    lines = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        data = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        lines.append(f"values of {name} {hashlib.sha256(data).hexdigest()}")
    return lines
