"""Data parallelism for any `nn.Module`, whole (zero 0) or sharded over the replicas (zero 1, 2, 3).

Nothing wraps the model: hooks on it do the work, and its names and its state dict stay its own.

What is deliberately elsewhere: what each stage does (any_module), counting and order (buckets), transport
(collectives). torch's `nn.parallel.DistributedDataParallel` and `fully_shard` offer the same, tuned for NCCL and with
more knobs (communication hooks, buffers synchronised at each forward, CPU offload), and are the ones to take for those.
Different here: the order of collectives is fixed when the buckets are made, so parameters that only some ranks use need
no option; shared and frozen parameters need no thought; and a parameter stays one tensor of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn import Parameter

from tpengine.data_parallel.any_module.forwards import StageModules
from tpengine.data_parallel.any_module.sliced_replicas import SlicedReplicas
from tpengine.data_parallel.any_module.units import choose_units
from tpengine.data_parallel.any_module.whole_gradients import WholeGradients
from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.distributed.agreement import broadcast_model, check_same, describe_model, device_of
from tpengine.layers.collectives import Communicator
from tpengine.layers.replicated.clip import clip_grad_norm_
from tpengine.layers.replicated.modules import check_beside_parallel_layers, num_parallel
from tpengine.model.meta_modules import is_on_meta

_STAGES = (0, 1, 2, 3)


class DataParallel:
    """Keep a model's gradients the mean over its replicas.

        grad = sum over replicas of grad_of_replica / R

        replicas = DataParallel(model, Communicator(dist.group.WORLD), zero=2)
        optimizer = torch.optim.AdamW(replicas.parameters())
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
            holds one dtype and one device, from zero 1 on of one unit. torch's own default is about the same.
        zero: what the replicas shard: 0 nothing; 1 the optimizer's state; 2 gradients too; 3 weights too, trained
            and frozen.
        units: modules inside the model that are gathered, freed and summed together, in the order of their use. None
            for the layers of its stacks (ModuleList, Sequential) and the children beside them, in the order of
            registration. What lies in no unit, or in several, is whole as long as a pass over the model runs.

    Attributes:
        zero: as given.
        buckets: the flat buffers of gradients; at zero 0 bucket 0 holds the parameters registered last.

    Raises:
        ValueError: ranks differ in their parameters (name, shape, strides, dtype, frozen or trained, shared or not),
            buffers, stage, units or `bucket_bytes`; raised on every rank. A parameter is whole on every rank of the
            model's tensor-parallel layers, and nothing sums its gradient over them: see layers.replicate. The model is
            on the meta device. From zero 1 on: one replica, several devices, units that overlap. From backward: a
            gradient is sparse.
        RuntimeError: from backward at zero 0 and 1, the one before was not followed by `finish`; from `finish`, a
            frozen parameter has been thawed, or another parameter has taken the place of one. From zero 1 on: an
            optimizer was made of the model's own parameters; a state dict was asked for outside of `whole`. At zero 3:
            a unit is called without the model, or used again in the same forward after another one. Where weights
            exist once: a master was written after a forward, before `finish` or an optimizer's step.

    The gradients at zero 0: `.grad` is a view of a bucket, and zero_grad may set it to None or to zero. A parameter
        whose `.grad` is None on every replica keeps None, so that weight decay leaves it alone as in one process; used
        on some replicas only, it gets the mean over all on each of them. The views are used again by the next backward:
        clone what must last. Between backward and `finish` gradients must not be touched; clip after `finish`.
    From zero 1 on: the same, of the masters, `parameters()`; the model's own `.grad` is None. Every step begins with
        new gradients. The first forward after `finish`, or after an optimizer's step, sees the updated weights. At zero
        2 and 3 each backward is summed by itself, any number of them before `finish`; replicas may run different
        numbers of passes, or none. At zero 3 a weight is whole inside the model's forward and backward, and inside
        `whole`; elsewhere its elements are NaN. The last two units, and what lies in none, stay whole after a forward,
        until its backward ends or something else follows.
    BatchNorm: statistics are each replica's own, of its own part of the batch, as are all buffers after construction.
    Activation checkpointing: with use_reentrant=False; the reentrant kind runs a backward inside backward.
    Cost: zero 0: one all-reduce per bucket and step, of its bytes and one element more per parameter. On CUDA the
        host waits for the counts only of buckets with a parameter unused on this rank. Zero 1: a reduce-scatter and a
        gather per step; 2: a reduce-scatter per backward; 3: that, and a gather per forward and per backward. Zero 2
        and 3: the host waits for one element at the beginning of each pass.
    Memory per weight, with AdamW, over d replicas (bfloat16; float32): zero 0 the buckets beside the model's; 1: 6 +
        12/d; 8 + 8/d. 2: 2 + 16/d; 4 + 12/d. 3: 18/d; 16/d. On top of it at zero 2 and 3 the gradients of units whose
        sums have not ended, at zero 3 the weights of two units and what lies in no unit. Replicas that share the memory
        of a host have weights once from zero 1 on: per rank 1/d of their bytes, none on top, and nothing is gathered;
        2/d and 4/d instead of 2 and 4 at zero 1 and 2.
    Order: zero 0: buckets are in the reverse order of registration, which is about the order in which backward
        completes them; they are reduced in that order on every rank, each as soon as it and all before it are complete.
        From zero 1 on the order is that of the units. The constructor, `finish`, `gather`, `whole`, `clip_grad_norm_`
        and `remove` are collective, and the first forward after `finish`; at zero 3 every forward and backward. Where
        weights exist once, so is an optimizer's step that a forward, and no `finish`, came before.
    Numerics: sums are taken in the parameters' own dtype, from zero 1 on in float32 or wider, then divided by R; at
        zero 0 divided first where R is a power of two. The same on every run where the transport adds in a fixed order.
    """

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        bucket_bytes: int = 25_000_000,
        *,
        zero: int = 0,
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        if is_on_meta(model):
            raise ValueError(
                "a model must have its values before they are made equal on all replicas: parameters or buffers are on "
                "the meta device: fill it first, with to_empty and reset_parameters, or by a Pipeline's init"
            )
        _check_stage(model, communicator, zero)
        modules = choose_units(model, units) if zero else []
        names = {module: name for name, module in model.named_modules()}
        same = [f"bucket_bytes {bucket_bytes}", *describe_model(model), f"zero {zero}"]
        same += [f"unit {names[module]}" for module in modules]
        check_same(same, device_of(model), communicator)
        check_beside_parallel_layers(model)
        broadcast_model(model, communicator)
        self.zero, self._model = zero, model
        self.stage: WholeGradients | SlicedReplicas = (
            SlicedReplicas(model, communicator, zero, modules, bucket_bytes)
            if zero
            else WholeGradients(model, communicator, bucket_bytes)
        )

    @property
    def buckets(self) -> GradientBuckets:
        """Return the flat buffers of gradients."""
        return self.stage.buckets if isinstance(self.stage, WholeGradients) else self.stage.gradients

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield what an optimizer is to update: name and parameter.

        At zero 0 these are the model's trained parameters. From zero 1 on they are masters: the elements of each that
        this replica owns, one dim, in float32 or wider. A replica may own none of some. So any optimizer that treats
        each element by itself is right: SGD, Adam, AdamW; none that looks at a matrix as such.
        """
        if isinstance(self.stage, SlicedReplicas):
            yield from self.stage.weights.masters.items()
        else:
            yield from ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)

    def parameters(self) -> Iterator[Parameter]:
        """Yield what an optimizer is to update, without names."""
        return (parameter for _, parameter in self.named_parameters())

    def finish(self) -> None:
        """Wait until every gradient is the mean over the replicas.

        Call it on every rank after each backward outside `no_sync`, and also on a rank that had none: the others wait
        for it, and it contributes zeros. At zero 2 and 3 call it once for any number of backward passes.

        At zero 0 it reduces whatever `.grad` holds, so a second call in a row (on all ranks) takes the mean of equal
        gradients: harmless, and as dear as the first. From zero 1 on it gives the gradients of the backward passes
        since the last call: after a second one in a row there are none.
        """
        self.stage.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside only accumulate here; the next one outside, or `finish`, reduces the whole sum.

        Entering counts for backward, not for forward. At zero 2 and 3 it changes nothing: no whole sum is kept.
        """
        return self.stage.no_sync()

    def gather(self) -> None:
        """Bring the updated weights to all replicas now; collective.

        The first forward does it anyway. This is for what optimizers that are not torch's have changed, and for weights
        that are read outside of any module's forward.
        """
        if isinstance(self.stage, SlicedReplicas):
            self.stage.gather()

    def whole(self) -> AbstractContextManager[None]:
        """Let the model's weights be whole inside, for state_dict, load_state_dict and changes; collective.

            with replicas.whole():
                state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        What state_dict returns are the weights themselves: save or clone them inside. If a weight is written on any
        rank (load_state_dict, an average), rank 0's values of all weights and buffers go to all ranks at the end, and
        the masters follow.
        """
        return self.stage.whole() if isinstance(self.stage, SlicedReplicas) else nullcontext()

    def clip_grad_norm_(
        self, max_norm: float, tp: Communicator | None = None, pp: Communicator | None = None
    ) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before; collective.

        torch.nn.utils.clip_grad_norm_ sees this replica's slices only, from zero 1 on. Call it after `finish`.

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
        if isinstance(self.stage, SlicedReplicas):
            return self.stage.clip_grad_norm_(max_norm, [axis for axis in (tp, pp) if axis is not None])
        return clip_grad_norm_(self._model, max_norm, tp or Communicator(None), pp)

    def remove(self) -> None:
        """Take the hooks off the model; gradients keep their values and are summed no more.

        From zero 1 on it is collective, and leaves the weights whole.
        """
        self.stage.remove()


def _check_stage(model: nn.Module, communicator: Communicator, zero: int) -> None:
    if zero not in _STAGES:
        raise ValueError(f"zero must be one of the stages 0 to 3: got {zero}: use 0, 1, 2 or 3")
    if zero and communicator.size == 1:
        raise ValueError(
            f"zero shards what replicas hold alike: zero {zero} with one replica saves nothing: use two ranks or "
            "more, or zero 0"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if zero and len(devices) > 1:
        raise ValueError(
            f"slices lie on one device: zero {zero} with parameters on {', '.join(sorted(devices))}: move the model to "
            "one, or use zero 0"
        )
