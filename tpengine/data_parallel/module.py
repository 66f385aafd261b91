"""Data parallelism for any `nn.Module`: every replica holds everything, and gradients are summed.

Nothing wraps the model: hooks on its parameters do the work, and its names and its state dict stay its own. `.grad`
means what it means in torch.

What is deliberately elsewhere: how gradients lie in buckets (whole_gradients), counting and order (buckets), transport
(collectives), one optimizer's state divided over the replicas (sharded_optimizer). torch's
`nn.parallel.DistributedDataParallel` offers the same, tuned for NCCL and with more knobs (communication hooks, buffers
synchronised at each forward), and is the one to take for those. Different here: the order of collectives is fixed when
the buckets are made, so parameters that only some ranks use need no option; shared and frozen parameters need no
thought; and a parameter stays one tensor of the model.

The decision a reader will question: gradients and weights are not sharded here (zero 2 and 3). To do that for any
module, parameters must be something else than torch's users know: torch's `fully_shard` makes them DTensors, and says
so. The engine shards both in its plan, for models that it builds itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.data_parallel.stage_modules import StageModules
from tpengine.data_parallel.whole_gradients import WholeGradients
from tpengine.distributed.agreement import broadcast_model, check_same, describe_model, device_of
from tpengine.layers.replicated import check_beside_parallel_layers, clip_grad_norm_, num_parallel
from tpengine.model.meta_modules import is_on_meta

_FULLY_SHARD = (
    "wrap it in torch.distributed.fsdp.fully_shard instead (tpengine/examples/fully_shard.py), or train a model of "
    "your own by tpengine.train --model.architecture FILE.py with --parallel.zero"
)
# What to use instead of the stages that other programs are for.
_REMEDIES = {
    1: "leave zero out, and divide the optimizer's state by "
    "tpengine.data_parallel.ShardedOptimizer(optimizer_class, model.parameters(), replicas, ...)",
    2: _FULLY_SHARD,
    3: _FULLY_SHARD,
}


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
