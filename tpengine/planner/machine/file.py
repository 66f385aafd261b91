"""A machine's file, in TOML: what `tpengine doctor` and `python -m benchmarks.run machine` write, or people by hand.

format = 1
name = "two cores"
source = "measured on ..."
is_asynchronous = false
memory_bytes_per_s = 1e10
...                                     every field of Machine
chip_spread = 0.015                     may be left out, as attention_gradient, and as cold_share: by the bytes that a
cold_share = [[1e6, 0.05], [6e7, 1.0]]  rank touches between two uses of a tensor, what is left of memory's cost
nccl_bytes_per_s_per_processor = 1.5e10  may be left out: then few processors for NCCL cost no bandwidth
matmul = [[1e6, 0.3], [1e9, 0.95]]      a curve: [size, share of the peak]
[flops_per_s]
float32 = 1.5e11
[within]                                every field of Link
bytes_per_s = 5e9
[within.measured]                       may be left out
2 = [[1e5, 1e8], [1e8, 2e9]]            bus bandwidth of rings of 2 ranks, by bytes of the whole tensor
[measured.float32.operators]            may be left out: the engine's own operators (measured.py)
norm = [[1e4, 5e9], [1e6, 1e10]]
[measured.float32.products.forward]
128 = [[6.5e4, 8e10], [2e6, 9e10]]      by rows: operations per second by elements of the matrix
[cached.float32.operators]              may be left out: the same where operands are still in caches
"""

from __future__ import annotations

import math
import re
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from tpengine.config.toml import read_toml
from tpengine.planner.machine.machine import Link, Machine
from tpengine.planner.machine.measured import OPERATORS, PRODUCTS, Curve, Measured
from tpengine.planner.machine.sheets import MACHINES
from tpengine.spelling import use

_FORMAT = 1
# Each operator is measured forward and backward; the backward of an addition is none of the engine's.
_MEASURED_OPERATORS = (*OPERATORS, "add_backward")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SIZES = re.compile(r"(?P<kind>.+?)(?::(?P<per_node>\d+)(?:x(?P<nodes>\d+))?)?")


def machine_named(text: str) -> Machine:
    """Return the machine that `--machine` asks for: h200, h200:8x4 (ranks per node, nodes), m.toml, m.toml:8x4.

    Raises:
        ValueError: neither a known kind nor a file, or a file that is not a machine's; one line.
    """
    found = _SIZES.fullmatch(text)
    kind = found["kind"] if found else text
    if kind in MACHINES:
        machine = MACHINES[kind]
    elif kind.endswith(".toml"):
        machine = read_machine(Path(kind))
    else:
        raise ValueError(
            f"--machine must be one of {', '.join(MACHINES)}, or a file .toml, with :RANKS_PER_NODExNODES behind it if "
            f"it matters: got {text!r}: use h200:8x4, or a file of `tpengine doctor`"
        )
    given = [found[name] if found else None for name in ("per_node", "nodes")]
    per_node, nodes = (int(size or 0) for size in given)
    if any(size is not None and int(size) == 0 for size in given):
        raise ValueError(f"--machine needs at least 1 rank per node and 1 node: got {text!r}: use {kind}:8x1")
    return replace(
        machine,
        ranks_per_node=per_node or machine.ranks_per_node,
        num_nodes=nodes or (1 if per_node else machine.num_nodes),
    )


def machine_text(machine: Machine) -> str:
    """Return a machine as TOML; `read_machine` reads it back equal."""
    # Only what writes a file needs it.
    import tomli_w

    return tomli_w.dumps(machine_values(machine))


def machine_values(machine: Machine) -> dict[str, Any]:
    """Return a machine as numbers, texts, lists and tables of them; `machine_of_values` reads them back equal."""
    return {"format": _FORMAT, **_plain(asdict(machine))}


def read_machine(path: Path) -> Machine:
    """Read a machine's file.

    Raises:
        ValueError: no such file, malformed TOML, or as `machine_of_values`; one line with the file and the key.
    """
    return machine_of_values(read_toml(path, "--machine"), str(path))


def machine_of_values(values: Mapping[str, Any], path: str) -> Machine:
    """Return the machine of which `machine_values` made these.

    Args:
        values: as read from a file or a row.
        path: where they are from, for messages.

    Raises:
        ValueError: another format, a key that is missing, unknown or of the wrong type, a number that is not finite or
            not above 0; one line with the file and the key.
    """
    if type(values.get("format")) is not int or values["format"] != _FORMAT:
        raise ValueError(f"a machine's file must say format = {_FORMAT}: {path}: write it anew with this version")
    machine: Machine = _built(Machine, {key: of for key, of in values.items() if key != "format"}, path, "")
    _check_names(machine, path)
    shares = [share for _, share in machine.cold_share.points]
    if shares != sorted(shares) or shares[-1] > 1.0:
        raise ValueError(f"{path}: cold_share must rise to at most 1: got {shares}: correct the value")
    return machine


def _check_names(machine: Machine, path: str) -> None:
    """Refuse rates by a name that nothing asks for: a misspelled one would be left out without a word."""
    of_dtypes = {"flops_per_s": machine.flops_per_s, "measured": machine.measured, "cached": machine.cached}
    for key, named in of_dtypes.items():
        _check_known(f"{key} of a dtype", named, _DTYPES, path)
    if not machine.flops_per_s:
        raise ValueError(f"{path}: flops_per_s must have a dtype at least: got none: add float32 = RATE")
    for key, of_dtype in (("measured", machine.measured), ("cached", machine.cached)):
        for dtype, rates in of_dtype.items():
            _check_known(f"{key}.{dtype}.operators", rates.operators, _MEASURED_OPERATORS, path)
            _check_known(f"{key}.{dtype}.products", rates.products, PRODUCTS, path)


def _check_known(key: str, given: Iterable[str], known: Sequence[str], path: str) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{path}: {key} must be of {', '.join(known)}: got {name}: {use(name, known)}")


# The largest number that is finite.
_MOST = sys.float_info.max
# Zero has a meaning for these: nothing, or no limit.
_MAY_BE_ZERO = (
    *("kernel_s", "host_s_per_operator", "host_s_per_action", "latency_s"),
    *("memory_bytes", "num_nodes", "num_processors", "reduce_share", "chip_spread"),
    "nccl_bytes_per_s_per_processor",
)


def _built(kind: Any, values: Mapping[str, Any], path: str, prefix: str) -> Any:
    hints, known = typing.get_type_hints(kind), {field.name: field for field in fields(kind)}
    needed = {name for name, of in known.items() if of.default is MISSING and of.default_factory is MISSING}
    for what, names in (("unknown", values.keys() - known.keys()), ("missing", needed - values.keys())):
        if names:
            raise ValueError(f"{path}: {what} key {prefix}{min(names)}: a machine has {', '.join(known)}: correct it")
    return kind(**{name: _value(hints[name], value, path, prefix + name) for name, value in values.items()})


def _value(hint: Any, value: Any, path: str, key: str) -> Any:
    if hint in (Link, Measured) and isinstance(value, dict):
        return _built(hint, value, path, f"{key}.")
    if hint is Curve and isinstance(value, list):
        return _curve(value, path, key)
    if typing.get_origin(hint) is Mapping and isinstance(value, dict):
        of_key, of_value = typing.get_args(hint)
        if of_key is int and not all(name.isdecimal() for name in value):
            raise ValueError(f"{path}: {key} must have numbers of ranks as keys: got {', '.join(value)}: correct it")
        return {of_key(name): _value(of_value, of, path, f"{key}.{name}") for name, of in value.items()}
    if hint in (int, float):
        return hint(_number(value, path, key, is_whole=hint is int))
    if hint in (str, bool) and type(value) is hint:
        return value
    names = {Link: "a table", Measured: "a table", Curve: "points [[size, quantity], ...]"}
    of_type = "a table" if typing.get_origin(hint) is Mapping else getattr(hint, "__name__", "a table")
    what = names.get(hint, of_type)
    raise ValueError(f"{path}: {key} must be {what}: got {value!r}: correct the value")


def _curve(value: list[Any], path: str, key: str) -> Curve:
    if not all(isinstance(point, list) and len(point) == 2 for point in value):
        raise ValueError(f"{path}: {key} must be points [[size, quantity], ...]: got {value!r}: correct the value")
    points = tuple((_number(x, path, key), _number(y, path, key)) for x, y in value)
    try:
        return Curve(points)
    except ValueError as error:
        raise ValueError(f"{path}: {key}: {error}") from None


def _number(value: Any, path: str, key: str, *, is_whole: bool = False) -> float:
    least = 0.0 if key.rpartition(".")[2] in _MAY_BE_ZERO else math.ulp(0.0)
    # An integer may be too large for a float.
    if type(value) not in (int, float) or not least <= value <= _MOST:
        rule = "at least 0" if least == 0.0 else "above 0"
        raise ValueError(f"{path}: {key} must be a finite number {rule}: got {value!r}: correct the value")
    if is_whole and type(value) is not int:
        raise ValueError(f"{path}: {key} must be a whole number: got {value!r}: correct the value")
    return float(value) if not is_whole else int(value)


def _plain(value: Any) -> Any:
    """Return curves as their points, and numbers of ranks as texts."""
    if isinstance(value, Mapping):
        if value.keys() == {"points"}:
            return [list(point) for point in value["points"]]
        return {str(name): _plain(of) for name, of in value.items()}
    return value
