"""`tpengine advise`: the fastest layouts of a model on a machine, why others lose, how to run the first. No torch.

Nothing is measured and no process group is made: layouts are worked out as plans and simulated (tpengine/planner).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tpengine.commands.parsing import count
from tpengine.commands.planning.asked import (
    add_question_arguments,
    lacks_weights,
    phases_of_model,
    question_asked,
    run_command,
)
from tpengine.commands.planning.no_answer import nothing_divides, nothing_fits
from tpengine.commands.planning.progress import shown
from tpengine.plan import SCHEDULES, make_schedule
from tpengine.planner.advice.changes import changes
from tpengine.planner.advice.question import Question, shapes
from tpengine.planner.advice.search import Found, Row, search
from tpengine.planner.advice.units import seconds_text
from tpengine.planner.advice.words import answer_json, answer_lines, differences, sheet_lines
from tpengine.planner.draw import MAX_BOXES, Picture, check_place, picture_bytes, write_beside

_NUM_PICTURES = 3


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
    with shown("looking for layouts") as say:
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


def _explain(number: int, found: Found, question: Question) -> None:
    row = found.rows[number - 1]
    print(f"\nrow {number}: {row.layout.words()}")
    print("\n".join(sheet_lines(row.sheet, question)))
    if number > 1:
        print(f"against row 1: {differences(row.sheet.parts, found.rows[0].sheet.parts)}")
