"""`tpengine advise`: the fastest layouts of a model on a machine, why others lose, how to run the first. No torch.

Nothing is measured and no process group is made: layouts are worked out as plans and simulated (tpengine/planner).
Where no layout divides or none fits, what would help is said. A search that takes longer than a moment shows on a
terminal's standard error how far it has come.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tpengine.commands.parsing import count
from tpengine.commands.plan_arguments import (
    add_question_arguments,
    flag_of,
    lacks_weights,
    listed,
    phases_of_model,
    question_asked,
    run_command,
)
from tpengine.config.lengths import MOST_MICRO_BATCHES
from tpengine.observe.safe_console import SafeConsole
from tpengine.plan import SCHEDULES, make_schedule
from tpengine.planner.advice.changes import changes, what_fits
from tpengine.planner.advice.question import Question, shapes
from tpengine.planner.advice.search import Row, SearchResult, search
from tpengine.planner.advice.sheets import gigabytes, seconds_text
from tpengine.planner.advice.words import (
    answer_json,
    answer_lines,
    change_text,
    differences,
    sheet_lines,
    too_large_text,
)
from tpengine.planner.draw import MAX_BOXES, Picture, check_place, picture_bytes, write_beside

_NUM_PICTURES = 3
# The place of a size among those of a shape.
_PLACES = {"tp": 0, "pp": 1, "dp": 2, "micro_batch_size": 3}
# So many smaller numbers of ranks are tried.
_MOST_TRIED = 64
# Sooner there is nothing to wait for.
MOMENT_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine advise` understands."""
    add_question_arguments(parser)
    parser.add_argument("--top", type=count, default=5, metavar="N", help="rows of the answer (default 5)")
    parser.add_argument("--explain", type=count, metavar="N", help="print the whole sheet of row N, too")
    parser.add_argument(
        "--seconds",
        type=count,
        default=10,
        metavar="S",
        help="how long to look for rows (default 10); three times that where none fits; what would change the answer, "
        "or fit, takes a while more",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answer to FILE")
    parser.add_argument("--draw", type=Path, metavar="DIR", help="draw the first three rows to DIR/advice.svg")


def advise(args: argparse.Namespace) -> None:
    """Print the fastest layouts that fit; write and draw what was asked for.

    Raises:
        ValueError: no layout is legal, or none fits: the nearest, and what closes the gap; one line.
    """
    if args.explain and args.explain > args.top:
        raise ValueError(
            f"--explain must name a row of the answer: got {args.explain} of {args.top}: use 1, or --top {args.explain}"
        )
    question, name = question_asked(args)
    for schedule in question.choices("schedule", ()):
        # Refused by name. A file's sizes are its own: layouts that it is not of are none of a run.
        if schedule not in SCHEDULES and not Path(schedule).is_file():
            make_schedule(schedule, 1, 1)
    if next(shapes(question), None) is None:
        raise ValueError(nothing_divides(question))
    if args.draw and args.draw.exists() and not args.draw.is_dir():
        raise ValueError(f"--draw must be a directory: {args.draw} is a file: name another")
    if args.json:
        check_place(args.json)
    with search_progress("looking for layouts") as say:
        found = search(question, args.top, args.seconds, watch=lambda *of: say(_so_far(*of)))
        if not found.rows:
            say("nothing fits; looking for what would")
            raise ValueError(nothing_fits(question, found, max(1.0, args.seconds / 5)))
        say("looking for what would change the answer")
        changed = list(changes(question, found.rows[0], max(1.0, args.seconds / 5), found.bounds))
    if args.explain and args.explain > len(found.rows):
        raise ValueError(f"--explain must name a row of the answer: got {args.explain} of {len(found.rows)}: use 1")
    run = run_command(args, question) + phases_of_model(args, question, question.base.train.steps)
    print("\n".join([*answer_lines(question, name, found, changed, run), *filter(None, [lacks_weights(args)])]))
    if question.base.phases:
        print(
            f"{question.base.phases} has phases: this is advice for the settings of config.toml, which every phase may "
            "change, the first too; tpengine plan with the first row's layout works out each"
        )
    if args.explain:
        _explain(args.explain, found, question)
    # The answer stands, even if a file cannot be written.
    if args.json:
        write_beside(
            args.json, (json.dumps(answer_json(question, name, found, changed, run), indent=2) + "\n").encode()
        )
        print(f"wrote {args.json}")
    if args.draw:
        path = args.draw / "advice.svg"
        try:
            args.draw.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--draw must be a directory: {args.draw}: {error.strerror}: name another") from None
        pictures = _pictures(found.rows, question)
        write_beside(path, picture_bytes(path, pictures))
        print(f"wrote {path}: the first {len(pictures)} of the rows")


def _so_far(num_simulated: int, best_seconds: float) -> str:
    fastest = f", the fastest takes {seconds_text(best_seconds)}" if best_seconds < float("inf") else ", none fits yet"
    return f"{num_simulated} layouts simulated{fastest}"


def _pictures(rows: Sequence[Row], question: Question) -> list[Picture]:
    """Return the first three rows on one axis; fewer, at least one, where together they have too many boxes."""
    limit = question.memory_limit if question.memory_limit < float("inf") else 0.0
    pictures: list[Picture] = []
    longest = max(row.sheet.seconds for row in rows[:_NUM_PICTURES])
    for number, row in enumerate(rows[:_NUM_PICTURES], start=1):
        title = f"{number}: {row.layout.words()}"
        picture = Picture(title, row.sheet.timeline, "s", row.sheet.plan, longest, limit)
        if pictures and sum(other.num_boxes for other in (*pictures, picture)) > MAX_BOXES:
            break
        pictures.append(picture)
    return pictures


def _explain(number: int, found: SearchResult, question: Question) -> None:
    row = found.rows[number - 1]
    print(f"\nrow {number}: {row.layout.words()}")
    print("\n".join(sheet_lines(row.sheet, question)))
    if number > 1:
        print(f"against row 1: {differences(row.sheet.parts, found.rows[0].sheet.parts)}")


def nothing_divides(question: Question) -> str:
    """Return why there is no layout at all, and the nearest that there is."""
    model, fixed = question.base.model, question.fixed
    dp = fixed.get("dp")
    if isinstance(dp, int) and question.global_batch % dp:
        near = max(dp, round(question.global_batch / dp) * dp)
        return (
            f"the global batch must be divisible by dp: {question.global_batch} sequences, dp {dp}: use "
            f"--global-batch {near}"
        )
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in fixed.items()}
    given = " ".join(f"{name} {listed(of)}" for name, of in values.items()) or "no setting fixed"
    return (
        f"no layout divides: {question.num_ranks} ranks, {question.global_batch} sequences, at most "
        f"{MOST_MICRO_BATCHES:,} micro-batches, {model.num_heads} heads, {model.num_kv_heads} KV heads, "
        f"{model.num_layers} layers, {given}: use {' or '.join(_that_divide(question)) or 'fewer ranks'}"
    )


def _that_divide(question: Question) -> Iterator[str]:
    """Yield options of which each alone gives layouts."""
    for name in (name for name in _PLACES if name in question.fixed):
        free = replace(question, fixed={key: value for key, value in question.fixed.items() if key != name})
        found = tuple(sorted({shape[_PLACES[name]] for shape in shapes(free)}))
        if found:
            yield f"{flag_of(name)} of {listed(found)}"
    # More ranks than sequences, heads and layers have no work.
    most = question.global_batch * question.base.model.num_heads * question.base.model.num_layers
    first, per_node = min(question.num_ranks - 1, most), question.machine.ranks_per_node
    for num_ranks in range(first, max(0, first - _MOST_TRIED), -1):
        is_even = num_ranks <= per_node or num_ranks % per_node == 0
        if is_even and next(shapes(replace(question, num_ranks=num_ranks)), None) is not None:
            yield f"--ranks {num_ranks}"
            return


def nothing_fits(question: Question, found: SearchResult, limit_seconds: float) -> str:
    """Return why no layout fits: the nearest, and the changes after which one does."""
    limit = gigabytes(question.memory_limit)
    if not found.num_layouts:
        given = " ".join(f"{flag_of(name)} {value}" for name, value in question.fixed.items())
        return (
            f"no layout has all of these: {given}: pp times chunks are at most the {question.base.model.num_layers} "
            "layers, and the interleaved schedule alone, with a pipeline, takes any number of chunks: leave one out"
        )
    if found.too_large is None:
        if found.gap is not None:
            more = 10 * max(1, math.ceil(found.seconds))
            return (
                f"no layout was found in {found.seconds:.0f} s, {found.num_simulated} simulated: use --seconds {more}"
            )
        if found.refused:
            return f"no layout can run: {found.refused[0]}"
        return (
            f"no layout fits: a rank may hold {limit}, and all {found.num_layouts:,} layouts hold more: use more "
            "ranks, a shorter sequence, or GPUs with more memory"
        )
    seen = "no layout fits" if found.gap is None else f"no layout fits of {found.num_simulated} simulated in time"
    fits = [change_text(change) for change in what_fits(question, limit_seconds)]
    needed, has = found.too_large.num_bytes, question.machine.memory_bytes
    if question.base.parallel.memory_limit and not 0 < has < needed:
        fits.append(f"--memory-limit {needed:.0f}")
    return (
        f"{seen}: a rank may hold {limit}; nearest: {too_large_text(question, found.too_large)}: "
        f"{'it fits with ' + ', or '.join(fits) if fits else _without_a_change(found)}"
    )


def _without_a_change(found: SearchResult) -> str:
    """Return what may help where no change was found: a shorter sequence only against what grows with it."""
    assert found.too_large is not None
    _, memory = found.too_large.memory
    grows = memory.activations + memory.slots > memory.peak / 2
    return "use a shorter sequence, or GPUs with more memory" if grows else "use more ranks, or GPUs with more memory"


@contextlib.contextmanager
def search_progress(words: str, moment_seconds: float = MOMENT_SECONDS) -> Iterator[Callable[[str], None]]:
    """Show what is done, and for how long; yield what says it in other words. The line is removed at the end.

    Args: words: at the beginning. moment_seconds: after which the line appears.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # Only a search that is waited for needs it.
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = SafeConsole(stderr=True).progress(*columns)
    task = progress.add_task(words, total=None)
    begins = threading.Timer(moment_seconds, progress.start)
    begins.daemon = True
    begins.start()
    try:
        yield lambda other: progress.update(task, description=other)
    finally:
        begins.cancel()
        begins.join()
        progress.stop()
