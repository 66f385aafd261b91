"""What a step reports: the numbers of metrics.jsonl, computed from the step's time and the model's work.

MFU has two conventions: attention counted over the full square of scores (PaLM, appendix B) and halved, since a
causal model needs only half. Both are written, and on a device whose peak is unknown neither.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tpkernels.work import attention_work

from tpengine.config import Config
from tpengine.parameters import num_matmul_parameters

# Dense tensor-core peaks in FLOP/s from the vendor's data sheets (bfloat16; float32 as TF32 is not used by default).
_PEAK_BF16_FLOPS_PER_S = MappingProxyType(
    {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "MI300X": 1307e12}
)


def step_flops(config: Config, *, causal_half: bool) -> int:
    """Model flops of one step over all replicas: forward and backward, 3 times forward; recomputation not counted.

    3 * (2 * N_matmul * tokens + attention)
    """
    model, train = config.model, config.train
    sequences = train.micro_batch_size * train.num_micro_batches * (config.parallel.dp or 1)
    attention = attention_work(
        sequences,
        train.seq_len,
        model.num_heads,
        model.num_kv_heads,
        model.head_size,
        1,
        causal_half=causal_half,
    ).flops
    matmuls = 2 * num_matmul_parameters(model) * sequences * train.seq_len
    return 3 * (matmuls + attention * model.num_layers)


def peak_flops_per_second(device: torch.device, dtype: str) -> float | None:
    """The device's dense peak for bfloat16 training, or None where the data sheet does not tell (CPU, other dtypes)."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAK_BF16_FLOPS_PER_S.items() if key in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: on CUDA what torch allocated, else the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def step_record(
    config: Config,
    device: torch.device,
    *,
    step: int,
    loss: float,
    grad_norm: float,
    lr: float,
    step_seconds: float,
    peak_memory_bytes: int,
) -> dict[str, Any]:
    """Assemble one line of metrics.jsonl.

    Args:
        step: 0-based.
        loss: nats per valid target of the global step.
        grad_norm: before clipping.
        step_seconds, peak_memory_bytes: largest over ranks.

    Returns:
        The fields above, tokens_per_second, model_flops_per_second (attention full) and on a GPU
        mfu_attention_full and mfu_attention_causal.
    """
    train, world_size = config.train, (config.parallel.tp or 1) * (config.parallel.pp or 1) * (config.parallel.dp or 1)
    tokens = train.micro_batch_size * train.seq_len * train.num_micro_batches * (config.parallel.dp or 1)
    record: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "model_flops_per_second": step_flops(config, causal_half=False) / step_seconds,
        "peak_memory_bytes": peak_memory_bytes,
    }
    peak = peak_flops_per_second(device, train.dtype)
    if peak is not None:
        for name, half in (("mfu_attention_full", False), ("mfu_attention_causal", True)):
            record[name] = step_flops(config, causal_half=half) / step_seconds / (peak * world_size)
    return record


class MetricsWriter:
    """Writes records to `<run_dir>/metrics.jsonl`, and to TensorBoard if it is installed.

    Args:
        run_dir: existing directory. A metrics.jsonl that is already there is kept as metrics.<n>.jsonl.

    Attributes:
        kept: where an earlier file went, or None.
        tensorboard: whether events are written.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "metrics.jsonl"
        self.kept = keep_aside(path)
        self._file = path.open("w", buffering=1)
        self._events: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            pass
        else:
            self._events = SummaryWriter(str(run_dir))
        self.tensorboard = self._events is not None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; the file is complete up to it when this returns."""
        self._file.write(json.dumps(record) + "\n")
        if self._events is not None:
            for name, value in record.items():
                if name != "step":
                    self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def keep_aside(path: Path) -> Path | None:
    """Rename an existing file to the first free `name.<n>.suffix`, so that nothing is overwritten.

    Returns:
        Where it went; None if there was no file.
    """
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    return aside
