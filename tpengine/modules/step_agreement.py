"""Whether all replicas are about to do the same step: one small exchange, before any other and before any branch.

    exchange    three numbers of each rank: its parameters have changed, it refuses the step, a hash of its options
    compare     if any of them says so, all ranks compare all that a step depends on, and raise alike

A rank that finds something wrong must not raise by itself: the others would wait for it in the next collective.

The decision a reader will question: the exchange is read at every step, which waits for the backward. Without it one
rank's new rate or moved weight would show as a hang, or as replicas that drift apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.agreement import check_same
from tpengine.modules.ownership import ELEMENTWISE, OwnedRows

# Of a group, what is no option.
_NO_OPTIONS = ("params", "param_names")
# Of ELEMENTWISE, those that take sparse gradients.
_TAKES_SPARSE = (SGD, Adagrad)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group says beside its parameters."""
    return {key: value for key, value in group.items() if key not in _NO_OPTIONS}


def words_of(options: Mapping[str, Any]) -> str:
    """Return options as one line that is equal where they are."""
    words = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in options.items()}
    return ", ".join(f"{key} {value!r}" for key, value in sorted(words.items()))


def numbers_of(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, int]:
    """Return the numbers that torch's state dicts give to parameters."""
    numbers: dict[Tensor, int] = {}
    for number, parameter in enumerate(chain.from_iterable(group["params"] for group in groups)):
        numbers.setdefault(parameter, number)
    return numbers


@dataclass(frozen=True)
class _Divided:
    """A parameter as it was when it was divided."""

    shape: torch.Size
    is_cut: bool
    has_master: bool


class StepAgreement:
    """Compare what this rank's step would do with what the other replicas' would.

    Args:
        optimizer_class: that steps.
        replicas: the ranks.
        masters: as ShardedOptimizer has it.
    """

    def __init__(self, optimizer_class: type[Optimizer], replicas: Communicator, *, masters: bool) -> None:
        self._class, self._replicas, self._masters = optimizer_class, replicas, masters
        self._divided: dict[Tensor, _Divided] = {}
        self._groups: list[list[int]] = []
        self._seen: list[Any] = []

    def add(self, group: Mapping[str, Any], pieces: Mapping[Tensor, Sequence[OwnedRows]]) -> None:
        """Note how a group's parameters are when they are divided."""
        self._groups.append([id(p) for p in group["params"]])
        for p in group["params"]:
            self._divided[p] = _Divided(p.shape, len(pieces[p]) > 1, needs_master(p, masters=self._masters))

    def shape_of(self, parameter: Tensor) -> torch.Size:
        """Return the shape that a parameter was divided with."""
        return self._divided[parameter].shape

    def check(self, groups: Sequence[Mapping[str, Any]], *, is_scaled: bool) -> None:
        """Make sure that all replicas can step, and step alike; collective.

        Args:
            groups: the optimizer's, as they are now.
            is_scaled: a GradScaler has called.

        Raises:
            ValueError: on all replicas: they have different parameters or options, or at least one cannot step.
        """
        parameters = [(i, p) for i, group in enumerate(groups) for p in group["params"]]
        seen = [(i, id(p), p.data_ptr(), p.shape, p.stride(), p.dtype, p.device, takes_part(p)) for i, p in parameters]
        has_changed = seen != self._seen
        problem = self._problem_of_groups(groups) if has_changed else ""
        problem = problem or self._problem_of_gradients(groups, is_scaled)
        # Exchange.
        device = next(iter(self._divided)).device
        text = "\n".join(self._described_options(groups, is_scaled)).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:8], signed=True)
        rows = [[int(has_changed), int(problem != ""), digest]]
        if self._replicas.size > 1:
            rows = self._replicas.all_gather(torch.tensor(rows, dtype=torch.int64, device=device)).tolist()
        if all(row == [0, 0, digest] for row in rows):
            return
        # Compare.
        rule = "replicas update the same parameters alike"
        remedy = "make the optimizer, and change its groups, alike on every replica"
        lines = [*self._described_options(groups, is_scaled), *_described(groups)]
        check_same(lines, device, self._replicas, rule=rule, remedy=remedy)
        if any(is_refused for _, is_refused, _ in rows):
            check_same([problem or "nothing to refuse"], device, self._replicas, rule=rule, remedy=remedy)
            raise ValueError(problem)
        self._seen = seen

    def _described_options(self, groups: Sequence[Mapping[str, Any]], is_scaled: bool) -> Iterator[str]:
        name = f"{self._class.__module__}.{self._class.__qualname__}"
        yield f"optimizer {name} masters {self._masters} GradScaler {is_scaled}"
        for i, group in enumerate(groups):
            yield f"group {i} " + words_of(options_of(group))

    def _problem_of_groups(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return what of the parameters cannot be stepped, or nothing."""
        if len(groups) != len(self._groups):
            return (
                f"groups change by add_param_group: {len(self._groups)} groups have become {len(groups)}: call it, or "
                "make a new ShardedOptimizer"
            )
        for i, (group, divided) in enumerate(zip(groups, self._groups, strict=True)):
            if [id(p) for p in group["params"]] != divided:
                num_kept = sum(id(p) in divided for p in group["params"])
                return (
                    f"groups change by add_param_group: of group {i}'s {len(divided)} parameters {num_kept} are left "
                    f"among {len(group['params'])}: make a new ShardedOptimizer, or freeze what is to stay as it is: "
                    "requires_grad_(False)"
                )
        for parameter, then in self._divided.items():
            if parameter.shape != then.shape:
                return (
                    f"a parameter keeps its shape: {list(then.shape)} has become {list(parameter.shape)}: make a new "
                    "ShardedOptimizer"
                )
            if needs_master(parameter, masters=self._masters) and not then.has_master:
                return (
                    f"masters are made with the optimizer: a parameter has become {parameter.dtype} since: make a new "
                    "ShardedOptimizer"
                )
        return _problem_of_memory([p for p in self._divided if takes_part(p)])

    def _problem_of_gradients(self, groups: Sequence[Mapping[str, Any]], is_scaled: bool) -> str:
        """Return what of the gradients cannot be stepped, or nothing."""
        refuses_sparse = self._class in ELEMENTWISE and self._class not in _TAKES_SPARSE
        for group in groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided and (refuses_sparse or self._divided[parameter].is_cut):
                    return (
                        f"{self._class.__name__} over replicas takes dense gradients: a parameter of "
                        f"{list(parameter.shape)} has a sparse one: use SparseAdam, or an Embedding with sparse=False"
                    )
                if is_scaled and grad.dtype is torch.float16 and not self._masters:
                    return (
                        "float16 gradients vanish when they are unscaled: GradScaler with float16 weights: pass "
                        "masters=True, without unscale_ (clip with max_norm * scaler.get_scale()), or keep float32 "
                        "weights under autocast"
                    )
        return ""


def needs_master(parameter: Tensor, *, masters: bool) -> bool:
    """Return whether a parameter is updated through a float32 master."""
    return masters and parameter.dtype.is_floating_point and parameter.dtype.itemsize < torch.float32.itemsize


def takes_part(parameter: Tensor) -> bool:
    """Return whether a parameter may be updated, so that its owner sends it."""
    return parameter.requires_grad or parameter.grad is not None


def _described(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what all replicas must have alike of the parameters."""
    for i, group in enumerate(groups):
        for j, p in enumerate(group["params"]):
            name = group["param_names"][j] if "param_names" in group else j
            sent = "sent" if takes_part(p) else "frozen"
            yield f"group {i} parameter {name} {list(p.shape)} strides {list(p.stride())} {p.dtype} {sent}"


def _problem_of_memory(parameters: Sequence[Tensor]) -> str:
    first: dict[int, Tensor] = {}
    for parameter in parameters:
        if parameter.numel() and first.setdefault(parameter.data_ptr(), parameter) is not parameter:
            return (
                f"each parameter has memory of its own: two of {list(first[parameter.data_ptr()].shape)} and "
                f"{list(parameter.shape)} begin at the same place: tie them as one: module.weight = other.weight"
            )
    return ""
