"""Data parallelism for any `nn.Module`: gradient buckets that are summed while backward still runs.

Nothing wraps the model: hooks on its parameters move each gradient into a flat bucket, and the model, its state dict
and its optimizer stay the user's own. `.grad` itself becomes a view of the bucket, so that a reduction needs no copy
back and a second backward accumulates in place.

The decision a reader will question: which parameters took part is not found by walking the graph. A parameter's hook
either fires or does not; `finish` reduces what is still missing. Each bucket carries a count of users per parameter,
which is summed along with the gradients and tells "zero" from "unused by all" without a second collective. The price:
from the first bucket with a parameter unused on this rank, reductions start in `finish` and overlap with nothing.

What is deliberately elsewhere: counting and order (buckets), transport (collectives). torch's
`nn.parallel.DistributedDataParallel` offers the same, tuned for NCCL and with more knobs (communication hooks, buffers
synchronised at each forward, uneven inputs), and is the one to take for those. Different here: the order of reductions
is fixed when the buckets are made and never rebuilt, unused parameters need no option and no second pass over the
graph, and there is no wrapper.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.distributed.agreement import broadcast_model, check_same, describe_model, device_of
from tpengine.layers.collectives import Communicator
from tpengine.layers.replicated.modules import check_beside_parallel_layers
from tpengine.model.meta_modules import is_on_meta


class DataParallel:
    """Keep a model's gradients the mean over its replicas.

        grad = sum over replicas of grad_of_replica / R

        replicas = DataParallel(model, Communicator(dist.group.WORLD))
        loss.backward()  # buckets are summed while backward runs
        replicas.finish()  # .grad is now the mean
        optimizer.step()
        optimizer.zero_grad()

    If each replica's loss is the mean over its own n samples, the gradient is that of the mean over all R * n.

    Args:
        model: on its device and in its dtype, the same on every rank. Its parameters and buffers are overwritten with
            those of the communicator's rank 0. Frozen parameters (requires_grad False) lie in no bucket, parameters
            under several names in one place. Parameters added later are not seen.
        communicator: the replicas.
        bucket_bytes: a bucket is closed as soon as it holds at least so many; one parameter is never cut, and a bucket
            holds one dtype and one device. torch's own default is about the same.

    Attributes:
        buckets: the flat buffers; bucket 0 holds the parameters registered last.

    Raises:
        ValueError: ranks differ in their parameters (name, shape, strides, dtype, frozen or trained, shared or not),
            buffers or `bucket_bytes`; raised on every rank. A parameter is whole on every rank of the model's
            tensor-parallel layers, and nothing sums its gradient over them: see layers.replicate. The model is on the
            meta device. From backward: a gradient is sparse.
        RuntimeError: from backward, the one before was not followed by `finish`; from `finish`, a frozen parameter has
            been thawed, or another parameter has taken the place of one.

    The gradients: `.grad` is a view of a bucket, and zero_grad may set it to None or to zero. A parameter whose `.grad`
        is None on every replica keeps None, so that weight decay leaves it alone as in one process; used on some
        replicas only, it gets the mean over all on each of them. The views are used again by the next backward: clone
        what must last. Between backward and `finish` gradients must not be touched; clip after `finish`.
    BatchNorm: statistics are each replica's own, of its own part of the batch, as are all buffers after construction.
    Activation checkpointing: with use_reentrant=False; the reentrant kind runs a backward inside backward.
    Cost: one all-reduce per bucket and step, of its bytes and one element more per parameter. Memory: the buckets, of
        the gradients' size, also while `.grad` is None; autograd's own gradients are copied and let go of one by one.
        On CUDA the host waits for the counts only of buckets with a parameter unused on this rank.
    Order: buckets are in the reverse order of registration, which is about the order in which backward completes them;
        they are reduced in that order on every rank, each as soon as it and all before it are complete. The
        constructor and `finish` are collective.
    Numerics: sums are taken in the parameters' own dtype, then divided by R; the same on every run where the transport
        adds in a fixed order.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, bucket_bytes: int = 25_000_000) -> None:
        if is_on_meta(model):
            raise ValueError(
                "a model must have its values before they are made equal on all replicas: parameters or buffers are on "
                "the meta device: fill it first, with to_empty and reset_parameters, or by a Pipeline's init"
            )
        self._num_replicas = communicator.size
        check_same([f"bucket_bytes {bucket_bytes}", *describe_model(model)], device_of(model), communicator)
        check_beside_parallel_layers(model)
        broadcast_model(model, communicator)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        layouts = _layouts(trained, bucket_bytes)
        self.buckets = GradientBuckets(
            dict(enumerate(layouts)),
            trained,
            contributions=dict.fromkeys(trained, 1),
            comms=dict.fromkeys(range(len(layouts)), communicator),
            dtype=None,
            device=None,
            before_sum=self._fill,
            count_usage=True,
        )
        self._model = model
        self._places = {p: self.buckets.place(name) for name, p in trained.items()}
        self._members = [[trained[name] for name in layout.names] for layout in layouts]
        self._used_here: dict[int, list[bool]] = {}
        self._synchronises = True
        self._backward: int | None = None
        # Parameters on several devices have their hooks called from several threads.
        self._lock = threading.Lock()
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in trained.values()]
        self.buckets.arm(range(len(layouts)))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until every gradient is the mean over the replicas.

        Call it on every rank after each backward outside `no_sync`, and also on a rank that had none: the others wait
        for it, and it contributes zeros. It reduces whatever `.grad` holds, so a second call in a row (on all ranks)
        takes the mean of equal gradients: harmless, and as dear as the first.
        """
        elsewhere = {n: p for n, p in self._model.named_parameters() if p.requires_grad and p not in self._places}
        thawed = [name for name, parameter in elsewhere.items() if self._frozen.get(name) is parameter]
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
        self.buckets.flush()
        for index, members in enumerate(self._members):
            self.buckets.wait(index)
            self.buckets.sums[index].div_(self._num_replicas)
            used = self._used_here.pop(index)
            if not all(used):
                used = (self.buckets.usage[index] != 0).tolist()
            for parameter, anyone in zip(members, used, strict=True):
                parameter.grad = self._places[parameter][0] if anyone else None
        self._backward = None
        self.buckets.arm(range(len(self._members)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside only accumulate here; the next one outside, or `finish`, reduces the whole sum.

        Entering counts for backward, not for forward.
        """
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def remove(self) -> None:
        """Take the hooks off the model; gradients keep their values and are summed no more."""
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
            self.move_to_bucket(parameter)
            if self._synchronises:
                self._backward = backward
                self.buckets.contributed(self._places[parameter][1])

    def move_to_bucket(self, parameter: Parameter) -> bool:
        """Make `.grad` the parameter's view; return whether there was a gradient. Without one the view is zero."""
        (view, _), grad = self._places[parameter], parameter.grad
        if grad is None:
            view.zero_()
            return False
        if grad is not view:
            if grad.layout is not torch.strided:
                raise ValueError(
                    f"buckets hold dense gradients: a parameter of shape {list(parameter.shape)} has one of layout "
                    f"{grad.layout}: build its module with sparse=False"
                )
            view.copy_(grad)
            parameter.grad = view
        return True

    def _fill(self, index: int) -> None:
        """Fill a bucket before its sum: what only no_sync saw is already in it, what nobody made is zero."""
        used = [self.move_to_bucket(parameter) for parameter in self._members[index]]
        self._used_here[index] = used
        if all(used):
            self.buckets.usage[index].fill_(1)
        else:
            # Summed in the bucket's dtype, where large counts may round; only "more than none" is asked of them.
            self.buckets.usage[index].copy_(torch.tensor(used))


@dataclass(frozen=True)
class _BucketLayout:
    """One bucket: its parameters in the reverse order of registration, and their sizes."""

    names: tuple[str, ...]
    numels: tuple[int, ...]


def _layouts(parameters: dict[str, Parameter], bucket_bytes: int) -> list[_BucketLayout]:
    """Cut the parameters into buckets of one dtype and device, ordered by their last parameter."""
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
    return [_BucketLayout(tuple(bucket), tuple(parameters[name].numel() for name in bucket)) for bucket in closed]
