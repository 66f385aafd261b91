"""Any module on replicas that own slices of what each would hold alike (ZeRO 1 to 3): hooks, in the order of a step.

    forward     gather what the optimizer has changed (zero 1, 2), or each unit before its forward (zero 3)
    backward    gather again (zero 3); add each gradient to its bucket; reduce-scatter (zero 2, 3; zero 1 in the last)
    finish      wait; divide by the replicas; hand the slices to the masters as their .grad
    step        the user's optimizer updates the masters

Replicas of one host have the weights once, and read and write them in turns (unit_weights.py): there a gather only
waits for the turn.

The decision a reader will question: the first forward after `finish`, or after an optimizer's step, gathers. Nobody has
to call anything, and nothing is gathered that is not used. Where nothing can gather, an error says so: state_dict
outside of `whole`, an optimizer made of the model's own parameters.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten
from tpkernels.exchange.arena import NUM_GENERATIONS

from tpengine.data_parallel.any_module.forwards import Forward, StageModules, parts_of, tensors_in
from tpengine.data_parallel.any_module.gather_order import GatherOrder
from tpengine.data_parallel.any_module.passes import Pass, Passes
from tpengine.data_parallel.any_module.unit_gradients import UnitGradients
from tpengine.data_parallel.any_module.unit_weights import UnitWeights
from tpengine.data_parallel.any_module.units import check_unchanged, lay_out
from tpengine.distributed.agreement import broadcast_model, device_of
from tpengine.layers.collectives import Communicator
from tpengine.layers.replicated.clip import clip_together_
from tpengine.layers.replicated.modules import mark_sliced, ranks_that_hold

_MANY = "each backward outside no_sync() must be followed by finish(): this one began while the last one's gradients "
_REENTRANT = "a backward ran inside another one: checkpoint activations with use_reentrant=False"
_GATHERED_EACH_TIME = 3


class SlicedReplicas:
    """Zero 1 to 3 of `DataParallel`, which documents the methods.

    Args:
        model: equal on all ranks.
        comm: the replicas.
        zero: 1, 2 or 3.
        units: modules in the order of their use.
        bucket_bytes: as DataParallel.

    Attributes:
        zero, comm: as given.
        sums: the communicator of reduce-scatters.
        weights, gradients: the buckets.
        units: what is gathered together; the last is the model itself.
        order: buckets, in that of their sums.
        is_cleared: the last step's gradients have been let go of.
        is_late: a gradient came after the sum of its bucket had begun in its backward pass.
    """

    def __init__(
        self, model: nn.Module, comm: Communicator, zero: int, units: Sequence[nn.Module], bucket_bytes: int
    ) -> None:
        self._model, self.comm, self.zero = model, comm, zero
        self._sliced = zero == _GATHERED_EACH_TIME
        self.units, layouts = lay_out(model, units, bucket_bytes, with_frozen=self._sliced)
        held = dict(model.named_parameters())
        trained = {index: layouts[index] for unit in self.units for index in unit.trained}
        self._names = {held[name]: name for layout in trained.values() for name in layout.names}
        self._frozen = {name: p for name, p in held.items() if not p.requires_grad}
        self._own = set(model.modules())
        self.weights = UnitWeights(layouts, held, comm, kept=not self._sliced)
        # Gathers and sums begin in orders of their own, so each has its own group.
        self.sums = _beside(comm) if self._sliced and not self.weights.is_once else comm
        self.gradients = UnitGradients(trained, held, self.sums, each=zero > 1)
        self._gathers = GatherOrder(
            self.weights, [(*unit.trained, *unit.frozen) for unit in self.units], [unit.name for unit in self.units]
        )
        self._parts = parts_of(model, self.units)
        self._passes = Passes(comm, device_of(model), len(self._parts), self._serve)
        self.order = self._order_of(-1)
        # What has happened since the last finish.
        self._used: set[str] = set()
        self.is_late = self._is_stale = False
        self.is_cleared = True
        self._forward = self._together = Forward(len(self._parts) - 1, [0] * len(self.units))
        # Where this rank is.
        self._backward: int | None = None
        self._in_forward = 0
        self._active: set[int] = set()
        self._in_whole = False
        self._synchronises = True
        mark_sliced(self._names, sliced=True)
        self._remove = contextlib.ExitStack()
        self._hook()
        if zero == 1:
            self.gradients.arm(self.order)

    def __deepcopy__(self, memo: object) -> SlicedReplicas:
        """Return self: the hooks that a copy of the model inherits do nothing for it."""
        return self

    # What users call.

    @torch.no_grad()
    def finish(self) -> None:
        """See DataParallel."""
        check_unchanged(self._model, self._names, self._frozen)
        self._check_last_backward()
        self.refresh()
        self._clear_old()
        # What a schedule that splits backward has computed behind the hooks.
        left = [parameter for parameter in self._names if parameter.grad is not None]
        if self.zero == 1:
            for parameter in left:
                self.add(parameter)
            self.gradients.drain()
        else:
            self.is_late = self.is_late or bool(left)
            while self.is_late:
                self._reduce_late()
            self._passes.begin(Pass.FINISH)
            self._gathers.free_kept()
        names = list(self._names.values())
        used = torch.tensor([name in self._used for name in names], dtype=torch.uint8, device=device_of(self._model))
        used = self.comm.all_reduce_max_(used)
        for own in self.gradients.slices.values():
            own.div_(self.comm.size)
        for name, anyone in zip(names, used.tolist(), strict=True):
            self.weights.masters[name].grad = self._slice_of(name) if anyone else None
        self._used, self._backward, self.is_cleared = set(), None, False
        self._forward = self._together = Forward(len(self._parts) - 1, [0] * len(self.units))
        self.weights.begin_writing()
        self._is_stale = True
        if self.zero == 1:
            self.gradients.arm(self.order)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See DataParallel."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def refresh(self) -> None:
        """Bring the other replicas' updates, if there may be any; at zero 3 the next gathers do."""
        if not self._is_stale:
            return
        self._is_stale = False
        self.weights.take_masters()
        self.weights.begin_reading()
        if not self._sliced:
            for index in self.weights.flat:
                self.weights.gather(index)
            for index in self.weights.flat:
                self.weights.wait(index)

    def gather(self) -> None:
        """See DataParallel."""
        self.weights.begin_writing()
        self._is_stale = True
        self.refresh()
        self._gathers.free_kept()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """See DataParallel."""
        if self._in_whole:
            yield
            return
        self.refresh()
        self._gathers.free_kept()
        indices = list(self.weights.flat) if self._sliced else []
        for index in indices:
            self.weights.gather(index)
            self.weights.wait(index)
        self.weights.take_out()
        before = {name: p._version for name, p in self._model.named_parameters()}
        self._in_whole = True
        try:
            yield
            self._take_written(before)
        finally:
            self._in_whole = False
            self.weights.put_back()
            for index in indices:
                self.weights.free(index)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, axes: Sequence[Communicator]) -> Tensor:
        """See DataParallel; axes: those beside the replicas."""
        holders = {self._names[p]: num for p, num in ranks_that_hold(self._model).items() if p in self._names}
        masters = self.weights.masters
        counted = [(m.grad, holders.get(name, 1)) for name, m in masters.items() if m.grad is not None]
        return clip_together_(counted, max_norm, [self.comm, *axes], device_of(self._model))

    def remove(self) -> None:
        """See DataParallel."""
        self.refresh()
        self._gathers.free_kept()
        if self._sliced:
            for index in self.weights.flat:
                self.weights.gather(index)
                self.weights.wait(index)
        self.weights.take_out()
        mark_sliced(self._names, sliced=False)
        self._remove.close()

    # Hooks.

    def _hook(self) -> None:
        """Put all hooks on the model, and a guard on torch's optimizers."""
        me = weakref.ref(self)
        handles: list[Any] = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._names]
        model, places = self._model, {unit.module: i for i, unit in enumerate(self.units)}
        for module in model.modules():
            handles.append(module.register_state_dict_pre_hook(functools.partial(_refuse_state, me)))
            handles.append(module.register_load_state_dict_pre_hook(functools.partial(_refuse_state, me)))
            if module not in places or self.zero == 1:
                handles.append(module.register_forward_pre_hook(self._refresh_before))
        for module, unit in places.items() if self.zero > 1 else ():
            before = functools.partial(self._before_forward, unit)
            after = functools.partial(self._after_forward, unit)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        handles.append(register_optimizer_step_pre_hook(functools.partial(_before_step, me)))
        handles.append(register_optimizer_step_post_hook(functools.partial(_stepped, me)))
        for handle in handles:
            self._remove.callback(handle.remove)
        weakref.finalize(self, _remove_all, handles[-2:])

    def _refresh_before(self, module: nn.Module, _: Any) -> None:
        if module in self._own:
            self.refresh()

    def _before_forward(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Make a unit whole, and see to it that its end is heard of in backward."""
        if module is not self.units[unit].module:
            return None
        is_model = unit == len(self.units) - 1
        if self._backward is not None and torch._C._current_graph_task_id() != -1:
            # Computed again, by a checkpoint, for a backward whose hooks are there.
            if self._sliced and not self._in_whole and not is_model:
                self._gathers.need(unit)
            return None
        self._check_last_backward()
        self.refresh()
        if is_model and not self._in_forward:
            self._forward = self._of_chunk(*args, **kwargs) if isinstance(module, StageModules) else self._together
        if self._sliced and not self._in_whole:
            self._enter_forward(unit)
        self._active.add(unit)
        self._in_forward += is_model
        if is_model or not torch.is_grad_enabled():
            return None
        flat, spec = tree_flatten((args, kwargs))
        alias = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in flat]
        entered = [new for new, old in zip(alias, flat, strict=True) if new is not old]
        if entered:
            forward = self._forward
            register_multi_grad_hook(entered, lambda _: self._after_backward(unit, forward))
        result: tuple[Any, Any] = tree_unflatten(alias, spec)
        return result

    def _enter_forward(self, unit: int) -> None:
        if unit < len(self.units) - 1:
            if not self._in_forward:
                raise RuntimeError(
                    f"zero 3 gathers weights inside the model's forward: unit '{self.units[unit].name}' was called "
                    "alone: call the model, or call the unit inside replicas.whole()"
                )
            self._gathers.need(unit)
        elif not self._in_forward:
            self._passes.begin(Pass.FORWARD, self._forward.part)
            units = self._parts[self._forward.part]
            self._gathers.begin(units, backward=False, is_wanted=self._active.__contains__)

    def _after_forward(self, unit: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Put a hook on what a unit returns: its backward begins there."""
        if module is not self.units[unit].module or unit not in self._active:
            return
        self._active.discard(unit)
        is_model = unit == len(self.units) - 1
        self._in_forward -= is_model
        if torch.is_grad_enabled() and output is not None:
            returned = [x for x in tensors_in(output) if x.requires_grad]
            forward = self._forward
            for x in returned:
                x.register_hook(lambda _: self._before_backward(unit, forward))
            forward.expected[unit] += bool(returned)
        if is_model and self._sliced and not self._in_whole and self._in_forward == 0:
            self._gathers.end()

    def _before_backward(self, unit: int, forward: Forward) -> None:
        self.enter_backward(forward)
        if self._sliced and not self._in_whole and unit < len(self.units) - 1:
            self._gathers.need(unit)

    def _after_backward(self, unit: int, forward: Forward) -> None:
        """Hear that a unit's inputs have their gradients: so have its weights."""
        forward.expected[unit] -= 1
        if forward.expected[unit] > 0:
            return
        for index in self.units[unit].trained:
            self.gradients.complete(index)
        if self._sliced and not self._in_whole:
            self._gathers.release(unit)

    def enter_backward(self, forward: Forward | None = None) -> None:
        """Begin a backward pass with its first hook, of an output of a forward or of a parameter."""
        backward: int = torch._C._current_graph_task_id()
        if self._backward == backward:
            return
        if self._backward is not None:
            raise RuntimeError(_MANY + "were still being summed, or failed" if self.zero == 1 else _REENTRANT)
        self.refresh()
        if self.zero == 1:
            self._backward = backward if self._synchronises else None
            return
        forward = forward or self._forward
        self._passes.begin(Pass.BACKWARD, forward.part)
        self._backward = backward
        self.begin_backward(is_wanted=lambda unit: forward.expected[unit] > 0, part=forward.part)
        for unit in self._parts[forward.part]:
            for index in () if forward.expected[unit] else self.units[unit].trained:
                self.gradients.complete(index)
        Variable._execution_engine.queue_callback(self._end_backward)

    def begin_backward(self, is_wanted: Callable[[int], bool], part: int) -> None:
        """Make ready for a backward pass, of this rank or of others."""
        self._clear_old()
        self.gradients.arm(self._order_of(part))
        if self._sliced and not self._in_whole:
            self._gathers.begin(self._parts[part], backward=True, is_wanted=is_wanted)

    def _end_backward(self) -> None:
        with torch.no_grad():
            # Gathers first: no rank waits for a sum while another one waits for a gather.
            if self._sliced and not self._in_whole:
                self._gathers.end()
            self.gradients.drain()
        self._backward = None

    @torch.no_grad()
    def _accumulated(self, parameter: Tensor) -> None:
        """Take a complete gradient; autograd's hook, which runs once per backward and parameter."""
        assert isinstance(parameter, Parameter)
        if self._names.get(parameter) is None:
            return
        self.enter_backward()
        if parameter.grad is None:
            return  # a weight half comes later: the next backward takes it, or finish
        index = self.gradients.place(self._names[parameter])[1]
        if self.gradients.is_started(index):
            self.is_late = True  # `.grad` keeps it for a sum of its own
            return
        self.add(parameter)
        if self.zero > 1 or self._synchronises:
            self.gradients.contributed(index)

    def add(self, parameter: Parameter) -> None:
        """Move a gradient into its bucket."""
        name, grad = self._names[parameter], parameter.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise ValueError(
                f"buckets hold dense gradients: a parameter of shape {list(parameter.shape)} has one of layout "
                f"{grad.layout}: build its module with sparse=False"
            )
        if self.zero == 1:
            self._clear_old()
        self.gradients.add(name, grad)
        parameter.grad = None
        self._used.add(name)

    def _clear_old(self) -> None:
        """Let go of the last step's gradients when the first of a new one comes."""
        if not self.is_cleared:
            self.gradients.zero()
            self.is_cleared = True

    # Taking part in what others do.

    def _serve(self, what: Pass, part: int) -> None:
        """Take part in a pass of others: gather and sum with them, compute nothing."""
        if what is Pass.FORWARD:
            self._gathers.begin(self._parts[part], backward=False, is_wanted=lambda unit: False)
            self._gathers.end()
            return
        with torch.no_grad():
            self.begin_backward(is_wanted=lambda unit: False, part=part)
            self._end_backward()

    def _reduce_late(self) -> None:
        """Sum gradients that came after their buckets' sums had begun, in a pass of their own."""
        everything = len(self._parts) - 1
        self._passes.begin(Pass.BACKWARD, everything)
        self.begin_backward(is_wanted=lambda unit: False, part=everything)
        for parameter in self._names:
            if parameter.grad is not None:
                self.add(parameter)
        self.is_late = False
        self._end_backward()

    def _check_last_backward(self) -> None:
        if self.zero > 1 and self._backward is not None:
            raise RuntimeError(
                "a backward pass must end before the next call: the last one failed, and this replica's sums are not "
                "those of the others: make the model and DataParallel anew, from a checkpoint"
            )

    # Parts of the model, which a pipeline runs one at a time.

    def _of_chunk(self, x: object, chunk: int | None = None) -> Forward:
        """Return what a forward of a stage runs: see StageModules.forward."""
        if chunk is None:
            return self._together
        assert isinstance(self._model, StageModules), type(self._model)
        return Forward(list(self._model.chunks).index(chunk), [0] * len(self.units))

    def _order_of(self, part: int) -> list[int]:
        """Return the buckets of a part in the order of their sums."""
        order = [index for unit in reversed(self._parts[part]) for index in reversed(self.units[unit].trained)]
        return [*order, *self.units[-1].trained]

    # Values.

    def _updates_masters(self, optimizer: torch.optim.Optimizer) -> bool:
        masters = set(self.weights.masters.values())
        return any(p in masters for group in optimizer.param_groups for p in group["params"])

    def _slice_of(self, name: str) -> Tensor:
        part = self.weights.parts.get(name)
        own = self.gradients.slices[self.gradients.place(name)[1]]
        return own[part.in_slice if part is not None else slice(0, 0)]

    @torch.no_grad()
    def _take_written(self, before: Mapping[str, int]) -> None:
        """Make masters and slices of weights that were written while they were whole; rank 0's values count."""
        here = [p._version != before[name] or self.weights.differs(name) for name, p in self._model.named_parameters()]
        written = torch.tensor(here, dtype=torch.uint8, device=device_of(self._model))
        names = [name for name, yes in zip(before, self.comm.all_reduce_max_(written).tolist(), strict=True) if yes]
        if names:
            broadcast_model(self._model, self.comm)
            self.weights.begin_writing()
            self.weights.read_back(names)
            self.weights.begin_reading()


# A group for sums beside that of a communicator. It is never destroyed: torch would give its name, under which ranks
# meet, to the next group of the same ranks, whose ranks could then find addresses of the old one.
_BESIDE: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()


def _beside(comm: Communicator) -> Communicator:
    """Return another communicator of the same ranks, always the same one; collective."""
    if comm not in _BESIDE:
        assert comm.group is not None
        ranks, backend = dist.get_process_group_ranks(comm.group), dist.get_backend(comm.group)
        group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        arena_bytes = NUM_GENERATIONS * comm.arena.generation_bytes if comm.arena is not None else 0
        _BESIDE[comm] = Communicator(group, arena_bytes=arena_bytes)
    return _BESIDE[comm]


def _refuse_state(me: weakref.ref[SlicedReplicas], *_: Any) -> None:
    replicas = me()
    if replicas is not None and not replicas._in_whole:
        raise RuntimeError(
            f"at zero {replicas.zero} weights are whole inside replicas.whole() only: call state_dict and "
            "load_state_dict there, on all ranks"
        )


def _before_step(me: weakref.ref[SlicedReplicas], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    replicas = me()
    if replicas is None:
        return
    wrong = [replicas._names[p] for group in optimizer.param_groups for p in group["params"] if p in replicas._names]
    if wrong:
        raise RuntimeError(
            f"at zero {replicas.zero} an optimizer updates slices: got the model's own {wrong[0]}: make it with "
            "replicas.parameters() instead of model.parameters()"
        )
    if replicas._updates_masters(optimizer):
        replicas.weights.begin_writing()


def _stepped(me: weakref.ref[SlicedReplicas], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    replicas = me()
    if replicas is not None and replicas._updates_masters(optimizer):
        replicas._is_stale = True


def _remove_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
