"""A profile: the measured costs of a step's actions, kept as JSON, to predict steps with other schedules.

It has the layers of each chunk and the time of each kind of action by chunk, so that other chunks can be predicted
(costs.py); and what each rank did, so that it can be told why the run is slow (ranks.py). This file has its fields and
its file format. A file may come from anybody: everything is checked, and an error is one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from tpengine.dtypes import DTYPES
from tpengine.plan.actions import COMPUTE, Kind
from tpengine.plan.plan import Reduced, Residency, TensorSpec, Weights
from tpengine.planner.profiles.ranks import (
    RankProfile,
    StepSeconds,
    WrongProfile,
    check_ranks,
    count_of,
    each,
    field_of,
    name_of,
    number_of,
    parse_rank,
    parse_step,
    word_of,
)

_FORMAT = "tpengine profile"
_VERSION = 1
_MAX_FILE_BYTES = 64_000_000
_MAX_LAYERS = 2**20


@dataclass(frozen=True)
class ChunkProfile:
    """A chunk of the profiled plan.

    Args:
        rank: of the pipeline.
        layers: half-open range.
        seconds: per micro-batch, by F, B, I and W; only those that ran.
    """

    rank: int
    layers: tuple[int, int]
    seconds: Mapping[Kind, float]


@dataclass(frozen=True)
class BucketProfile:
    """A gradient bucket.

    Args:
        chunks: that fill it.
        seconds: of one reduction over its ranks.
        num_bytes: of its gradients.
        gather_seconds: of one gather of its weights; 0 where none is gathered.
        weights, reduced: as the plan's bucket: what a replica holds of its weights, and when it is reduced.
    """

    chunks: tuple[int, ...]
    seconds: float
    num_bytes: int
    gather_seconds: float = 0.0
    weights: Weights = Weights.WHOLE
    reduced: Reduced = Reduced.STEP


@dataclass(frozen=True)
class StageMemory:
    """What a rank of one stage held, in bytes.

    Args:
        kinds: by the plan, before it ran: weights, gradients, moments and so on, as a run's first lines name them.
        peak: the same, the most of everything at once; `action` is what runs then.
        arenas: memory through which this rank exchanges tensors with others, which the plan does not count.
        measured_peak: the most that one of the stage's ranks has held since its start.
        measured_as: what that counts: on a GPU what torch has allocated, on a CPU the process's resident set, with
            torch's own libraries.
    """

    kinds: Mapping[str, int]
    peak: int
    action: str
    arenas: int
    measured_peak: int
    measured_as: str


@dataclass(frozen=True)
class CostProfile:
    """What the actions of a step cost: medians over steps and ranks; if ranks differ, those of the slowest rank.

    Args:
        schedule, num_microbatches: of the profiled plan.
        chunks: in model order; their layers are those of the model.
        boundary: the tensor that crosses from chunk to chunk; None for one chunk.
        send_seconds: how long a transfer occupies the sender: posting it, or copying it into a mailbox.
        receive_seconds: how long it occupies the receiver, if the tensor has arrived already.
        link_seconds: the rest of a transfer, while it occupies no rank.
        buckets: by index.
        ties, clip, step: seconds of a TIE_REDUCE, of CLIP and of STEP, without waiting for other ranks.
        plan_seconds: from the beginning of the plan to its end.
        outside_seconds: the rest of a step: reading the batch, ending the step together with all ranks.
        memory: by stage; empty where the profile was written before there was such a field.
        residency: how long gathered weights stayed.
        steps, ranks: the recorded steps, and what each rank did in them, in the order of the run's ranks; empty where
            the profile was written before there were such fields.
    """

    schedule: str
    num_microbatches: int
    chunks: tuple[ChunkProfile, ...]
    boundary: TensorSpec | None
    send_seconds: float
    receive_seconds: float
    link_seconds: float
    buckets: Mapping[int, BucketProfile]
    ties: float
    clip: float
    step: float
    plan_seconds: float
    outside_seconds: float
    memory: tuple[StageMemory, ...] = ()
    residency: Residency = Residency.STEP
    steps: tuple[StepSeconds, ...] = ()
    ranks: tuple[RankProfile, ...] = ()

    @property
    def num_layers(self) -> int:
        """Return the layers of the whole model."""
        return self.chunks[-1].layers[1]

    def to_json(self) -> bytes:
        """Return the content of the file that `read_profile` reads."""
        seconds = {name: getattr(self, name) for name in _SECONDS}
        boundary = None if self.boundary is None else {"shape": self.boundary.shape, "dtype": self.boundary.dtype}
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "chunks": [
                {"rank": chunk.rank, "layers": chunk.layers, "seconds": {str(k): v for k, v in chunk.seconds.items()}}
                for chunk in self.chunks
            ],
            "boundary": boundary,
            "buckets": [
                {
                    "index": index,
                    "chunks": bucket.chunks,
                    "seconds": bucket.seconds,
                    "bytes": bucket.num_bytes,
                    "gather_seconds": bucket.gather_seconds,
                    "weights": bucket.weights,
                    "reduced": bucket.reduced,
                }
                for index, bucket in self.buckets.items()
            ],
            "residency": self.residency,
            "seconds": seconds,
            "memory": [
                {
                    "stage": stage,
                    "bytes": dict(held.kinds),
                    "peak_bytes": held.peak,
                    "action": held.action,
                    "arena_bytes": held.arenas,
                    "measured_peak_bytes": held.measured_peak,
                    "measured_as": held.measured_as,
                }
                for stage, held in enumerate(self.memory)
            ],
            "steps": [step.to_json() for step in self.steps],
            "ranks": [rank.to_json() for rank in self.ranks],
        }
        return json.dumps(content, indent=1).encode() + b"\n"


_SECONDS = (
    "send_seconds",
    "receive_seconds",
    "link_seconds",
    "ties",
    "clip",
    "step",
    "plan_seconds",
    "outside_seconds",
)


def read_profile(path: Path) -> CostProfile:
    """Read the profile.json of a run.

    Raises: ValueError: it cannot be read, or is not a profile; one line with the path, the rule and what was found.
    """
    try:
        return _parse(_read(path))
    except OSError as error:
        reason = error.strerror
    except WrongProfile as error:
        reason = str(error)
    raise ValueError(f"a profile must be the profile.json of a run: {path}: {reason}: run with --train.profile-steps")


def _read(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise WrongProfile("it is not a regular file")
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise WrongProfile(f"it has more than {_MAX_FILE_BYTES} bytes")
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise WrongProfile("it is not JSON") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _parse(content: Any) -> CostProfile:
    if field_of(content, "format", str) != _FORMAT:
        raise WrongProfile(f"its format is not {_FORMAT!r}")
    if field_of(content, "version", int) != _VERSION:
        raise WrongProfile(f"its version is {content['version']}, and this tpengine reads version {_VERSION}")
    chunks = tuple(each(content, "chunks", _chunk))
    if not chunks or chunks[0].layers[0] != 0 or any(a.layers[1] != b.layers[0] for a, b in pairwise(chunks)):
        raise WrongProfile("the layers of its chunks are not those of a model, in order")
    ranks = {chunk.rank for chunk in chunks}
    if ranks != set(range(len(ranks))):
        raise WrongProfile("the ranks of its chunks do not count from 0")
    buckets = dict(each(content, "buckets", _bucket))
    if any(chunk >= len(chunks) for bucket in buckets.values() for chunk in bucket.chunks):
        raise WrongProfile("a bucket names a chunk that the profile does not have")
    boundary = _boundary(content)
    if boundary is None and len(chunks) > 1:
        raise WrongProfile("several chunks need a boundary")
    measured = tuple(each(content, "ranks", parse_rank)) if "ranks" in content else ()
    if measured:
        check_ranks(measured, [_actions_of(chunks, stage) for stage in range(len(ranks))])
    seconds = field_of(content, "seconds", dict)
    return CostProfile(
        schedule=name_of(content, "schedule"),
        num_microbatches=count_of(content, "num_microbatches", least=1),
        chunks=chunks,
        boundary=boundary,
        buckets=buckets,
        **{name: number_of(seconds, name) for name in _SECONDS},
        memory=tuple(_memory(content, len(ranks))),
        # Profiles of earlier versions do not say.
        residency=word_of(content, "residency", Residency) if "residency" in content else Residency.STEP,
        steps=tuple(each(content, "steps", parse_step)) if "steps" in content else (),
        ranks=measured,
    )


def _actions_of(chunks: Sequence[ChunkProfile], stage: int) -> frozenset[tuple[Kind, int]]:
    return frozenset(
        (kind, index) for index, chunk in enumerate(chunks) if chunk.rank == stage for kind in chunk.seconds
    )


def _chunk(item: Any) -> ChunkProfile:
    layers = field_of(item, "layers", list)
    if (
        len(layers) != 2
        or not all(type(bound) is int for bound in layers)
        or not 0 <= layers[0] < layers[1] <= _MAX_LAYERS
    ):
        raise WrongProfile(f"layers are a pair, first and end: got {layers!r}")
    seconds = field_of(item, "seconds", dict)
    known = {kind.value: kind for kind in COMPUTE}
    if unknown := [name for name in seconds if name not in known]:
        raise WrongProfile(f"a chunk's actions are F, B, I and W: got {unknown[0]!r}")
    found = {known[name]: number_of(seconds, name) for name in seconds}
    if Kind.F not in found or not (Kind.B in found or {Kind.I, Kind.W} <= found.keys()):
        raise WrongProfile("a chunk needs the seconds of F, and of B or of I and W")
    if min(found.values()) <= 0.0:
        raise WrongProfile("a chunk's actions take more than 0 seconds")
    return ChunkProfile(count_of(item, "rank"), (layers[0], layers[1]), found)


def _bucket(item: Any) -> tuple[int, BucketProfile]:
    chunks = field_of(item, "chunks", list)
    if not chunks or not all(type(chunk) is int and chunk >= 0 for chunk in chunks):
        raise WrongProfile(f"a bucket has chunks: got {chunks!r}")
    held = BucketProfile(tuple(chunks), number_of(item, "seconds"), count_of(item, "bytes"))
    if "weights" in item:  # profiles of earlier versions do not say
        held = replace(
            held,
            gather_seconds=number_of(item, "gather_seconds"),
            weights=word_of(item, "weights", Weights),
            reduced=word_of(item, "reduced", Reduced),
        )
    return count_of(item, "index"), held


def _memory(content: dict[str, Any], num_stages: int) -> list[StageMemory]:
    """Parse what each stage held; profiles of earlier versions do not say."""
    if "memory" not in content:
        return []
    found = each(content, "memory", _stage_memory)
    if [stage for stage, _ in found] != list(range(num_stages)) and found:
        raise WrongProfile(f"memory is by stage, of all {num_stages}")
    return [held for _, held in found]


def _stage_memory(item: Any) -> tuple[int, StageMemory]:
    kinds = field_of(item, "bytes", dict)
    return count_of(item, "stage"), StageMemory(
        {name: count_of(kinds, name) for name in kinds},
        count_of(item, "peak_bytes"),
        name_of(item, "action"),
        count_of(item, "arena_bytes"),
        count_of(item, "measured_peak_bytes"),
        name_of(item, "measured_as"),
    )


def _boundary(content: Any) -> TensorSpec | None:
    if field_of(content, "boundary", (dict, type(None))) is None:
        return None
    shape, dtype = field_of(content["boundary"], "shape", list), field_of(content["boundary"], "dtype", str)
    if not all(type(size) is int and 0 < size < 2**40 for size in shape) or dtype not in DTYPES:
        dtypes = ", ".join(DTYPES)
        raise WrongProfile(f"a boundary has a shape and one of the dtypes {dtypes}: got {content['boundary']!r}")
    return TensorSpec(tuple(shape), dtype)
