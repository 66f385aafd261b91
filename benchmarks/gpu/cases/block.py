"""The case of one block as CUDA graphs: what a micro-batch's forward and backward take launch by launch, and replayed.

The gap is the host's: a graph has the same kernels, and costs one launch. Weights' gradients are added to float32
buffers as in training; what a step does besides blocks is in no graph here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from benchmarks.gpu.cases.clock import agreement, device_here, host_seconds, medians, settle, write
from benchmarks.harness.timing import PASSED, Spread, interleave, paired_ratios, spread_fields
from tpengine.architectures.registry import architecture_of
from tpengine.config import Config
from tpengine.config.presets import preset_config
from tpengine.layers.gradient_sink import GradientSink
from tpengine.model.block import Block
from tpengine.model.parts import FastParts

_WARM_CALLS = 3
# Weights that share their input: their gradients are one product, as in training.
_PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Nobody:
    """Counts no contributions."""

    def contributed(self, index: int) -> None:
        """Do nothing."""


class MicroBatch:
    """A block with what a micro-batch of it needs: all tensors stay where they are, as a graph wants them.

    Args:
        config: of the model; the first of its blocks is taken.
        device: of everything.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        model, train, sink = config.model, config.train, GradientSink()
        dtype, architecture = getattr(torch, train.dtype), architecture_of(model)
        parts = FastParts(model, Communicator(None), sink=sink, dtype=dtype, device=device)
        self._block, self._seq = Block(parts, architecture.block(model, 0), architecture.order), train.seq_len
        generator = torch.Generator(device).manual_seed(0)

        def normal(*sizes: int, std: float = 1.0) -> Tensor:
            return torch.randn(sizes, generator=generator, device=device).mul_(std).to(dtype)

        with torch.no_grad():
            for weight in self._block.parameters():
                if weight.dim() > 1:
                    weight.copy_(normal(*weight.shape, std=model.hidden_size**-0.5))
                else:
                    weight.fill_(1)
        wide = torch.promote_types(dtype, torch.float32)
        self.sums = {weight: torch.zeros_like(weight, dtype=wide) for weight in self._block.parameters()}
        packs = {}
        for names in _PACKED:
            weights = tuple(w for name, w in self._block.named_parameters() if name.split(".")[-2] in names)
            rows = [len(weight) for weight in weights]
            packs[weights] = torch.zeros(sum(rows), model.hidden_size, dtype=wide, device=device)
            self.sums |= zip(weights, packs[weights].split(rows), strict=True)
        sink.attach({weight: (total, 0) for weight, total in self.sums.items()}, _Nobody(), packs)
        tokens = train.seq_len * train.micro_batch_size
        self.x, self.dy = normal(tokens, model.hidden_size).requires_grad_(), normal(tokens, model.hidden_size)

    def forward(self) -> Tensor:
        """Return y[T, D]."""
        y: Tensor = self._block(self.x, self._seq)
        return y

    def backward(self, y: Tensor) -> Tensor:
        """Return dx[T, D], and add weights' gradients to their sums."""
        (dx,) = torch.autograd.grad(y, self.x, self.dy)
        return dx

    def both(self) -> tuple[Tensor, Tensor]:
        """Return y and dx."""
        y = self.forward()
        return y, self.backward(y)

    def results(self, call: Callable[[], tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return y, dx and the weights' gradients of one micro-batch."""
        for total in self.sums.values():
            total.zero_()
        return [t.detach().clone() for t in (*call(), *self.sums.values())]


def as_graphs(rows: Path, preset: str, rounds: int = 10, calls: int = 20) -> int:
    """Measure a block's micro-batch launched and replayed, in turns; return 1 if graphs compute something else.

    Args:
        rows: where the row goes. Where nothing can be captured, a row says so; without a GPU it has no graphs.
        preset: the model.
        rounds: samples.
        calls: micro-batches of a sample, behind each other as in a step.
    """
    config, device = preset_config(preset), device_here()
    micro_batch = MicroBatch(config, device)
    train = config.train
    fields: dict[str, Any] = {"num_tokens": train.seq_len * train.micro_batch_size, "num_samples": rounds}
    fields["host_us"] = 1e6 * host_seconds(micro_batch.both, device, calls)
    ways: dict[str, Callable[[], object]] = {"eager": micro_batch.both}
    check = PASSED
    if device.type == "cuda":
        want = micro_batch.results(micro_batch.both)
        try:
            forward, backward, replayed = _captured(micro_batch)
        except RuntimeError as error:
            check = f"failed: a block cannot be captured: {' '.join(str(error).split())[:200]}"
        else:
            check = agreement(want, micro_batch.results(replayed))
            ways |= {"graph": replayed, "graph_forward": forward, "graph_backward": backward}
    if check == PASSED:
        fields |= _times(ways, device, rounds, calls)
    write(rows, f"graph/{preset}/block", fields, check)
    return int(check != PASSED)


def _captured(
    micro_batch: MicroBatch,
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], tuple[Tensor, Tensor]]]:
    """Return the replays of forward, of backward, and of both with what they write."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    # Compiled, loaded and allocated before: none of that can be captured.
    with torch.cuda.stream(aside):
        for _ in range(_WARM_CALLS):
            micro_batch.both()
    torch.cuda.current_stream().wait_stream(aside)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        y = micro_batch.forward()
    with torch.cuda.graph(backward, pool=forward.pool()):
        dx = micro_batch.backward(y)

    def replayed() -> tuple[Tensor, Tensor]:
        forward.replay()
        backward.replay()
        return y, dx

    return forward.replay, backward.replay, replayed


def _times(ways: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, calls: int) -> dict[str, float]:
    """Return each way's time per micro-batch, host and device together, and the device's alone."""
    timers = {name: functools.partial(_seconds, call, device, calls) for name, call in ways.items()}
    samples = interleave(timers, rounds=rounds, warmup=1)
    fields = {f"{name}_us": 1e6 * Spread.of(seconds).median for name, seconds in samples.items()}
    on_device = medians(ways, device, rounds)
    fields |= {f"{name}_on_device_us": 1e6 * spread.median for name, spread in on_device.items()}
    if "graph" in samples:
        over = Spread.of(paired_ratios(samples["graph"], samples["eager"]))
        fields |= spread_fields("graph_over_eager", "ratio", over)
    return fields


def _seconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    settle(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    settle(device)
    return (time.perf_counter() - begin) / calls
