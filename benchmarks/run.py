"""`python -m benchmarks.run NAME [options]`: runs one benchmark; `--list` says which there are.

The exit code is 0; 1 where a check was red (no ratio was printed or stored); 2 after a mistake on the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from benchmarks.registry import BENCHMARKS, find

_USAGE = "usage: python -m benchmarks.run NAME [options]     (options of one: NAME --help)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

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
            function, options_type = benchmark.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"benchmark {name} cannot be loaded: {error}: run it from the repository root") from error
        prog = f"benchmarks.run {name}"
        options: object = tyro.cli(options_type, prog=prog, description=benchmark.description, args=rest)
        return function(options)
    except ValueError as error:
        print(f"benchmarks: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2


def listing() -> str:
    """The usage line and every benchmark with its description."""
    width = max(map(len, BENCHMARKS))
    return "\n".join([_USAGE, *(f"    {name:<{width}}  {b.description}" for name, b in BENCHMARKS.items())])


if __name__ == "__main__":
    sys.exit(main())
