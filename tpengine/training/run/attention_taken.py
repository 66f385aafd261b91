"""Whose attention a run takes, before a process group exists: what it will say, or why it cannot be what was asked for.

The layers choose for each call, by the same function (tpkernels.ops.attention.choice).
"""

from __future__ import annotations

import torch
from tpkernels.ops.attention.choice import Choice, Problem, Whose, choose

from tpengine.architectures import describe
from tpengine.architectures.registry import architecture_of
from tpengine.config import Config, phases_of

_NAMES = {"cudnn": "cuDNN", "flash": "FlashAttention", "math": "unfused", "varlen": "varlen_attn"}


def attention_taken(config: Config, device: torch.device) -> str:
    """Return whose attention the layers of a run take, and why, in one line; phase by phase where phases differ.

    Args:
        config: validated.
        device: where this rank computes.

    Raises:
        ValueError: train.attention is torch, and torch does not compute the attention of a layer alike.
    """
    if config.train.reduction == "exact":
        return "ours: exact mode's bits repeat"
    said = [_of_phase(phase.config, config.train.attention, device) for phase in phases_of(config)]
    text = said[0] if len(set(said)) == 1 else "; ".join(f"phase {i}: {words}" for i, words in enumerate(said, 1))
    repeats = "torch's" not in text or config.train.attention == "torch"
    return text if repeats else f"{text}; gradients may differ from run to run: --train.attention ours repeats them"


def _of_phase(config: Config, whose: Whose, device: torch.device) -> str:
    """Return whose attention the layers of a phase take; with how many of them, where they differ."""
    counts: dict[str, int] = {}
    for problem, number in _problems(config, device).items():
        said = _words(choose(problem, whose))
        counts[said] = counts.get(said, 0) + number
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{text} ({number} of {sum(counts.values())} layers)" for text, number in counts.items())


def _words(choice: Choice) -> str:
    whose = "ours" if choice.backend is None else f"torch's {_NAMES[choice.backend]}"
    return f"{whose}: {choice.reason}"


def _problems(config: Config, device: torch.device) -> dict[Problem, int]:
    """Return what the layers ask for, and how many of them each."""
    model, train, tp = config.model, config.train, config.parallel.tp or 1
    architecture = architecture_of(model)
    sizes = model.num_heads // tp, max(1, model.num_kv_heads // tp), model.head_size
    dtype, packed = getattr(torch, train.dtype), config.data.packing != "cut"
    found: dict[Problem, int] = {}
    for layer in range(model.num_layers):
        for part in architecture.block(model, layer).values():
            if isinstance(part, describe.Attention):
                windowed = 0 < part.window < train.seq_len
                one = Problem(device, dtype, train.seq_len, *sizes, windowed, packed, model.attention_dropout > 0)
                found[one] = found.get(one, 0) + 1
    return found
