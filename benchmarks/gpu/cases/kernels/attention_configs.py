"""The case that times configurations of our attention's two kernels, which were found by compiling alone.

The gradient is timed with what stands around its kernel: the sums of dy * y, zeroed tiles of dq, and the parts of dk
and dv, of which there are more or fewer with other blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tpkernels.launch import target_of
from tpkernels.ops.attention.backward import launch_attention_backward
from tpkernels.ops.attention.forward import launch_attention
from tpkernels.ops.attention.launch import Config, Options, Sides, Tables, candidates

from benchmarks.gpu.cases.clock import agreement, device_here, medians, write
from benchmarks.gpu.cases.kernels.tiles import MODELS_BY_NAME
from benchmarks.harness.shapes import Model
from benchmarks.harness.timing import PASSED

FORWARD, GRADIENT = "forward", "gradient"
KERNELS = (FORWARD, GRADIENT)
# Where kernels are interpreted.
_SMALL = (Config(16, 16, 4, 1),)


class Attended(NamedTuple):
    """A rank's causal attention, and what its forward has written.

    Attributes:
        q, k, v, dy: [B, S, heads, E].
        y, lse: of forward.
        gradients: dq, dk, dv are written here.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    y: Tensor
    lse: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]

    @property
    def problem(self) -> tuple[Tables, Sides, Options]:
        """Return what it depends on besides its tensors: whole sequences, no rotation, no dropout."""
        return Tables(None, None), Sides(None, None), Options(True, 0, self.q.shape[3] ** -0.5, False, 0.0, ())

    def worth_timing(self, kernel: str) -> Sequence[Config]:
        """Return what launch.py lists for these heads, the entry that is taken first; of 16 bits on a GPU."""
        if self.q.device.type == "cpu":
            return _SMALL
        return candidates(kernel, self.q.shape[3], target_of(self.q))

    def forward(self, config: Config | None) -> list[Tensor]:
        """Return y and lse, with a configuration or that of the table."""
        return [*launch_attention(self.q, self.k, self.v, *self.problem, config)]

    def gradient(self, config: Config | None) -> list[Tensor]:
        """Return dq, dk, dv, with a configuration or that of the table."""
        given = self.dy, self.q, self.k, self.v, self.y, self.lse, self.gradients
        launch_attention_backward(*given, *self.problem, config)
        return [*self.gradients]


def measure(rows: Path, model: str, seq: int, batch: int, rounds: int = 10) -> int:
    """Time each kernel with each candidate; return 1 if a result is another one.

    Args:
        rows: a row for each candidate, and one for each kernel: the fastest, and its gain over the table's.
        model: of which one rank's heads are taken.
        seq: tokens of a sequence.
        batch: sequences of a micro-batch.
        rounds: samples.
    """
    device = device_here()
    one, is_wrong = _attended(MODELS_BY_NAME[model], seq, batch, device), False
    for kernel in KERNELS:
        case = f"attention_configs/{kernel}/{model}/seq_{seq}/batch_{batch}"
        call = one.forward if kernel == FORWARD else one.gradient
        want = [t.clone() for t in call(None)]
        calls: dict[str, Callable[[], object]] = {"present": functools.partial(call, None)}
        for config in one.worth_timing(kernel):
            name = "x".join(map(str, config))
            try:
                check = agreement(want, call(config))
            except Exception as raised:  # a candidate that does not compile or fit costs itself alone
                text = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
                write(rows, f"{case}/{name}", {"left_out": text})
                continue
            if check == PASSED:
                calls[name] = functools.partial(call, config)
            else:
                write(rows, f"{case}/{name}", {}, check)
                is_wrong = True
        times = {name: 1e6 * spread.median for name, spread in medians(calls, device, rounds).items()}
        for name, time_us in times.items():
            write(rows, f"{case}/{name}", {f"{kernel}_us": time_us, "num_samples": rounds})
        best = min(times, key=lambda name: times[name])
        gain = times["present"] / times[best]
        write(rows, case, {"what": f"winner {best}", "gain_over_present_ratio": gain, "num_samples": rounds})
    return int(is_wrong)


def launch_candidates(model: Model) -> None:
    """Launch every candidate on tensors without memory: for use where launches are observed."""
    one = _attended(model, 4096, 1, torch.device("meta"))
    for kernel in KERNELS:
        for config in one.worth_timing(kernel):
            (one.forward if kernel == FORWARD else one.gradient)(config)


def _attended(model: Model, seq: int, batch: int, device: torch.device) -> Attended:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(batch, seq, heads, model.head_size, generator=generator, device=device).to(dtype)

    q, k, v, dy = (normal(heads) for heads in (model.heads, model.kv_heads, model.kv_heads, model.heads))
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    one = Attended(q, k, v, dy, q, q, gradients)
    y, lse = one.forward(None)
    return one._replace(y=y, lse=lse)
