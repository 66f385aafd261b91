"""`python -m benchmarks.run gpu --minutes 9 --out DIR`: learn the most about one GPU in the minutes that there are.

For somebody who has a GPU for a short while and knows nothing of this project. Cases (plan.py) are plain data. Each
runs in a process of its own (runner.py), and what it finds is in DIR/rows.jsonl at once. The same command with the same
DIR goes on where the last one ended, `--continue-from OLD` in a new DIR; on another GPU, or at another revision, it
begins anew beside the old rows. `--report DIR` prints the tables again, also of a run that was cut.

    DIR/rows.jsonl     a row for each result, and two for each case: that it started, and how it ended
    DIR/rest.zip       everything else:
        log.txt        what cases printed
        report.txt     the tables
        machine.toml   the GPU for tpengine advise
        layouts/       predictions of llama_1b's layouts, and what their steps took
        <gpu>.json     tuned tiles, a copy of what the operators read from then on (kernels/tpkernels/tuned)

This process imports neither torch nor what a GPU machine may lack. The exit code is 0, also if results are wrong: the
tables say so; 2 without a GPU; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.folder import ARCHIVE, REPORT, Folder, opened
from benchmarks.gpu.plan import cases_for, compiling, published_models
from benchmarks.gpu.preflight import described, look
from benchmarks.gpu.process.run_cases import run_cases
from benchmarks.gpu.process.runner import beside
from benchmarks.gpu.rehearsal import rehearse, small_cases
from benchmarks.gpu.tables.machine_file import write_machine
from benchmarks.gpu.tables.report import print_report
from benchmarks.gpu.tables.rows import PREFLIGHT, ROWS, Where, now
from benchmarks.harness.journal import append
from benchmarks.harness.revision import REVISION_VARIABLE, ROOT, source_here
from tpengine.files import write_beside

# Where the operators look for tuned tiles: as tpkernels.ops.matmul.tuned.FOLDER, which imports torch.
TUNED = ROOT / "kernels" / "tpkernels" / "tuned"
# Kept for the tables at the end.
_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Options:
    """What to run, and where the results go."""

    minutes: float = 9.0
    """Time for everything; what decides is run first, then what is worth most per minute."""
    out: Path | None = None
    """Directory of the results; the same one again goes on."""
    continue_from: Path | None = None
    """Directory of an earlier run, whose two files are copied to `out` first."""
    report: Path | None = None
    """Print the tables of this directory, and run nothing."""
    models: tuple[Path, ...] | None = None
    """Directories of Hugging Face weights to compare with transformers; Llama 3.2 1B and Qwen3 0.6B are looked for."""
    revision: str | None = None
    """What rows name as their revision where git does not know it: the checkout was copied without its repository."""
    rehearse: bool = False
    """Run the orchestration without a GPU, with faults put in on purpose; exits with 1 if one is not noticed."""


def parse(argv: Sequence[str]) -> Options:
    """Return the options; by the standard library, because the machine may lack what other benchmarks parse with.

    Raises:
        SystemExit: --help, or an unknown option.
        ValueError: values that do not fit together.
    """
    parser = argparse.ArgumentParser("benchmarks.run gpu", description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--minutes", type=float, default=Options.minutes, help="time for everything")
    parser.add_argument("--out", type=Path, help="directory of the results; the same one again goes on")
    parser.add_argument("--continue-from", type=Path, metavar="DIR", help="take over rows and tiles of an earlier run")
    parser.add_argument("--report", type=Path, metavar="DIR", help="print the tables of this directory, run nothing")
    models = "directories of Hugging Face weights; Llama 3.2 1B and Qwen3 0.6B are found in Hugging Face's cache"
    parser.add_argument("--models", type=Path, nargs="+", metavar="DIR", help=models)
    revision = "what rows name as their revision, where the checkout was copied without its repository"
    parser.add_argument("--revision", metavar="NAME", help=revision)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: everything else, and planted faults")
    given = vars(parser.parse_args(argv))
    options = Options(**given | {"models": given["models"] and tuple(given["models"])})
    if options.report is None and options.out is None:
        raise ValueError("a run needs --out: got none: name a directory for the results, or use --report DIR")
    if not 0 < options.minutes < 24 * 60:
        raise ValueError(f"--minutes must be above 0 and below a day: got {options.minutes:g}: use 9")
    for path in options.models or ():
        if not (path / "config.json").is_file():
            raise ValueError(f"--models must be directories with a config.json: {path} has none: check the path")
    return options


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    pass


def main(options: Options) -> int:
    """Run what fits, and print the tables; return the exit code."""
    if options.report is not None:
        if not (options.report / ROWS).exists():
            raise ValueError(f"--report needs the directory of a run: {options.report} has no {ROWS}: name its --out")
        print_report(options.report / ROWS, None)
        print(write_machine(options.report / ROWS, options.report))
        return 0
    assert options.out is not None, "parse asks for it"
    deadline = time.monotonic() + 60 * options.minutes - _REPORT_SECONDS
    if options.revision is not None:
        os.environ[REVISION_VARIABLE] = options.revision
    if options.continue_from is not None:
        _take_over(options.continue_from, options.out)
    if options.rehearse:
        return rehearse(options.out, small_cases, deadline)
    with opened(options.out) as folder:
        _run(folder, options, deadline)
    return 0


def _run(folder: Folder, options: Options, deadline: float) -> None:
    """Look at the GPU, run cases, print the tables.

    Raises:
        ValueError: there is no GPU.
    """
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"
    models = [*published_models(cache), *(path.resolve() for path in options.models or ())]
    cases = cases_for(folder.work, models)
    found = look(cases)
    where = Where(found["gpu"], source_here().commit)
    print("\n".join([*described(found), f"revision {where.commit or 'not known: name it by --revision'}"]), flush=True)
    if found["gpu"] is None:
        raise ValueError(
            f"benchmarks gpu needs a GPU: torch {found['torch']} sees none: use --rehearse to try the command without"
        )
    _place_tiles(folder.work, TUNED)
    append(folder.rows, {PREFLIGHT: found, "date": now(), "minutes": options.minutes, **where.fields})
    try:
        with beside(compiling(found["capability"]), folder.rows, folder.log):
            run_cases(cases, folder, where, deadline)
    finally:
        print_report(folder.rows, folder.work / REPORT)
        print(write_machine(folder.rows, folder.work), flush=True)


def _take_over(earlier: Path, out: Path) -> None:
    """Copy rows and archive of an earlier run.

    Raises:
        ValueError: there is none, or `out` has rows of its own.
    """
    if not (earlier / ROWS).exists():
        raise ValueError(f"--continue-from needs the directory of a run: {earlier} has no {ROWS}: name its --out")
    if (out / ROWS).exists():
        raise ValueError(f"--continue-from needs a new --out: {out} has {ROWS}: leave the option out, or name another")
    out.mkdir(parents=True, exist_ok=True)
    for name in (ROWS, ARCHIVE):
        if (earlier / name).exists():
            write_beside(out / name, (earlier / name).read_bytes())


def _place_tiles(work: Path, folder: Path) -> None:
    """Put tuned tiles of an earlier run where the operators look, unless there are others."""
    for file in sorted(work.glob("*.json")):
        if not (folder / file.name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_beside(folder / file.name, file.read_bytes())
