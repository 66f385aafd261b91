"""One optimizer whose state is divided over the replicas by whole tensors (ZeRO 1); a torch.optim.Optimizer.

Replicas that have the same gradients would all compute the same update, and hold the same state for it. Here each
updates the tensors that it owns, and sends them to the others:

    agree     that all replicas step alike (step_agreement.py); whether a GradScaler's overflow skips the step
    update    an optimizer of the given class steps over the tensors of this rank
    send      updated tensors go to the other replicas (ownership.py)

What is deliberately elsewhere: who owns what (ownership.py), saved parts (optimizer_parts.py), gradients
(data_parallel.py).

The decision a reader will question: gradients are summed whole, not scattered, so a step moves 3 units of weights where
ZeRO's slices take 2. For that nothing of a parameter changes: `.grad` is read at the step, as every optimizer does, and
a weight is written as every optimizer does. So clipping, hooks, moved models and optimizers that look at matrices mean
what they mean in torch.

An overflow that one rank's GradScaler has found is agreed on: all ranks skip the step and halve the scale.
torch.amp.GradScaler hands itself to the step of an optimizer that has an argument `grad_scaler` and says
`_step_supports_amp_scaling`. The step then asks the scaler what it has found, and may change it: `update` reads the
same tensors. The other contract, attributes of the optimizer, leaves `update` with what this rank alone has found.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.buffers import scale_all_

from tpengine.distributed.agreement import check_same
from tpengine.modules.optimizer_parts import SavedParts, num_rows
from tpengine.modules.ownership import ELEMENTWISE, OwnedRows, divide, send_updates
from tpengine.modules.step_agreement import StepAgreement, needs_master, numbers_of, options_of, takes_part, words_of

# Said at each first step, of the contract that is used here on purpose.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def agreed_overflow(
    optimizer: Optimizer, scaler: GradScaler, axes: Sequence[Communicator]
) -> tuple[bool, Tensor | None]:
    """Return whether any rank has found an overflow, and 1/scale if gradients are still scaled; collective.

    Args:
        optimizer: whose gradients the scaler looks at; it is told what all ranks have found.
        scaler: whose `unscale_` the user may have called before.
        axes: all ranks that hold a part of the model, one axis after the other.
    """
    device = optimizer.param_groups[0]["params"][0].device
    found = scaler._found_inf_per_device(optimizer)
    inverse = None
    if not found:
        # unscale_ has not been called.
        found = scaler._check_inf_per_device(optimizer)
        scale = scaler._get_scale_async()
        assert scale is not None, "a scaler that steps has a scale"
        inverse = scale.double().reciprocal().float()
    if not found:
        # A rank without any gradient.
        found[device] = torch.zeros((), device=device)
    total = torch.stack([each.to(device) for each in found.values()]).sum().view(1)
    for ranks in axes:
        ranks.all_reduce_max_(total)
    for each in found.values():
        each.copy_(total[0])
    return bool(total), inverse


@dataclass(frozen=True)
class _Own:
    """A tensor of this rank.

    Attributes:
        parameter: the user's.
        piece: the rows of it that are this rank's.
        updated: what the inner optimizer is given: the parameter itself, its rows, or a master of them.
        is_master: `updated` is float32, and the parameter is not.
    """

    parameter: Tensor
    piece: OwnedRows
    updated: Tensor
    is_master: bool


class ShardedOptimizer(Optimizer):
    """Update the parameters of all replicas, with the optimizer's state divided among them.

        replicas = Communicator(dist.group.WORLD)
        parallel = DataParallel(model, replicas)
        optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), replicas, lr=1e-3)
        loss.backward()
        parallel.finish()
        optimizer.step()
        optimizer.zero_grad()

    Args:
        optimizer_class: any torch.optim.Optimizer that treats each tensor by itself. One whose step needs a closure
            (LBFGS) is refused.
        params: parameters, named parameters or groups, as every optimizer of torch takes them.
        replicas: the ranks that hold the same parameters, and the same gradients when `step` is called.
        tp, pp: further ranks that hold parts of the model. GradScaler's overflows are agreed on over them too.
        masters: keep a float32 master of every weight of fewer bits, and update that. A weight that somebody else has
            written since the last step counts, and its master follows.
        bucket_bytes: of updated tensors that travel at once; an arena has a size of its own.
        options: of `optimizer_class`.

    Attributes:
        param_groups: all parameters, on every rank. Options that are written here (schedulers do) act.
        state: of the parameters that this rank owns, or owns rows of. What is cleared or written here acts.

    Raises:
        ValueError: a class that needs a closure; `replicas` is no Communicator. From `step`, on all replicas alike:
            they have different parameters or options; two parameters lie in one memory, so that each would overwrite
            the other's update (one parameter under several names is fine); a parameter has been replaced in its group,
            taken out of it, or has another shape; a gradient is sparse where the tensor is cut or the class takes none;
            an option that the class's own step writes comes out different on the replicas, since it is made of all
            tensors. Of float16 without masters under GradScaler, as torch raises.
        TypeError: a copy or a pickle is asked for.

    A parameter whose `.grad` is None is not updated, as in torch; the owner's `.grad` decides. Frozen parameters are
    not sent.
    torch.amp.GradScaler: an overflow on one rank skips the step on all, and halves the scale of all. Torch's
        `unscale_` refuses float16 gradients, with masters too: leave it out, and clip with max_norm * the scale.
    Order: `step` is collective, load_state_dict and add_param_group are not, but all ranks must call them alike.
    Cost: of d replicas each updates 1/d, and receives (d-1)/d of the weights. With masters one pass over them more.
        Each step begins with an exchange of 24 bytes, which the CPU waits for.
    Memory per weight: the class's state / d, with `masters` and their 4 bytes / d. A tensor that is not cut may be
        larger than a share: ownership.py.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        replicas: Communicator,
        *,
        tp: Communicator | None = None,
        pp: Communicator | None = None,
        masters: bool = False,
        bucket_bytes: int = 8_000_000,
        **options: Any,
    ) -> None:
        _check_arguments(optimizer_class, replicas, bucket_bytes)
        self._class, self._options, self._masters = optimizer_class, options, masters
        self._replicas, self._bucket_bytes = replicas, bucket_bytes
        self._axes = [ranks for ranks in (replicas, tp, pp) if ranks is not None]
        self._inner: Optimizer | None = None
        self._loads, self._frozen_loads = [0] * replicas.size, [0] * replicas.size
        self._pieces: dict[Tensor, list[OwnedRows]] = {}
        self._agreement = StepAgreement(optimizer_class, replicas, masters=masters)
        self._own: list[_Own] = []
        self._num_steps = 0
        # Whether the class's own step writes options; None before the first step.
        self._writes: bool | None = None
        # The class itself says what it refuses, and what its defaults are, on all ranks alike.
        whole = optimizer_class(params, **options)
        super().__init__(whole.param_groups, whole.defaults)
        del whole
        self._take(self.param_groups)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an optimizer whose state lies on several ranks cannot be copied or pickled by one: got a "
            "ShardedOptimizer: save the state_dict() of every rank, and make it anew"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its tensors go to the replicas that own least."""
        super().add_param_group(param_group)
        if self._inner is not None:
            self._take_state()
            self._take([self.param_groups[-1]])

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> float | None:
        """Update all parameters on all replicas; collective.

        Args:
            closure: called once, before the update; its loss is returned.
            grad_scaler: given by GradScaler.step.
        """
        inner = self._inner
        assert inner is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Agree: that all have the same, and whether this step is skipped.
        self._agreement.check(self.param_groups, is_scaled=grad_scaler is not None)
        inverse = None
        if grad_scaler is not None:
            overflow, inverse = agreed_overflow(self, grad_scaler, self._axes)
            if overflow:
                return loss
        elif hasattr(self, "found_inf"):
            raise RuntimeError(
                "a GradScaler must hand itself to step, so that ranks agree on overflows: this version of torch does "
                "not: use one of those in pyproject.toml"
            )
        self._unscale(inverse)
        # Update: what this rank owns.
        before = [options_of(group) for group in self.param_groups]
        for options, group in zip(before, inner.param_groups, strict=True):
            group.update(options)
        self._take_state()
        for own in self._own:
            _give(own, inverse)
        inner.step()
        for own in self._own:
            _take_back(own)
        self._take_written_options(before)
        self._show_state()
        self._num_steps += 1
        # Send: to each replica what the others own.
        if self._replicas.size > 1:
            send_updates(self._owned_by_rank(), self._replicas, self._bucket_bytes)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: plain tensors and numbers. Save one of every rank.

        With one replica it is what the class itself returns, and `sharding`, which torch's load_state_dict leaves out.
        """
        part: dict[str, Any] = super().state_dict()
        number_of = numbers_of(self.param_groups)
        part["sharding"] = {
            "steps": self._num_steps,
            "rows": {number_of[own.parameter]: [own.piece.start, own.piece.stop] for own in self._own},
            "shapes": {number: list(self._agreement.shape_of(parameter)) for parameter, number in number_of.items()},
            "masters": {number_of[own.parameter]: own.updated.detach() for own in self._own if own.is_master},
        }
        return part

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load what any number of replicas have saved.

            optimizer.load_state_dict([torch.load(f"optimizer_{rank}.pt") for rank in range(num_saved)])

        Load the model's weights too: a master whose weight has another value follows the weight.

        Args:
            state_dict: the parts of all of them, in any order; one part, if it was one. Also a state dict of the
                class itself, without masters.

        Raises:
            ValueError: parts are missing, overlap, are of different steps, or are of another model or optimizer; they
                have masters, and this has none.
        """
        inner = self._inner
        assert inner is not None
        parts = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        number_of = numbers_of(self.param_groups)
        shapes = {number: list(self._agreement.shape_of(parameter)) for parameter, number in number_of.items()}
        saved = SavedParts(parts, shapes, [[number_of[p] for p in group["params"]] for group in self.param_groups])
        # Cut, for each tensor of this rank, what the parts have of it.
        states = []
        for own in self._own:
            state, master = saved.state_of(number_of[own.parameter], own.piece.start, own.piece.stop)
            if master is not None and not own.is_master:
                raise ValueError(
                    "masters are loaded into masters: the parts have some, this optimizer was made without: pass "
                    "masters=True"
                )
            states.append((own, state, master))
        # The groups here, and the state in the class's own way, which casts it.
        super().load_state_dict({"state": {}, "param_groups": saved.param_groups})
        for outer, group in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(options_of(outer))
        packed = inner.state_dict()
        inner_numbers = numbers_of(inner.param_groups)
        packed["state"] = {inner_numbers[own.updated]: state for own, state, _ in states if state}
        inner.load_state_dict(packed)
        for own, _, master in states:
            if master is not None:
                own.updated.detach().copy_(master)
        self._num_steps = saved.num_steps
        self._show_state()

    def _take(self, groups: Sequence[dict[str, Any]]) -> None:
        """Divide the parameters of new groups, and give those of this rank to the inner optimizer."""
        new = list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))
        cuts = self._class in ELEMENTWISE
        # What is frozen has no state yet. Balance it by itself: it may thaw, and must not unbalance what is trained.
        for is_trained, loads in ((True, self._loads), (False, self._frozen_loads)):
            some = [p for p in new if p.requires_grad == is_trained]
            num_bytes = [p.numel() * p.element_size() for p in some]
            pieces = divide(num_bytes, [num_rows(p.shape) for p in some], loads, cuts=cuts)
            self._pieces.update(zip(some, pieces, strict=True))
        inner_groups = []
        for group in groups:
            self._agreement.add(group, self._pieces)
            mine = []
            for parameter in dict.fromkeys(group["params"]):
                for piece in self._pieces[parameter]:
                    if piece.owner == self._replicas.rank:
                        mine.append(_own_of(parameter, piece, masters=self._masters))
            self._own += mine
            inner_groups.append({**options_of(group), "params": [own.updated for own in mine]})
        if self._inner is None:
            self._inner = self._class(inner_groups, **self._options)
        else:
            for group in inner_groups:
                self._inner.add_param_group(group)
        self._show_state()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._pieces)).device

    def _unscale(self, inverse: Tensor | None) -> None:
        """Divide gradients by the loss scale, as GradScaler does; masters take float16's in float32."""
        if inverse is None:
            return
        grads = [parameter.grad for parameter in self._pieces if parameter.grad is not None]
        scale_all_([grad for grad in grads if grad.dtype is not torch.float16], inverse)

    def _take_written_options(self, before: Sequence[Mapping[str, Any]]) -> None:
        """Take over options that the class's step has written; all replicas must have come to the same.

        Raises:
            ValueError: they have not: the class computes them of all tensors, of which each replica has some.
        """
        assert self._inner is not None
        written: dict[str, Any] = {}
        for i, (outer, options, group) in enumerate(
            zip(self.param_groups, before, self._inner.param_groups, strict=True)
        ):
            for key, value in options_of(group).items():
                if key not in options or value is not options[key]:
                    outer[key] = value
                    written[f"{i} {key}"] = value
        # A class that writes some does so at its first step.
        if self._writes is None or self._writes:
            check_same(
                [f"option {words_of(written)}"],
                self._device,
                self._replicas,
                rule="an option that a step writes must not depend on which tensors a replica owns",
                remedy=f"use {self._class.__name__} without ShardedOptimizer",
            )
        if self._writes is None:
            self._writes = bool(written)

    def _take_state(self) -> None:
        """Let the inner optimizer have the state that is shown: the user may have cleared or written it."""
        assert self._inner is not None
        for own in self._own:
            if own.parameter in self.state:
                self._inner.state[own.updated] = self.state[own.parameter]
            else:
                self._inner.state.pop(own.updated, None)

    def _show_state(self) -> None:
        """Show the state of this rank's tensors under the user's parameters."""
        if self._inner is None:
            return
        self.state = defaultdict(dict)
        for own in self._own:
            if own.updated in self._inner.state:
                self.state[own.parameter] = self._inner.state[own.updated]

    def _owned_by_rank(self) -> list[list[Tensor]]:
        """Return, by rank, the tensors or rows that it owns, as they lie now."""
        owned: list[list[Tensor]] = [[] for _ in range(self._replicas.size)]
        for parameter, pieces in self._pieces.items():
            if takes_part(parameter):
                for piece in pieces:
                    owned[piece.owner].append(_rows(parameter.detach(), piece))
        return owned


def _check_arguments(optimizer_class: type[Optimizer], replicas: Communicator, bucket_bytes: int) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ValueError(
            f"a ShardedOptimizer is made of a class: got {optimizer_class!r}: pass a subclass of torch.optim.Optimizer "
            "first, then the parameters"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"a sharded step evaluates the model once: {optimizer_class.__name__} calls a closure as often as it "
            "needs: use an optimizer without one"
        )
    if not isinstance(replicas, Communicator):
        raise ValueError(
            f"replicas are ranks: got a {type(replicas).__name__}: pass the Communicator that DataParallel was given"
        )
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1: got {bucket_bytes}: leave it out for 8 MB")


def _own_of(parameter: Tensor, piece: OwnedRows, *, masters: bool) -> _Own:
    """Return what the inner optimizer is given of a parameter."""
    rows = _rows(parameter.detach(), piece)
    if needs_master(parameter, masters=masters):
        return _Own(parameter, piece, Parameter(rows.float(), parameter.requires_grad), True)
    if len(rows.shape) and rows.shape != parameter.shape:
        return _Own(parameter, piece, Parameter(rows, parameter.requires_grad), False)
    return _Own(parameter, piece, parameter, False)


def _give(own: _Own, inverse: Tensor | None) -> None:
    """Let the inner optimizer see this rank's rows as they are now, and their gradient."""
    parameter, updated = own.parameter, own.updated
    if updated is parameter:
        return
    rows = _rows(parameter.detach(), own.piece)
    grad = None if parameter.grad is None else _rows(parameter.grad, own.piece)
    if not own.is_master:
        updated.data, updated.grad = rows, grad
        return
    # What somebody has written into the weight since is not in the master.
    if updated.device != rows.device:
        updated.data = updated.detach().to(rows.device)
    value = updated.detach()
    value.copy_(torch.where(value.to(rows.dtype) == rows, value, rows.float()))
    if grad is not None:
        wide = grad.float()
        updated.grad = (
            wide.mul_(inverse.to(wide.device)) if inverse is not None and grad.dtype is torch.float16 else wide
        )


def _take_back(own: _Own) -> None:
    """Write a master's value into the weight; let go of what was given."""
    if own.is_master and own.updated.grad is not None:
        _rows(own.parameter.detach(), own.piece).copy_(own.updated)
    if own.updated is not own.parameter:
        own.updated.grad = None


def _rows(tensor: Tensor, piece: OwnedRows) -> Tensor:
    return tensor[piece.start : piece.stop] if tensor.dim() else tensor
