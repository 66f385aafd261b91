"""Cases of whole training steps on one GPU: llama_1b against torch, exact mode, the stages of ZeRO."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# As in tpengine.distributed.process: imported after the process group exists, it would keep that group alive.
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from tpkernels.random import normal_block

from benchmarks.gpu.cases.clock import covered, device_here, gaps, on_device, write
from benchmarks.harness.timing import Spread, interleave, paired_ratios, spread_fields
from benchmarks.training.torch_model import LlamaStage
from tpengine.config import Config
from tpengine.config.presets import preset_config
from tpengine.config.rules import validate
from tpengine.data import open_corpus
from tpengine.distributed.local_ranks import run_ranks
from tpengine.distributed.loopback import loopback_variables
from tpengine.layout.flops import step_flops
from tpengine.layout.parameters import stage_specs
from tpengine.observe.metrics import peak_flops_per_second
from tpengine.training.trainer import Trainer

_WARM_STEPS = 2
_MODULE = "benchmarks.gpu.cases.training"
# Of the logarithm of the vocabulary: where a model without knowledge begins.
_FIRST_LOSS = 0.1
# Of a loss in bfloat16; in float32 rounding explains far less.
_SAME_LOSS = 5e-3
_MOST_KERNELS, _MOST_GAPS = 12, 8
# With about a thousand under way, CUDA makes the host wait.
_MOST_LAUNCHES = 800


class OwnStep:
    """A step of ours, and how long the host took to launch it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._trainer, self._step = Trainer(config, open_corpus(config), device), 0
        self.host_seconds, self.loss, self.first_loss = 0.0, math.nan, math.nan

    def seconds(self) -> float:
        """Run a step; it ends with a wait for the device."""
        begin = time.perf_counter()

        def tell() -> tuple[float, ...]:
            self.host_seconds = time.perf_counter() - begin
            return ()

        self.loss = self._trainer.train_step(self._step, tell).loss
        self._step += 1
        return time.perf_counter() - begin


class TorchStep:
    """The same model and batches in torch: compiled, its fused AdamW, weights and moments in the model's dtype."""

    def __init__(self, config: Config, device: torch.device, *, compiles: bool) -> None:
        self._config, self._device, self._step = config, device, 0
        train, optim = config.train, config.optim
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, train.dtype))
        try:
            with device:
                model = LlamaStage(config.model, train.seq_len, (0, config.model.num_layers))
        finally:
            torch.set_default_dtype(before)
        _initialise(model, config, device)
        self._model, self._corpus, self.loss, self.first_loss = model, open_corpus(config), math.nan, math.nan
        self._loss_of: Any = torch.compile(self._loss) if compiles else self._loss
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
        )

    def _loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._model(tokens).flatten(0, 1).float(), labels.flatten())

    def seconds(self) -> float:
        """Run a step, and wait for the device."""
        begin, train = time.perf_counter(), self._config.train
        num_sequences = train.num_micro_batches * train.micro_batch_size
        batch = self._corpus.train.batch(self._step * num_sequences, num_sequences)
        tokens, labels = (torch.from_numpy(part).to(self._device).split(train.micro_batch_size) for part in batch)
        losses = []
        for x, y in zip(tokens, labels, strict=True):
            loss = self._loss_of(x, y) / train.num_micro_batches
            loss.backward()
            losses.append(loss.detach())
        clip = self._config.optim.clip_norm
        if clip:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        self.loss = float(sum(losses))
        return time.perf_counter() - begin


@torch.no_grad()
def _initialise(model: LlamaStage, config: Config, device: torch.device) -> None:
    """Give every parameter the value with which ours begins."""
    specs = {spec.name: spec for spec in stage_specs(config.model, 1, 0, config.model.num_layers)}
    for name, parameter in model.named_parameters():
        spec, size = specs[name], tuple(parameter.shape)
        if spec.init_std is None:
            parameter.fill_(1.0)
            continue
        how: dict[str, Any] = {"std": spec.init_std, "dtype": parameter.dtype, "device": device}
        parameter.copy_(normal_block(config.train.seed, name, spec.shape, (0,) * len(size), size, **how))


def own_step(rows: Path, preset: str, steps: int, layers: int | None = None) -> int:
    """Measure our step: tokens/s, MFU, what a profile says; return 1 if the loss is not one.

    The host's time is not among the figures: CUDA lets the host run ahead by about a thousand launches only, so in a
    step of many the host waits for the GPU. See `host_time`.
    """
    config, device = _started(preset, steps, layers)
    own = OwnStep(config, device)
    check = _checked(own, config)
    step = Spread.of([own.seconds() for _ in range(steps)])
    fields = _of_step(config, step, device)
    if device.type == "cuda":
        fields["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    write(rows, f"train/{preset}", fields, check)
    if device.type == "cuda":
        _profile(rows, preset, own, step.median)
    return int(check != "passed")


def host_time(rows: Path, preset: str, steps: int, depths: tuple[int, int]) -> int:
    """Measure the host's time of a step of one micro-batch, and of each layer; return 1 if it may have waited.

    Args:
        rows: where the row goes.
        preset: the model.
        steps: samples of each depth.
        depths: two numbers of layers, so small that no step fills the queue of launches; what a layer takes is the
            difference.
    """
    config, device = _started(preset, steps, depths[0])
    medians, check, num_launches = [], "passed", 0
    for layers in depths:
        model, train = replace(config.model, num_layers=layers), replace(config.train, num_micro_batches=1)
        own = OwnStep(validate(replace(config, model=model, train=train), 1), device)
        samples = []
        for step in range(_WARM_STEPS + steps):
            own.seconds()
            if step >= _WARM_STEPS:
                samples.append(own.host_seconds)
        medians.append(1e6 * Spread.of(samples).median)
        if device.type == "cuda":
            num_launches = len(on_device(_recorded(own)))
    if num_launches > _MOST_LAUNCHES:
        check = f"failed: of {num_launches} launches in a step the host may wait for, {_MOST_LAUNCHES} are allowed"
    (fewer, more), per_layer_us = depths, (medians[1] - medians[0]) / (depths[1] - depths[0])
    fields: dict[str, Any] = {f"host_{layers}_layers_us": us for layers, us in zip(depths, medians, strict=True)}
    fields |= {"host_per_layer_us": per_layer_us, "host_without_layers_us": medians[0] - fewer * per_layer_us}
    fields |= {"layers": more, "num_launches": num_launches, "num_samples": steps}
    write(rows, f"train/{preset}/host", fields, check)
    return int(check != "passed")


def against_torch(rows: Path, preset: str, steps: int, layers: int | None = None, compiles: bool = True) -> int:
    """Measure our step and torch's in turns; return 1 if a loss is not one."""
    config, device = _started(preset, steps, layers)
    sides: dict[str, OwnStep | TorchStep] = {
        "ours": OwnStep(config, device),
        "torch": TorchStep(config, device, compiles=compiles),
    }
    check = next((c for side in sides.values() if (c := _checked(side, config)) != "passed"), "passed")
    ours, theirs = (side.first_loss for side in sides.values())
    if check == "passed" and not abs(ours - theirs) <= _SAME_LOSS * theirs:
        check = (
            f"failed: with equal weights and tokens the first losses must agree: ours {ours:.4f}, torch {theirs:.4f}"
        )
    samples = interleave({name: side.seconds for name, side in sides.items()}, rounds=steps)
    fields = _of_step(config, Spread.of(samples["ours"]), device) | {"compiled": compiles}
    fields |= spread_fields("torch", "seconds", Spread.of(samples["torch"]))
    fields |= spread_fields("speedup", "ratio", Spread.of(paired_ratios(samples["torch"], samples["ours"])))
    fields |= loss_fields({name: side.loss for name, side in sides.items()})
    write(rows, f"train/{preset}/against_torch", fields, check)
    return int(check != "passed")


def loss_fields(losses: Mapping[str, float]) -> dict[str, int | None]:
    """Return the losses as fields of a row; None for one that is not finite, which no row can hold."""
    return {
        f"{name}_num_nats_in_1000": round(1000 * loss) if math.isfinite(loss) else None for name, loss in losses.items()
    }


def exact_price(rows: Path, preset: str, steps: int, layers: int) -> int:
    """Measure exact mode's step over fast mode's, in turns, with some of a model's layers."""
    config, device = _started(preset, steps, layers)
    exact = validate(replace(config, train=replace(config.train, reduction="exact")), 1)
    fast = OwnStep(config, device)
    check = _checked(fast, config)
    slow = OwnStep(exact, device)
    check = check if check != "passed" else _checked(slow, exact)

    def seconds(side: OwnStep, is_exact: bool) -> float:
        # Exact mode makes torch deterministic for the whole process, which would slow down the fast step.
        torch.use_deterministic_algorithms(is_exact)
        return side.seconds()

    turns = {"fast": functools.partial(seconds, fast, False), "exact": functools.partial(seconds, slow, True)}
    samples = interleave(turns, rounds=steps)
    ratio = Spread.of(paired_ratios(samples["exact"], samples["fast"]))
    fields: dict[str, Any] = {"layers": layers, "fast_median_seconds": Spread.of(samples["fast"]).median}
    write(rows, f"train/{preset}/exact", fields | spread_fields("exact_over_fast", "ratio", ratio), check)
    return int(check != "passed")


def zero_stages(rows: Path, preset: str, ranks: int, steps: int, layers: int) -> int:
    """Measure tokens/s of each stage of ZeRO against zero 0, by processes that share the GPU in turns.

    They meet over gloo, through the host: the figures compare stages, and say nothing about a link.
    """
    medians = {}
    wrong = 0
    for zero in range(4):
        config = _config(preset, steps, layers, ranks)
        config = validate(replace(config, parallel=replace(config.parallel, dp=ranks, zero=zero)), ranks)  # type: ignore[arg-type]
        seconds, check = run_ranks(ranks, f"{_MODULE}:rank_seconds", config, steps)
        medians[zero] = Spread.of(seconds).median
        tokens = _tokens(config) / medians[zero]
        fields: dict[str, Any] = {
            "ranks": f"{ranks} processes on one device",
            "zero": zero,
            "step_tokens_per_second": tokens,
        }
        fields |= {"speed_over_zero0_ratio": medians[0] / medians[zero], "layers": layers}
        write(rows, f"train/{preset}/zero_{zero}", fields, check)
        wrong |= check != "passed"
    return int(wrong)


def rank_seconds(config: Config, steps: int) -> tuple[list[float], str]:
    """Return the seconds of each step of one rank, and the check of its loss."""
    own = OwnStep(config, device_here())
    check = _checked(own, config)
    return [own.seconds() for _ in range(steps)], check


def _started(preset: str, steps: int, layers: int | None) -> tuple[Config, torch.device]:
    """Return the configuration of one process and its device; the process is the only one of a group."""
    os.environ |= loopback_variables(os.environ)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return validate(_config(preset, steps, layers, 1), 1), device_here()


def _config(preset: str, steps: int, layers: int | None, ranks: int) -> Config:
    """Return a preset with some of its layers, and enough steps."""
    base = preset_config(preset)
    model = base.model if layers is None else replace(base.model, num_layers=layers)
    train = replace(base.train, steps=10 * (steps + _WARM_STEPS) + 2)
    return replace(base, model=model, train=train, optim=replace(base.optim, warmup_steps=2))


def _checked(side: OwnStep | TorchStep, config: Config) -> str:
    """Run the first steps; return whether the loss begins where a model without knowledge does, and falls.

    It falls if any of the steps behind the first is lower: with so short a warm-up torch's goes 10.4, 8.6, 15.6.
    """
    side.seconds()
    first, want = side.loss, math.log(config.model.vocab_size)
    side.first_loss = first
    lowest = math.inf
    for _ in range(_WARM_STEPS):
        side.seconds()
        lowest = min(lowest, side.loss)
    name = type(side).__name__
    if not abs(first - want) <= _FIRST_LOSS * want:
        return f"failed: {name}: the loss must begin near {want:.2f}: got {first:.2f}"
    if not math.isfinite(side.loss):
        return f"failed: {name}: the loss must be finite: got {side.loss}"
    return "passed" if lowest < first else f"failed: {name}: the loss must fall: {first:.3f}, then {lowest:.3f}"


def _tokens(config: Config) -> int:
    train = config.train
    return train.seq_len * train.micro_batch_size * train.num_micro_batches * (config.parallel.dp or 1)


def _of_step(config: Config, step: Spread, device: torch.device) -> dict[str, Any]:
    fields: dict[str, Any] = spread_fields("step", "seconds", step)
    fields["step_tokens_per_second"] = _tokens(config) / step.median
    fields["model_flops_per_second"] = step_flops(config, causal_half=True) / step.median
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_flops_per_second(name, config.train.dtype)
    if peak is not None:
        fields["mfu_percent"] = 100 * fields["model_flops_per_second"] / peak
    return fields


def _profile(rows: Path, preset: str, own: OwnStep, step_seconds: float) -> None:
    """Write how much of a step the device was idle, and which kernels took its time.

    A step that is recorded takes the host longer, so the idle share is that of a step that was not.
    """
    kernels = on_device(_recorded(own))
    busy_us = covered((event.time_range.start, event.time_range.end) for event in kernels)
    idle = max(0.0, 100 * (1 - busy_us / (1e6 * step_seconds)))
    fields: dict[str, Any] = {"busy_us": busy_us, "idle_percent": idle, "num_kernels": len(kernels)}
    write(rows, f"train/{preset}/profile", fields)
    times: dict[str, float] = {}
    for event in kernels:
        times[event.name] = times.get(event.name, 0.0) + event.time_range.end - event.time_range.start
    for place, name in enumerate(sorted(times, key=times.__getitem__, reverse=True)[:_MOST_KERNELS]):
        share = 100 * times[name] / max(busy_us, 1e-9)
        fields = {"kernel": name[:120], "kernel_us": times[name], "share_percent": share}
        write(rows, f"train/{preset}/kernel_{place}", fields)
    # Of the recorded step, whose host is slower: they tell where the GPU waits, not for how long.
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in kernels]
    for place, gap in enumerate(gaps(spans)[:_MOST_GAPS]):
        fields = {"gap_us": gap.total, "num_gaps": gap.number, "before": gap.before[:120], "after": gap.after[:120]}
        write(rows, f"train/{preset}/gap_{place}", fields)


def _recorded(own: OwnStep) -> profile:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        own.seconds()
    return recorded
