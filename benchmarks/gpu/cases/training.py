"""Cases of whole training steps on one GPU: llama_1b against torch, the host's time, exact mode, the stages of ZeRO."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# As in tpengine.distributed.process: imported after the process group exists, it would keep that group alive.
import torch.distributed.nn.functional
from torch.profiler import ProfilerActivity, profile
from tpkernels.ops.attention.choice import Whose

from benchmarks.gpu.cases.clock import covered, device_here, gaps, on_device, write
from benchmarks.gpu.cases.steps import WARM_STEPS, OwnStep, Step, TorchStep, checked
from benchmarks.harness.timing import Spread, interleave, paired_ratios, spread_fields
from tpengine.config import Config
from tpengine.config.presets import preset_config
from tpengine.config.rules import validate
from tpengine.distributed.launch import loopback_variables
from tpengine.distributed.local_ranks import run_ranks
from tpengine.layout.flops import step_flops
from tpengine.observe.metrics import peak_flops_per_second
from tpengine.runs.opening import attention_taken

_MODULE = "benchmarks.gpu.cases.training"
# Of a loss in bfloat16; in float32 rounding explains far less.
_SAME_LOSS = 5e-3
_MOST_KERNELS, _MOST_GAPS = 12, 8
# With about a thousand under way, CUDA makes the host wait.
_MOST_LAUNCHES = 800


def own_step(rows: Path, preset: str, steps: int, attention: Whose, layers: int | None = None) -> int:
    """Measure our step: tokens/s, MFU, the host's time, what a profile says; return 1 if the loss is not one.

    Args:
        rows: where rows go, each with `attention` in its name.
        preset: the model.
        steps: samples.
        attention: whose, as the setting train.attention has it.
        layers: of the model; default all.
    """
    config, device = _started(preset, steps, layers, attention)
    own, case = OwnStep(config, device), f"train/{preset}/own_step/{attention}"
    check = checked(own, config)
    samples, of_host = [], []
    for _ in range(steps):
        samples.append(own.seconds())
        of_host.append(own.host_seconds)
    step = Spread.of(samples)
    fields = _of_step(config, step, device)
    if device.type == "cuda":
        fields["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    write(rows, case, fields, check)
    # CUDA lets the host run ahead by about a thousand launches: where the GPU is the slower one, the host waits for it,
    # and this says only that the step is not the host's. What the host needs: `host_time`.
    host = Spread.of(of_host)
    shares = {"launched_us": 1e6 * host.median, "launched_percent": 100 * host.median / step.median}
    write(rows, f"{case}/host", shares | {"num_samples": steps}, check)
    if device.type == "cuda":
        _profile(rows, case, own, step.median)
    return int(check != "passed")


def host_time(
    rows: Path, preset: str, steps: int, depths: tuple[int, int], micro_batches: tuple[int, int] = (1, 2)
) -> int:
    """Measure the host's time of small steps, and divide it; return 1 if the host may have waited.

    A layer, and the rest of the model, take the host some time for each micro-batch (forward and backward) and some
    once a step (the update):

        host = layers * (layer_per_step + n * layer_per_micro_batch) + rest_per_step + n * rest_per_micro_batch

    Args:
        rows: where the row goes.
        preset: the model.
        steps: samples of each.
        depths: two numbers of layers, so small that no step fills the queue of launches.
        micro_batches: two numbers of micro-batches.
    """
    config, device = _started(preset, steps, depths[0])
    fields: dict[str, Any] = {"num_samples": steps}
    medians, num_launches = dict[tuple[int, int], float](), 0
    for number in micro_batches:
        for layers in depths:
            own = OwnStep(_small(config, layers, number), device)
            samples = []
            for step in range(WARM_STEPS + steps):
                own.seconds()
                if step >= WARM_STEPS:
                    samples.append(own.host_seconds)
            medians[number, layers] = 1e6 * Spread.of(samples).median
            fields[f"host_{number}_micro_batches_{layers}_layers_us"] = medians[number, layers]
            if device.type == "cuda":
                num_launches = len(on_device(_recorded(own)))
                fields[f"num_launches_{number}_micro_batches_{layers}_layers"] = num_launches
            del own
    fields |= host_parts(medians, depths, micro_batches)
    # The last one is the largest.
    check = "passed"
    if num_launches > _MOST_LAUNCHES:
        check = f"failed: of {num_launches} launches in a step the host may wait for, {_MOST_LAUNCHES} are allowed"
    write(rows, f"train/{preset}/host", fields, check)
    return int(check != "passed")


def host_parts(
    medians_us: Mapping[tuple[int, int], float], depths: Sequence[int], micro_batches: Sequence[int]
) -> dict[str, float]:
    """Return the four parts of the host's time, which four measured steps determine.

    Args:
        medians_us: of a step, by its number of micro-batches and of layers.
        depths, micro_batches: two of each.
    """
    of_layer, of_rest = [], []
    for number in micro_batches:
        fewer, more = (medians_us[number, layers] for layers in depths)
        of_layer.append((more - fewer) / (depths[1] - depths[0]))
        of_rest.append(fewer - depths[0] * of_layer[-1])
    fields = {}
    for what, (few, many) in (("layer", of_layer), ("rest", of_rest)):
        per_micro_batch = (many - few) / (micro_batches[1] - micro_batches[0])
        fields[f"host_of_{what}_per_micro_batch_us"] = per_micro_batch
        fields[f"host_of_{what}_per_step_us"] = few - micro_batches[0] * per_micro_batch
    return fields


def _small(config: Config, layers: int, num_micro_batches: int) -> Config:
    model = replace(config.model, num_layers=layers)
    return validate(replace(config, model=model, train=replace(config.train, num_micro_batches=num_micro_batches)), 1)


# The second rival keeps what we keep, so it is the one at equal numerics.
_RIVALS = {"torch": False, "torch_float32": True}


def against_torch(
    rows: Path,
    preset: str,
    steps: int,
    layers: int | None = None,
    compiles: bool = True,
    attention: Whose = "auto",
    rivals: Sequence[str] = tuple(_RIVALS),
) -> int:
    """Measure our step and torch's in turns; return 1 if a loss is not one.

    Args:
        rows: where the row goes.
        preset: the model.
        steps: rounds.
        layers: of the model; default all.
        compiles: whether torch compiles its model.
        attention: whose ours has, as the setting train.attention has it.
        rivals: "torch" keeps all state in the weights' dtype, "torch_float32" in float32 as ours.
    """
    config, device = _started(preset, steps, layers, attention)
    sides: dict[str, Step] = {"ours": OwnStep(config, device)}
    sides |= {name: TorchStep(config, device, compiles=compiles, in_float32=_RIVALS[name]) for name in rivals}
    check = next((c for side in sides.values() if (c := checked(side, config)) != "passed"), "passed")
    first = {name: side.first_loss for name, side in sides.items()}
    if check == "passed" and not max(first.values()) - min(first.values()) <= _SAME_LOSS * first["ours"]:
        said = ", ".join(f"{name} {loss:.4f}" for name, loss in first.items())
        check = f"failed: with equal weights and tokens the first losses must agree: {said}"
    samples = interleave({name: side.seconds for name, side in sides.items()}, rounds=steps)
    fields = _of_step(config, Spread.of(samples["ours"]), device) | {"compiled": compiles, "attention": attention}
    # What was asked for is not what was taken; torch's side leaves it to torch.
    fields |= {"attention_taken": attention_taken(config, device), "rival_attention": "torch's default"}
    for name in rivals:
        fields |= spread_fields(name, "seconds", Spread.of(samples[name]))
        over = Spread.of(paired_ratios(samples["ours"], samples[name]))
        fields |= spread_fields(f"ours_over_{name}", "ratio", over)
    fields |= loss_fields({name: side.loss for name, side in sides.items()})
    write(rows, f"train/{preset}/against_torch", fields | {"num_samples": steps}, check)
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
    check = checked(fast, config)
    slow = OwnStep(exact, device)
    check = check if check != "passed" else checked(slow, exact)

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
    check = checked(own, config)
    return [own.seconds() for _ in range(steps)], check


def _started(preset: str, steps: int, layers: int | None, attention: Whose = "auto") -> tuple[Config, torch.device]:
    """Return the configuration of one process and its device; the process is the only one of a group."""
    if not dist.is_initialized():
        os.environ |= loopback_variables(os.environ)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    config = _config(preset, steps, layers, 1)
    return validate(replace(config, train=replace(config.train, attention=attention)), 1), device_here()


def _config(preset: str, steps: int, layers: int | None, ranks: int) -> Config:
    """Return a preset with some of its layers, and enough steps."""
    base = preset_config(preset)
    model = base.model if layers is None else replace(base.model, num_layers=layers)
    train = replace(base.train, steps=10 * (steps + WARM_STEPS) + 2)
    return replace(base, model=model, train=train, optim=replace(base.optim, warmup_steps=2))


def _tokens(config: Config) -> int:
    train = config.train
    return train.seq_len * train.micro_batch_size * train.num_micro_batches * (config.parallel.dp or 1)


def _of_step(config: Config, step: Spread, device: torch.device) -> dict[str, Any]:
    fields: dict[str, Any] = spread_fields("step", "seconds", step)
    fields["step_tokens_per_second"] = _tokens(config) / step.median
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_flops_per_second(name, config.train.dtype)
    # Attention's scores count half, as a causal kernel computes them, or whole, as many papers count.
    for how, half in (("half", True), ("whole", False)):
        flops_per_second = step_flops(config, causal_half=half) / step.median
        fields[f"model_attention_{how}_flops_per_second"] = flops_per_second
        if peak is not None:
            fields[f"mfu_attention_{how}_percent"] = 100 * flops_per_second / peak
    return fields


def _profile(rows: Path, case: str, own: OwnStep, step_seconds: float) -> None:
    """Write how much of a step the device was idle, and which kernels took its time.

    A step that is recorded takes the host longer, so the idle share is that of a step that was not.
    """
    kernels = on_device(_recorded(own))
    busy_us = covered((event.time_range.start, event.time_range.end) for event in kernels)
    idle = max(0.0, 100 * (1 - busy_us / (1e6 * step_seconds)))
    fields: dict[str, Any] = {"busy_us": busy_us, "idle_percent": idle, "num_kernels": len(kernels)}
    write(rows, f"{case}/profile", fields)
    times: dict[str, float] = {}
    for event in kernels:
        times[event.name] = times.get(event.name, 0.0) + event.time_range.end - event.time_range.start
    for place, name in enumerate(sorted(times, key=times.__getitem__, reverse=True)[:_MOST_KERNELS]):
        share = 100 * times[name] / max(busy_us, 1e-9)
        fields = {"kernel": name[:120], "kernel_us": times[name], "share_percent": share}
        write(rows, f"{case}/kernel_{place}", fields)
    # Of the recorded step, whose host is slower: they tell where the GPU waits, not for how long.
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in kernels]
    for place, gap in enumerate(gaps(spans)[:_MOST_GAPS]):
        fields = {"gap_us": gap.total, "num_gaps": gap.number, "before": gap.before[:120], "after": gap.after[:120]}
        write(rows, f"{case}/gap_{place}", fields)


def _recorded(own: OwnStep) -> profile:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        own.seconds()
    return recorded
