"""The table of benchmarks, and the import of one of them.

Modules are named as text and imported when their benchmark runs. So a missing or broken module does not affect the
other benchmarks, and `--list` does not wait for torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tpengine.spelling import use


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: the word after `benchmarks.run`.
        description: one line.
        function: "module:name" of a function from the options to an exit code.
        options: "module:name" of a frozen dataclass whose field docstrings are the help.
        parse: "module:name" of a function from the arguments to the options, for a benchmark that must start on a
            machine without tyro; else tyro makes them.
    """

    name: str
    description: str
    function: str
    options: str
    parse: str | None = None

    def parsed(self, prog: str, arguments: Sequence[str]) -> Any:
        """Return the options that the arguments say.

        Raises:
            SystemExit: --help, or an option that is not known.
            ValueError: tyro is missing, or values do not fit together.
        """
        if self.parse is not None:
            return _resolve(self.parse)(arguments)
        try:
            import tyro
        except ImportError as error:
            raise ValueError(f"benchmark {self.name} needs tyro, which is not installed: pip install tyro") from error
        return tyro.cli(_resolve(self.options), prog=prog, description=self.description, args=arguments)

    def load(self) -> Callable[[Any], int]:
        """Import the benchmark's module.

        Returns: its function.
        Raises: ImportError, AttributeError: the module, or what it must define, is not there.
        """
        return _resolve(self.function)


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _benchmark(name: str, module: str, description: str) -> Benchmark:
    parse = f"benchmarks.{module}:parse" if name == "gpu" else None
    return Benchmark(name, description, f"benchmarks.{module}:main", f"benchmarks.{module}:Options", parse)


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        name: _benchmark(name, module, description)
        for name, module, description in (
            ("advise", "planner.advise", "CPU seconds of tpengine advise for 8, 32 and 1,024 GPUs"),
            (
                "attention",
                "kernels.host_attention",
                "causal attention on the CPU, forward and backward, against torch's own",
            ),
            (
                "blind",
                "planner.blind.command",
                "steps that advise predicts from a machine's file, hashed before they are measured",
            ),
            (
                "compile",
                "launches.compile",
                "every Triton kernel compiled for every target, without a GPU: registers, spills",
            ),
            (
                "data",
                "data.command",
                "from text to a step's batch: starts, random samples, tokenizing, and what a step waits for",
            ),
            (
                "data_parallel",
                "data_parallel.command",
                "DataParallel against DDP, ShardedOptimizer against ZeroRedundancyOptimizer",
            ),
            (
                "exchange",
                "overlap.exchange",
                "gathers, sums and messages through shared memory, against gloo's",
            ),
            (
                "gpu",
                "gpu.command",
                "what decides about one GPU, then all else, in the minutes that there are; needs nothing else to start",
            ),
            (
                "host",
                "launches.host_time",
                "the host's time of every fused call and of every launch of a step; needs no GPU",
            ),
            (
                "generate",
                "training.generate",
                "a model continues a prompt, with a cache of keys and values and without one",
            ),
            (
                "import",
                "training.import_weights",
                "a directory of weights becomes a model, on 1 rank and on 4, against transformers' from_pretrained",
            ),
            (
                "index",
                "training.checkpoint_index",
                "the index of an 8B's checkpoint, checked and read, at dp 64 to 1,024",
            ),
            (
                "kernels",
                "kernels.command",
                "each operator against torch's, compiled torch's, Liger's, or its own of any revision",
            ),
            (
                "launches",
                "launches.count",
                "launches of a block per micro-batch and of a step's end, and the bytes they move; needs no GPU",
            ),
            (
                "machine",
                "planner.machine.command",
                "a machine's file for plan and advise, from microbenchmarks",
            ),
            (
                "moe",
                "kernels.host_experts",
                "a layer of experts on the CPU, forward and backward, against transformers' eager and grouped ones",
            ),
            (
                "moe_exchange",
                "kernels.spread_experts",
                "what the exchange of experts' rows between ranks costs a layer, routing even and skewed",
            ),
            (
                "overlap",
                "overlap.command",
                "sharded matmuls fused with their communication, against matmul then collective",
            ),
            (
                "pipeline",
                "pipeline.command",
                "pipeline schedules against torch.distributed.pipelining; or measured against simulated",
            ),
            (
                "published",
                "planner.published.command",
                "predicted steps and memory of runs that others published, against what they measured",
            ),
            (
                "rival",
                "training.rival_options",
                "settings of torch's own parallelism against each other, to compare with the best",
            ),
            (
                "run",
                "training.whole.command",
                "a run with evaluation, checkpoints and logging on, beside its bare steps",
            ),
            (
                "train",
                "training.command",
                "whole training steps: tpengine against torch's own parallelism, or against itself",
            ),
        )
    }
)


def find(name: str) -> Benchmark:
    """Return the benchmark of that name.

    Raises:
        ValueError: there is none; names the nearest.
    """
    if name not in BENCHMARKS:
        remedy = use(name, BENCHMARKS, "--list")
        raise ValueError(f"a benchmark must be one of {', '.join(BENCHMARKS)}: got {name!r}: {remedy}")
    return BENCHMARKS[name]
