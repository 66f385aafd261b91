"""What a step reports: the numbers of metrics.jsonl, computed from the step's time and the model's flops.

MFU has two conventions: attention counted over the full square of scores (PaLM, appendix B), or half of it, since a
causal model needs only half. Both are written; neither is on a device whose peak is unknown.

A thread writes them (`BackgroundWriter`): training does not wait for the run's directory, however slow it is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import queue
import re
import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tpengine import journal
from tpengine.config import Config
from tpengine.files import keep_aside
from tpengine.layout.flops import step_flops
from tpengine.observe.wandb_run import WandbRun

# Dense peaks in FLOP/s from the vendors' data sheets, by a pattern of the device's name; the first match counts.
# float32 is without TF32, which torch leaves off by default.
_PEAK_FLOPS_PER_S: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        r"\bB200\b": {"bfloat16": 2250e12, "float32": 75e12, "float64": 37e12},
        r"\bH200\b|\bH100\b(?!.*PCIe|.*NVL)": {"bfloat16": 989e12, "float32": 67e12, "float64": 67e12},
        r"\bH100\b.*PCIe": {"bfloat16": 756e12, "float32": 51e12, "float64": 51e12},
        r"\bA100\b": {"bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
        r"\bMI300X\b": {"bfloat16": 1307e12, "float32": 163e12, "float64": 163e12},
    }
)
# Of metrics.jsonl, in bytes: a mixture may have 256 sources, of which a row says three numbers each.
_LONGEST_ROW = 2**18


def peak_flops_per_second(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of a GPU by torch's name for it, or None if it is not in the table."""
    # The 16-bit types have one peak.
    dtype = "bfloat16" if dtype == "float16" else dtype
    for pattern, peaks in _PEAK_FLOPS_PER_S.items():
        if re.search(pattern, device_name):
            return peaks.get(dtype)
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: on CUDA what torch allocated, else the resident set."""
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
    skipped: bool = False,
    skipped_steps: int = 0,
    overflowed: bool = False,
    loss_scale: float | None = None,
    wall_seconds: float | None = None,
    spiked: bool = False,
    stage_waits: Sequence[float] = (),
    metrics: Mapping[str, float] = MappingProxyType({}),
    loads: Mapping[str, float] = MappingProxyType({}),
    is_second: bool = False,
) -> dict[str, Any]:
    """Return one line of metrics.jsonl.

    Args:
        step: from 0; the row has the number of finished steps (journal.py).
        loss: nats per valid target of the global step.
        grad_norm: before clipping.
        step_seconds, peak_memory_bytes: largest over ranks.
        skipped: whether the step's update was left out because loss or norm are not finite.
        skipped_steps: number of such steps up to and including this one.
        overflowed: whether it was left out because its loss scale was too large; not among `skipped_steps`.
        loss_scale: that the step ran with; None where there is none.
        wall_seconds: since the row before: the step, and what followed the step before (its evaluation and sample, the
            copy of a checkpoint, comparing replicas, logging); on rank 0.

        spiked: whether it was left out because its loss or norm leaps: the row is then that of an event, `skip`, and
            has them as spike_loss and spike_grad_norm.
        stage_waits: how long each stage waited for the stages beside it, the longest of its ranks; empty where there is
            no pipeline, or its waits are not known to the host (on a GPU).
        metrics: the run's own, by name; they are fields metric/NAME.
        loads: how even experts were used, by name (training/expert_loads.py); of a dense model none.
        is_second: whether it was computed a second time, as rows of experts had no room: then `computed_twice` is true.

    Returns:
        The fields above, tokens_per_second, model_flops_per_second (attention full), of a pipeline on CPUs `bubble`
        (the mean of its stages' waits as a share of the step), and on a GPU
        mfu_attention_full and mfu_attention_causal (where its peak is known).
    """
    train, parallel = config.train, config.parallel
    assert parallel.tp and parallel.pp and parallel.dp, "resolve the layout first: config.validate"
    world_size = parallel.tp * parallel.pp * parallel.dp
    tokens = train.micro_batch_size * train.seq_len * train.num_micro_batches * parallel.dp
    record: dict[str, Any] = {
        "step": step + 1,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "model_flops_per_second": step_flops(config, causal_half=False) / step_seconds,
        "peak_memory_bytes": peak_memory_bytes,
        "skipped": skipped,
        "skipped_steps": skipped_steps,
    }
    record |= {f"metric/{name}": value for name, value in metrics.items()}
    record |= loads
    if is_second:
        record["computed_twice"] = True
    if spiked:
        record |= {"event": "skip", "spike_loss": record.pop("loss"), "spike_grad_norm": record.pop("grad_norm")}
    if stage_waits:
        record["bubble"] = sum(stage_waits) / len(stage_waits) / step_seconds
    if wall_seconds is not None:
        record |= {"wall_seconds": wall_seconds, "wall_tokens_per_second": tokens / wall_seconds}
    if loss_scale is not None:
        record |= {"loss_scale": loss_scale, "overflowed": overflowed}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_flops_per_second(name, train.dtype)
    if peak is not None:
        for field, half in (("mfu_attention_full", False), ("mfu_attention_causal", True)):
            record[field] = step_flops(config, causal_half=half) / step_seconds / (peak * world_size)
    return record


def left_out_record(step: int, skipped_steps: int) -> dict[str, Any]:
    """Return the line of a step, from 0, that was skipped before the run was restarted, and is not computed again."""
    return {"step": step + 1, "skipped": True, "left_out": True, "skipped_steps": skipped_steps}


class MetricsWriter:
    """Writes records to `<run_dir>/metrics.jsonl`, and to TensorBoard if it is installed.

    Args:
        run_dir: existing directory. A metrics.jsonl that is already there is kept as metrics.<n>.jsonl.
        num_steps: for a run that continues: records of so many finished steps stay, the others are removed, because
            the run repeats these steps. None for a new run.
        wandb: takes the records too; None for nobody.

    Attributes:
        kept: the new name of an earlier file, or None.
        tensorboard: whether events are written.
    """

    def __init__(self, run_dir: Path, num_steps: int | None = None, wandb: WandbRun | None = None) -> None:
        self._wandb = wandb
        path = run_dir / "metrics.jsonl"
        if num_steps is None:
            self.kept = keep_aside(path)
        else:
            self.kept = None
            _keep_records_until(path, num_steps)
        self._path, self._has_failed = path, False
        self._open(num_steps)
        self.tensorboard = self._events is not None

    def _open(self, num_steps: int | None) -> None:
        self._file = self._path.open("a", buffering=1)
        self._events: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._events = SummaryWriter(str(self._path.parent), purge_step=None if num_steps is None else num_steps + 1)

    def go_back(self, num_steps: int) -> None:
        """Keep the records of so many finished steps; later ones are removed, which the run repeats; rollbacks stay."""
        self._close_files()
        try:
            _keep_records_until(self._path, num_steps)
        except OSError as error:
            self._say_failure(error)
        self._open(num_steps)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; when this returns, the file is complete up to it. JSON has no NaN: null is written.

        A full disk does not end the run: it is reported once, and records that could not be written are tried again
        with the next one.
        """
        if self._wandb is not None:
            self._wandb.add(record["step"], record)
        try:
            finite = {name: None if _is_not_finite(value) else value for name, value in record.items()}
            self._file.write(json.dumps(finite) + "\n")
            if self._events is not None:
                for name, value in record.items():
                    if name != "step" and not isinstance(value, str):
                        self._events.add_scalar(name, value, record["step"])
        except OSError as error:
            self._say_failure(error)

    def complete(self, step: int, found: dict[str, float]) -> None:
        """Add what was found after a step to its row, which must be the last one.

        The row stands whole in the file before and after: one write replaces its closing brace. So an end of the run
        while it is evaluated does not lose the row. A file without the row stays as it is.
        """
        if self._wandb is not None:
            self._wandb.add(step, found)
        finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
        try:
            self._file.flush()
            _complete_last_row(self._path, step, finite)
            if self._events is not None:
                for name, value in found.items():
                    self._events.add_scalar(name, value, step)
        except OSError as error:
            self._say_failure(error)

    def _say_failure(self, error: OSError) -> None:
        if not self._has_failed:
            print(f"tpengine: metrics cannot be written: {error}: make room", file=sys.stderr, flush=True)
        self._has_failed = True

    def close(self, exit_code: int = 0) -> None:
        """Flush and close all; records that do not fit on the disk are lost.

        Args: exit_code: of the run, for Weights & Biases, where another than 0 is a run that failed.
        """
        self._close_files()
        if self._wandb is not None:
            self._wandb.close(exit_code)

    def _close_files(self) -> None:
        for file in (self._file, self._events):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _complete_last_row(path: Path, step: int, found: dict[str, float | None]) -> None:
    """Add fields to the last line of a file, in place, if it is this step's row and lacks them."""
    with path.open("r+b", buffering=0) as file:
        number = file.fileno()
        size = os.fstat(number).st_size
        begin = max(0, size - _LONGEST_ROW)
        tail = os.pread(number, size - begin, begin)
        try:
            row = json.loads(tail[:-1].rpartition(b"\n")[2])
            is_the_row = row["step"] == step
        except (ValueError, KeyError, TypeError):
            return
        missing = {name: value for name, value in found.items() if name not in row}
        if not is_the_row or not missing or not tail.endswith(b"}\n"):
            return
        rest, written = b", " + json.dumps(missing).encode()[1:] + b"\n", 0
        try:
            written = os.pwrite(number, rest, size - 2)
        finally:
            if written < len(rest):  # a full disk
                os.ftruncate(number, size)
                os.pwrite(number, b"}\n", size - 2)
        if written < len(rest):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _keep_records_until(path: Path, num_steps: int) -> None:
    """Keep the records of so many finished steps, and rollbacks; what is no record goes.

    Rows of an earlier version are numbered as others are.
    """
    if path.exists():
        rows = journal.read_steps(path)
        journal.write(path, [row for row in rows if row["step"] <= num_steps or row.get("event") == "rollback"])


class BackgroundWriter:
    """Hands rows on to a writer of metrics, in their order.

    What a killed process has not yet written is lost: on a directory that keeps up, nothing; on one that is behind, the
    last rows, of steps that the run repeats when it is resumed.

    Args:
        writer: only this object uses it from now on.

    Attributes:
        exit_code: what the run ends with, as far as it is known.
    """

    def __init__(self, writer: MetricsWriter) -> None:
        self._writer, self.exit_code = writer, 0
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="tpengine-metrics", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """As MetricsWriter.write, soon."""
        self._put(partial(self._writer.write, record))

    def complete(self, step: int, found: dict[str, float]) -> None:
        """As MetricsWriter.complete, once the rows before are written."""
        self._put(partial(self._writer.complete, step, found))

    def go_back(self, num_steps: int) -> None:
        """As MetricsWriter.go_back, once the rows before are written."""
        self._put(partial(self._writer.go_back, num_steps))

    def flush(self) -> None:
        """Wait until everything so far is written."""
        written = threading.Event()
        self._put(written.set)
        written.wait()

    def close(self) -> None:
        """Write what is left, and close the writer; a second call does nothing."""
        if not self._thread.is_alive():
            return
        self._tasks.put(None)
        self._thread.join()
        self._writer.close(self.exit_code)

    def _put(self, task: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # a row that is no row: the main thread raises it
                self._error = self._error or error
