"""`python -m benchmarks.run NAME [options]`: run one benchmark; `--list` prints their names.

The exit code is 0; 1 if a check was red (no ratio was printed or stored); 2 after a mistake on the command line; 130
after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from benchmarks.harness.registry import BENCHMARKS, find

_USAGE = "usage: python -m benchmarks.run NAME [options]     (options of one: NAME --help)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on the command line.

    Args: argv: arguments without the program's name; default those of the process.
    Returns: the exit code.
    Raises: SystemExit: `NAME --help`, or an option that tyro refuses.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--list", "-h", "--help"):
        print(listing())
        return 0 if arguments else 2
    name, *rest = arguments
    try:
        benchmark = find(name)
        try:
            function = benchmark.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"benchmark {name} cannot be loaded: {error}: run it from the repository root") from error
        options = benchmark.parsed(f"benchmarks.run {name}", rest)
        check_options(options)
        return function(options)
    except ValueError as error:
        print(f"benchmarks: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: interrupted; all ranks have ended", file=sys.stderr)
        return 130


def check_options(options: Any) -> None:
    """Refuse what is wrong for any benchmark: sizes below 1, empty lists, an --out without directory.

    Raises:
        ValueError: the rule, the value, the remedy.
    """
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if value == ():
            raise ValueError(f"{flag} needs at least one: got none: leave it out for {field.default}")
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, int) and number < 1 and not isinstance(number, bool) for number in numbers):
            remedy = "leave it out" if field.default is None else f"use {field.default}"
            raise ValueError(f"{flag} must be at least 1: got {value}: {remedy}")
        if field.name == "out" and value is not None and not value.resolve().parent.is_dir():
            raise ValueError(f"--out must lie in a directory that exists: got {value}: make {value.parent} first")


def listing() -> str:
    """Return the usage line and every benchmark with its description."""
    width = max(map(len, BENCHMARKS))
    return "\n".join([_USAGE, *(f"    {name:<{width}}  {b.description}" for name, b in BENCHMARKS.items())])


def _leave(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # Treated like Ctrl-C: the ranks are ended, and the files through which they met are removed.
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
