"""What a training step launches, without a GPU: the engine's own trainer runs its plan on tensors without memory.

Launches of Triton kernels are observed (tpkernels.launch.observed). torch's operators are seen by a dispatch mode, and
each is counted as the kernels that it is known to launch: none for a view or an allocation, one for most, and for
operators on lists of tensors as many as torch cuts them into. A product counts as one; cuBLAS may split it and launch a
second kernel that adds the parts up. Only a GPU's profile shows that (`python -m benchmarks.run gpu`).

Gradients are packed as on a GPU, but two choices need a real one: attention and weight gradients are counted as our
kernels, where sm_90 by default takes cuDNN's attention, if it is new enough, and torch.addmm for each weight gradient.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tpkernels.launch import Target, observed

from tpengine.config import Config
from tpengine.config.presets import preset_config
from tpengine.config.rules import validate
from tpengine.data import open_corpus
from tpengine.distributed.launch import loopback_variables
from tpengine.plan import Action, Kind
from tpengine.runs.trainer import Trainer
from tpengine.training.step_batch import MicroBatches, StepBatch

META = torch.device("meta")
# Whose kernels are counted where a GPU may take torch's, as rows say it.
COUNTED: Mapping[str, str] = MappingProxyType({"attention": "ours", "weight_gradients": "ours"})
# Parts of a step, as rows call them.
FORWARD, BACKWARD, END, OTHER = "forward", "backward", "end", "other"
_PARTS: Mapping[Kind, str] = MappingProxyType({Kind.F: FORWARD, Kind.B: BACKWARD, Kind.CLIP: END, Kind.STEP: END})
# They make tensors, and launch nothing.
_ALLOCATE = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "alias"}
)
# torch cuts lists of tensors into chunks of so many elements. A launch takes 320 chunks, and so many tensors if each of
# the operator's lists gives one (ATen/native/cuda/MultiTensorApply.cuh).
_CHUNK, _CHUNKS_PER_LAUNCH, _TENSORS_PER_LAUNCH = 65536, 320, (110, 64, 48, 36, 30)
# How many lists operators take; a norm is finished by another kernel.
_LISTS: Mapping[str, int] = MappingProxyType(
    {"_foreach_norm": 1, "_foreach_mul_": 1, "_foreach_zero_": 1, "_fused_adamw_": 4}
)


class Launch(NamedTuple):
    """Launches of one kernel by one call.

    Attributes:
        part: FORWARD, BACKWARD, END or OTHER.
        kernel: a Triton kernel's name, or "aten." and the operator's.
        number: of launches.
        operands_bytes: of all tensors that it reads or writes, each once.
        call: kernel, grid, arguments and options; None for torch's.
    """

    part: str
    kernel: str
    number: int
    operands_bytes: int
    call: tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]] | None = None


class _Watch(TorchDispatchMode):
    """Notes every launch of the part that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.launches = OTHER, list[Launch]()

    def observe(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note a launch of a Triton kernel; see tpkernels.launch.observed."""
        bases = [getattr(argument, "base", argument) for argument in arguments]
        call = kernel, grid, arguments, options
        self.launches.append(Launch(self.part, kernel.fn.__name__, 1, _bytes_of(bases), call))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "tpkernels":
            # Without memory torch would call the operator's fake, which launches nothing.
            with self:
                return OPDEFS[func.name().removesuffix("." + func._overloadname)]._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        number, leaves = num_kernels(func, args), tree_leaves((args, kwargs, result))
        # What touches the host's tensors alone launches nothing.
        if number and any(isinstance(leaf, Tensor) and leaf.device == META for leaf in leaves):
            self.launches.append(Launch(self.part, f"aten.{func.overloadpacket.__name__}", number, _bytes_of(leaves)))
        return result


def num_kernels(func: Any, args: Sequence[Any]) -> int:
    """Return how many kernels an operator of torch is known to launch on a GPU."""
    name, returns = func.overloadpacket.__name__, func._schema.returns
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    if is_view or name in _ALLOCATE:
        return 0
    if name in _LISTS:
        return _num_of_lists([tensor.numel() for tensor in args[0]], _LISTS[name]) + (name == "_foreach_norm")
    return 1


def _num_of_lists(sizes: Sequence[int], num_lists: int) -> int:
    """Return the launches of an operator on lists of tensors of these numbers of elements."""
    launches = chunks = tensors = 0
    for size in sizes:
        tensors += 1
        left = -(-size // _CHUNK)
        while left:
            taken = min(left, _CHUNKS_PER_LAUNCH - chunks)
            chunks, left = chunks + taken, left - taken
            is_full = not left and tensors == _TENSORS_PER_LAUNCH[num_lists - 1]
            if chunks == _CHUNKS_PER_LAUNCH or is_full:
                launches, chunks, tensors = launches + 1, 0, int(left > 0)
    return launches + (chunks > 0)


def _bytes_of(leaves: Sequence[Any]) -> int:
    """Return the bytes of all tensors, each once, without those that an expanded dim repeats."""
    found: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for x in leaves:
        if isinstance(x, Tensor):
            sizes = [size if stride else 1 for size, stride in zip(x.shape, x.stride(), strict=True)]
            place = x.untyped_storage()._cdata, int(x.storage_offset()), tuple(sizes)
            found[place] = x.element_size() * math.prod(sizes)
    return sum(found.values())


def step_of(preset: str, num_layers: int, target: Target) -> list[Launch]:
    """Return what a step of one micro-batch launches, on one GPU of that target, in order.

    Args:
        preset: a model's configuration.
        num_layers: instead of the preset's.
        target: which GPU.
    """
    base = preset_config(preset)
    train = replace(base.train, num_micro_batches=1, attention="ours")
    config = replace(base, model=replace(base.model, num_layers=num_layers), train=train)
    watch = _Watch()
    with _one_rank():
        trainer = Trainer(validate(config, 1), open_corpus(config), META, draws=False, packs_gradients=True)
        try:
            _watch_parts(trainer, watch)
            trainer.step.batch.step = _batch(config)
            # torch knows no autocast of meta.
            no_autocast = patch.object(torch, "is_autocast_enabled", lambda *_: False)
            with observed(target, watch.observe), no_autocast, watch:
                trainer.step._run_plan(0)  # what every later step finds, such as tables of angles
                watch.launches.clear()
                trainer.step._run_plan(1)
        finally:
            trainer.close()
    return watch.launches


def _watch_parts(trainer: Trainer, watch: _Watch) -> None:
    """Have the watch told which action runs."""
    handlers: Any = trainer.step.executor.handlers

    def within(part: str, handler: Any) -> Any:
        def handle(action: Action) -> None:
            watch.part = part
            handler(action)
            watch.part = OTHER

        return handle

    for kind, part in _PARTS.items():
        handlers[kind] = within(part, handlers[kind])
    begin = trainer.step._begin

    def begin_step() -> None:
        watch.part = END  # gradients are zeroed here, for the next step
        begin()
        watch.part = OTHER

    trainer.step._begin = begin_step  # type: ignore[method-assign]


def _batch(config: Config) -> StepBatch:
    tokens = torch.empty(1, config.train.micro_batch_size * config.train.seq_len, dtype=torch.int64, device=META)
    scale, usable = (torch.empty((), dtype=dtype, device=META) for dtype in (torch.float64, torch.bool))
    return StepBatch(MicroBatches(tokens, tokens), scale, usable, torch.empty(1, 1, 1, 3, dtype=torch.int64))


@contextmanager
def _one_rank() -> Iterator[None]:
    """Be the only rank of a process group, unless there is one."""
    if dist.is_initialized():
        yield
        return
    os.environ |= loopback_variables(os.environ)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
