"""A profile: the measured costs of a step's actions, kept as JSON, to predict steps with other schedules.

It has the layers of each chunk and the time of each kind of action by chunk, so that other chunks can be predicted
(costs.py). This file has its fields and its file format. A file may come from anybody: everything is checked, and an
error is reported in one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tpengine.plan.actions import COMPUTE, Kind
from tpengine.plan.plan import Reduced, Residency, TensorSpec, Weights

T = TypeVar("T")
Word = TypeVar("Word", bound=StrEnum)

_FORMAT = "tpengine profile"
_VERSION = 1
_MAX_FILE_BYTES = 64_000_000
_MAX_LAYERS = 2**20
_DTYPES = ("float64", "float32", "bfloat16", "float16")


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
    except _Wrong as error:
        reason = str(error)
    raise ValueError(f"a profile must be the profile.json of a run: {path}: {reason}: run with --train.profile-steps")


class _Wrong(Exception):
    """What is wrong with a profile's content, as the message."""


def _read(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise _Wrong("it is not a regular file")
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise _Wrong(f"it has more than {_MAX_FILE_BYTES} bytes")
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise _Wrong("it is not JSON") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _parse(content: Any) -> CostProfile:
    if _field(content, "format", str) != _FORMAT:
        raise _Wrong(f"its format is not {_FORMAT!r}")
    if _field(content, "version", int) != _VERSION:
        raise _Wrong(f"its version is {content['version']}, and this tpengine reads version {_VERSION}")
    chunks = tuple(_each(content, "chunks", _chunk))
    if not chunks or chunks[0].layers[0] != 0 or any(a.layers[1] != b.layers[0] for a, b in pairwise(chunks)):
        raise _Wrong("the layers of its chunks are not those of a model, in order")
    ranks = {chunk.rank for chunk in chunks}
    if ranks != set(range(len(ranks))):
        raise _Wrong("the ranks of its chunks do not count from 0")
    buckets = dict(_each(content, "buckets", _bucket))
    if any(chunk >= len(chunks) for bucket in buckets.values() for chunk in bucket.chunks):
        raise _Wrong("a bucket names a chunk that the profile does not have")
    boundary = _boundary(content)
    if boundary is None and len(chunks) > 1:
        raise _Wrong("several chunks need a boundary")
    seconds = _field(content, "seconds", dict)
    return CostProfile(
        schedule=_name(content, "schedule"),
        num_microbatches=_count(content, "num_microbatches", least=1),
        chunks=chunks,
        boundary=boundary,
        buckets=buckets,
        **{name: _number(seconds, name) for name in _SECONDS},
        memory=tuple(_memory(content, len(ranks))),
        # Profiles of earlier versions do not say.
        residency=_word(content, "residency", Residency) if "residency" in content else Residency.STEP,
    )


def _chunk(item: Any) -> ChunkProfile:
    layers = _field(item, "layers", list)
    if (
        len(layers) != 2
        or not all(type(bound) is int for bound in layers)
        or not 0 <= layers[0] < layers[1] <= _MAX_LAYERS
    ):
        raise _Wrong(f"layers are a pair, first and end: got {layers!r}")
    seconds = _field(item, "seconds", dict)
    known = {kind.value: kind for kind in COMPUTE}
    if unknown := [name for name in seconds if name not in known]:
        raise _Wrong(f"a chunk's actions are F, B, I and W: got {unknown[0]!r}")
    found = {known[name]: _number(seconds, name) for name in seconds}
    if Kind.F not in found or not (Kind.B in found or {Kind.I, Kind.W} <= found.keys()):
        raise _Wrong("a chunk needs the seconds of F, and of B or of I and W")
    if min(found.values()) <= 0.0:
        raise _Wrong("a chunk's actions take more than 0 seconds")
    return ChunkProfile(_count(item, "rank"), (layers[0], layers[1]), found)


def _bucket(item: Any) -> tuple[int, BucketProfile]:
    chunks = _field(item, "chunks", list)
    if not chunks or not all(type(chunk) is int and chunk >= 0 for chunk in chunks):
        raise _Wrong(f"a bucket has chunks: got {chunks!r}")
    held = BucketProfile(tuple(chunks), _number(item, "seconds"), _count(item, "bytes"))
    if "weights" in item:  # profiles of earlier versions do not say
        held = replace(
            held,
            gather_seconds=_number(item, "gather_seconds"),
            weights=_word(item, "weights", Weights),
            reduced=_word(item, "reduced", Reduced),
        )
    return _count(item, "index"), held


def _memory(content: dict[str, Any], num_stages: int) -> list[StageMemory]:
    """Parse what each stage held; profiles of earlier versions do not say."""
    if "memory" not in content:
        return []
    found = _each(content, "memory", _stage_memory)
    if [stage for stage, _ in found] != list(range(num_stages)) and found:
        raise _Wrong(f"memory is by stage, of all {num_stages}")
    return [held for _, held in found]


def _stage_memory(item: Any) -> tuple[int, StageMemory]:
    kinds = _field(item, "bytes", dict)
    return _count(item, "stage"), StageMemory(
        {name: _count(kinds, name) for name in kinds},
        _count(item, "peak_bytes"),
        _name(item, "action"),
        _count(item, "arena_bytes"),
        _count(item, "measured_peak_bytes"),
        _name(item, "measured_as"),
    )


def _boundary(content: Any) -> TensorSpec | None:
    if _field(content, "boundary", (dict, type(None))) is None:
        return None
    shape, dtype = _field(content["boundary"], "shape", list), _field(content["boundary"], "dtype", str)
    if not all(type(size) is int and 0 < size < 2**40 for size in shape) or dtype not in _DTYPES:
        raise _Wrong(f"a boundary has a shape and one of the dtypes {', '.join(_DTYPES)}: got {content['boundary']!r}")
    return TensorSpec(tuple(shape), dtype)


def _each(content: Any, name: str, parse: Callable[[Any], T]) -> list[T]:
    return [parse(item) for item in _field(content, name, list)]


def _field(content: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(content, dict):
        raise _Wrong(f"{name} must be in an object: got {_shown(content)}")

    if name not in content:
        raise _Wrong(f"it has no {name}")
    value = content[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Wrong(f"{name} is {_shown(value)}")
    return value


def _name(content: Any, name: str) -> str:
    value: str = _field(content, name, str)
    if not value.isprintable() or len(value) > 200:
        raise _Wrong(f"{name} is {_shown(value)}")
    return value


def _word(content: Any, name: str, words: type[Word]) -> Word:
    value = _field(content, name, str)
    if value not in list(words):
        raise _Wrong(f"{name} is one of {', '.join(words)}: got {_shown(value)}")
    return words(value)


def _count(content: Any, name: str, least: int = 0) -> int:
    value: int = _field(content, name, int)
    if not least <= value < 2**62:
        raise _Wrong(f"{name} is {_shown(value)}")
    return value


def _number(content: Any, name: str) -> float:
    value = _field(content, name, (int, float))
    if not (0.0 <= value < 1e12 and math.isfinite(value)):
        raise _Wrong(f"{name} is {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
