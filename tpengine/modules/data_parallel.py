"""Data parallelism for any `nn.Module`: every replica holds everything, gradients are summed while backward still runs.

Nothing wraps the model: hooks on its parameters move each gradient into a flat bucket, and the model, its state dict
and its optimizer stay the user's own. `.grad` itself becomes a view of the bucket, so that a reduction needs no copy
back and a second backward accumulates in place.

The decision a reader will question: which parameters took part is not found by walking the graph. A parameter's hook
either fires or does not; `finish` reduces what is still missing. Each bucket carries a count of users per parameter,
which is summed along with the gradients and tells "zero" from "unused by all" without a second collective. The price:
from the first bucket with a parameter unused on this rank, reductions start in `finish` and overlap with nothing.

A gradient lies in its bucket if it is that memory, whichever tensor object says so: model.to gives a `.grad` that stays
the same object other memory. Where parameters have moved, the next backward makes new buckets.

What is deliberately elsewhere: counting and order (data_parallel/buckets), transport (collectives), one optimizer's
state divided over the replicas (sharded_optimizer). torch's `nn.parallel.DistributedDataParallel` offers the same,
tuned for NCCL and with more knobs (communication hooks, buffers synchronised at each forward, uneven inputs), and is
the one to take for those. Different here: the order of reductions is fixed when the buckets are made and never rebuilt,
unused parameters need no option and no second pass over the graph, shared and frozen parameters need no thought, a
parameter stays one tensor of the model, and there is no wrapper.

Another one: gradients and weights are not sharded here (zero 2 and 3). To do that for any
module, parameters must be something else than torch's users know: torch's `fully_shard` makes them DTensors, and says
so. The engine shards both in its plan, for models that it builds itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from tpengine.data_parallel.bucket import FlatBucket
from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.distributed.agreement import broadcast_model, check_same, describe_model, device_of
from tpengine.layers.replicated import check_beside_parallel_layers, clip_grad_norm_, num_parallel
from tpengine.layout.parameters import BucketLayout
from tpengine.model.meta_modules import is_on_meta
from tpengine.modules.pipeline_checks import StageModules

_FULLY_SHARD = (
    "wrap it in torch.distributed.fsdp.fully_shard instead (tpengine/examples/fully_shard.py), or train a model of "
    "your own by tpengine.train --model.architecture FILE.py with --parallel.zero"
)
# What to use instead of the stages that other programs are for.
_REMEDIES = {
    1: "leave zero out, and divide the optimizer's state by "
    "tpengine.modules.ShardedOptimizer(optimizer_class, model.parameters(), replicas, ...)",
    2: _FULLY_SHARD,
    3: _FULLY_SHARD,
}


class WholeGradients:
    """What `DataParallel` does, which documents the methods.

    Args:
        model: equal on all ranks.
        communicator, bucket_bytes: as DataParallel.

    Attributes:
        buckets: the flat buffers; bucket 0 holds the parameters registered last.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, bucket_bytes: int) -> None:
        # Division by a power of two is exact, so it is done on the way into the bucket, which costs nothing.
        num_replicas = communicator.size
        self._divisor = num_replicas if num_replicas & (num_replicas - 1) == 0 else 1
        self._divisor_of_sums = num_replicas // self._divisor
        self._model, self._comm, self._bucket_bytes = model, communicator, bucket_bytes
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._used_here: dict[int, list[bool]] = {}
        # Parameters whose gradient has been divided since the last `finish`.
        self._divided: set[Parameter] = set()
        self._synchronises = True
        self._backward: int | None = None
        # Parameters on several devices have their hooks called from several threads.
        self._lock = threading.Lock()
        self._lay_out()
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._trained.values()]

    def _lay_out(self) -> None:
        """Make buckets for the parameters as they lie now; gradients of before come in with the next sum."""
        layouts = _layouts(self._trained, self._bucket_bytes)
        made = (FlatBucket(layout, self._trained, self._comm, counts_usage=True) for layout in layouts)
        self.buckets = GradientBuckets(dict(enumerate(made)))
        self._places = {p: self.buckets.place(name) for name, p in self._trained.items()}
        self._members = [[self._trained[name] for name in layout.names] for layout in layouts]
        self.buckets.arm(range(len(layouts)), self._fill)

    def _follow_moves(self) -> None:
        """Make new buckets if parameters have moved since, as by model.to; collective then.

        Raises:
            RuntimeError: sums of the old buckets are under way.
            ValueError: they have not moved alike on all ranks.
        """
        if all(_fits(view, parameter) for parameter, (view, _) in self._places.items()):
            return
        if self._backward is not None:
            raise RuntimeError(
                "parameters stay where they are between backward and finish(): some have another shape, dtype or "
                "device: call finish() before model.to"
            )
        check_same(describe_model(self._model), device_of(self._model), self._comm)
        self._lay_out()

    @torch.no_grad()
    def finish(self) -> None:
        """See DataParallel."""
        _check_unchanged(self._model, self._places, self._frozen)
        self._follow_moves()
        self.buckets.flush()
        for index, members in enumerate(self._members):
            self.buckets.wait(index)
            if self._divisor_of_sums > 1:
                self.buckets[index].sums.div_(self._divisor_of_sums)
            used = self._used_here.pop(index)
            if not all(used):
                used = (self.buckets[index].usage != 0).tolist()
            for parameter, anyone in zip(members, used, strict=True):
                if not anyone:
                    parameter.grad = None
                elif not _is_same_memory(parameter.grad, self._places[parameter][0]):
                    parameter.grad = self._places[parameter][0].detach()
        self._backward = None
        self._divided = set()
        self.buckets.arm(range(len(self._members)), self._fill)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See DataParallel."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def remove(self) -> None:
        """See DataParallel."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _accumulated(self, parameter: Tensor) -> None:
        """Count a complete gradient; autograd's hook, which runs once per backward and parameter."""
        assert isinstance(parameter, Parameter)
        # Another number in each backward pass; torch.utils.checkpoint tells passes apart by it too.
        backward: int = torch._C._current_graph_task_id()
        with self._lock:
            if self._backward not in (None, backward):
                raise RuntimeError(
                    "each backward outside no_sync() must be followed by finish(): this one began while the last one's "
                    "gradients were still being summed: call finish() after loss.backward(), and checkpoint "
                    "activations with use_reentrant=False"
                )
            if self._backward is None and (self._synchronises or not _fits(self._places[parameter][0], parameter)):
                self._follow_moves()
            if not self._synchronises:
                self._move_to_bucket(parameter)
            else:
                self._move_to_bucket(parameter, self._divisor)
                self._divided.add(parameter)
                self._backward = backward
                self.buckets.contributed(self._places[parameter][1])

    def _move_to_bucket(self, parameter: Parameter, divisor: int = 1) -> bool:
        """Let `.grad` lie in its bucket, divided; return whether there was a gradient. If not, its place is zero."""
        (view, _), grad = self._places[parameter], parameter.grad
        if grad is None:
            view.zero_()
            return False
        if not _is_same_memory(grad, view):
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"buckets hold dense gradients: a parameter of shape {list(parameter.shape)} has one of layout "
                    f"{grad.layout}: build its module with sparse=False"
                )
            torch.div(grad, divisor, out=view) if divisor > 1 else view.copy_(grad)
            # Another tensor object over the same memory: whoever is given it cannot move the bucket's own.
            parameter.grad = view.detach()
        elif divisor > 1:
            view.div_(divisor)
        return True

    def _fill(self, index: int) -> None:
        """Fill a bucket before its sum: what only no_sync saw is already in it, what nobody made is zero."""
        used = [
            self._move_to_bucket(parameter, 1 if parameter in self._divided else self._divisor)
            for parameter in self._members[index]
        ]
        self._used_here[index] = used
        if all(used):
            self.buckets[index].usage.fill_(1)
        else:
            # Summed in the bucket's dtype, where large counts may round; only "more than none" is asked of them.
            self.buckets[index].usage.copy_(torch.tensor(used))


def _layouts(parameters: dict[str, Parameter], bucket_bytes: int) -> list[BucketLayout]:
    """Cut the parameters into buckets of one dtype and device, in the reverse order of registration.

    Buckets are ordered by their last parameter.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    num_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    closed: list[list[str]] = []
    for name in reversed(parameters):
        kind = parameters[name].dtype, parameters[name].device
        open_buckets.setdefault(kind, []).append(name)
        num_bytes[kind] += parameters[name].nbytes
        if num_bytes[kind] >= bucket_bytes:
            closed.append(open_buckets.pop(kind))
            num_bytes[kind] = 0
    closed.extend(open_buckets.values())
    place = {name: i for i, name in enumerate(reversed(parameters))}
    closed.sort(key=lambda bucket: place[bucket[-1]])
    return [
        BucketLayout(("dp",), tuple(bucket), tuple(parameters[name].numel() for name in bucket)) for bucket in closed
    ]


def _fits(view: Tensor, parameter: Parameter) -> bool:
    """Return whether a gradient's place is one for the parameter as it is now."""
    return view.shape == parameter.shape and view.dtype == parameter.dtype and view.device == parameter.device


def _is_same_memory(grad: Tensor | None, view: Tensor) -> bool:
    return (
        grad is not None
        and grad.layout is torch.strided
        and grad.data_ptr() == view.data_ptr()
        and grad.dtype == view.dtype
        and grad.shape == view.shape
        and grad.stride() == view.stride()
    )


def _check_unchanged(model: nn.Module, known: Collection[Parameter], frozen: Mapping[str, Parameter]) -> None:
    """Refuse a model that trains other parameters than those of construction.

    Raises:
        RuntimeError: which have been thawed, replaced or added.
    """
    elsewhere = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in known}
    thawed = [name for name, parameter in elsewhere.items() if frozen.get(name) is parameter]
    if len(thawed) < len(elsewhere):
        raise RuntimeError(
            f"trained parameters must be those of construction: {sorted(elsewhere.keys() - set(thawed))} have been "
            "replaced or added since: call remove() and make a new DataParallel"
        )
    if thawed:
        raise RuntimeError(
            f"frozen parameters lie in no bucket: {thawed} have been thawed since: call remove() and make a new "
            "DataParallel"
        )


class DataParallel:
    """Keep a model's gradients the mean over its replicas.

        grad = sum over replicas of grad_of_replica / R

        replicas = DataParallel(model, Communicator(dist.group.WORLD))
        optimizer = torch.optim.AdamW(model.parameters())
        loss.backward()  # buckets are summed while backward runs
        replicas.finish()  # .grad is now the mean
        optimizer.step()
        optimizer.zero_grad()

    If each replica's loss is the mean over its own n samples, the gradient is that of the mean over all R * n.

    Args:
        model: on its device and in its dtype, the same on every rank. Its parameters and buffers are overwritten with
            those of the communicator's rank 0. Frozen parameters (requires_grad False) get no gradient, parameters
            under several names are one. Parameters added later are not seen.
        communicator: the replicas.
        bucket_bytes: a bucket is closed as soon as it holds at least so many; one parameter is never cut, and a bucket
            holds one dtype and one device. torch's own default is about the same.
        zero: 0. The other stages have other programs, which the refusal names.

    Attributes:
        zero: 0.

    Raises:
        ValueError: ranks differ in their parameters (name, shape, strides, dtype, frozen or trained, shared or not),
            buffers or `bucket_bytes`; raised on every rank. A parameter is whole on every rank of the model's
            tensor-parallel layers, and nothing sums its gradient over them: see layers.replicate. The model is on the
            meta device. `zero` is not 0. From backward: a gradient is sparse.
        RuntimeError: from backward, the one before was not followed by `finish`; from `finish`, a frozen parameter has
            been thawed, or another parameter has taken the place of one; from both, the model was moved in between.

    The gradients: `.grad` lies in a bucket, and zero_grad may set it to None or to zero. A parameter whose `.grad` is
        None on every replica keeps None, so that weight decay leaves it alone as in one process; used on some replicas
        only, it gets the mean over all on each of them. The memory is used again by the next backward: clone what must
        last. Between backward and `finish` gradients must not be touched; clip after `finish`.
    Moved models: after model.to(...), or new memory under a parameter, the next backward makes new buckets.
    BatchNorm: statistics are each replica's own, of its own part of the batch, as are all buffers after construction.
    Activation checkpointing: with use_reentrant=False; the reentrant kind runs a backward inside backward.
    Cost: one all-reduce per bucket and step, of its bytes and one element more per parameter. On CUDA the host waits
        for the counts only of buckets with a parameter unused on this rank.
    Memory: the buckets beside the model: one element of its dtype per trained weight, where gradients lie.
    Order: buckets are in the reverse order of registration, which is about the order in which backward completes them;
        they are reduced in that order on every rank, each as soon as it and all before it are complete. The
        constructor, `finish` and `clip_grad_norm_` are collective.
    Numerics: sums are taken in the parameters' own dtype, divided by R before where R is a power of two, else after.
        The same on every run where the transport adds in a fixed order.
    """

    def __init__(
        self, model: nn.Module, communicator: Communicator, bucket_bytes: int = 25_000_000, *, zero: int = 0
    ) -> None:
        _check_stage(zero)
        if is_on_meta(model):
            raise ValueError(
                "a model must have its values before they are made equal on all replicas: parameters or buffers are on "
                "the meta device: fill it first, with to_empty and reset_parameters, or by a Pipeline's init"
            )
        check_same([f"bucket_bytes {bucket_bytes}", *describe_model(model)], device_of(model), communicator)
        check_beside_parallel_layers(model)
        broadcast_model(model, communicator)
        self.zero, self._model = zero, model
        self._gradients = WholeGradients(model, communicator, bucket_bytes)

    @property
    def buckets(self) -> GradientBuckets:
        """Return the flat buffers of gradients; bucket 0 holds the parameters registered last."""
        return self._gradients.buckets

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the model's trained parameters: name and parameter."""
        return ((name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad)

    def parameters(self) -> Iterator[Parameter]:
        """Yield the model's trained parameters, without names."""
        return (parameter for _, parameter in self.named_parameters())

    def finish(self) -> None:
        """Wait until every gradient is the mean over the replicas.

        Call it on every rank after each backward outside `no_sync`, and also on a rank that had none: the others wait
        for it, and it contributes zeros.

        It reduces whatever `.grad` holds, so a second call in a row (on all ranks) takes the mean of equal gradients:
        harmless, and as dear as the first.
        """
        self._gradients.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside only accumulate here; the next one outside, or `finish`, reduces the whole sum.

        Entering counts for backward, not for forward.
        """
        return self._gradients.no_sync()

    def clip_grad_norm_(
        self, max_norm: float, tp: Communicator | None = None, pp: Communicator | None = None
    ) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before; collective.

        Call it after `finish`. Without tensor parallelism and pipelines it is torch.nn.utils.clip_grad_norm_.

        Args:
            max_norm: the largest norm that is left as it is; above zero.
            tp: the tensor-parallel ranks of a model that has some. What all of them hold counts once.
            pp: the ranks of a pipeline, of whose stages the model is one.

        Raises:
            ValueError: the model is cut over tp, or is a stage of several, and these ranks are not given: each rank
                would scale by a norm of its own. `max_norm` is not above zero.
        """
        given = 1 if tp is None else tp.size
        if (size := num_parallel(self._model)) != given and size > 1:
            raise ValueError(
                f"a norm is taken over all ranks that hold a part of the model: it is over {size} tensor-parallel "
                f"ranks, got {given}: call clip_grad_norm_(max_norm, tp)"
            )
        if isinstance(self._model, StageModules) and self._model.num_ranks > 1 and pp is None:
            raise ValueError(
                f"a norm is taken over all ranks that hold a part of the model: it is one of {self._model.num_ranks} "
                "stages, got no pp: call clip_grad_norm_(max_norm, tp, pp)"
            )
        return clip_grad_norm_(self._model, max_norm, tp or Communicator(None), pp)

    def remove(self) -> None:
        """Take the hooks off the model; gradients keep their values and are summed no more."""
        self._gradients.remove()


def _check_stage(zero: object) -> None:
    if type(zero) is int and zero in _REMEDIES:
        raise ValueError(
            f"every replica of a DataParallel holds everything: zero must be 0, got {zero}: {_REMEDIES[zero]}"
        )
    if type(zero) is not int or zero != 0:
        raise ValueError(
            f"every replica of a DataParallel holds everything: zero must be 0, got {zero!r}: leave it out"
        )
