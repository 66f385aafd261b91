"""`tpengine diagnose`: why a run's steps take as long as they do, and how it ended if it could not go on. No torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tpengine.commands.given import add_trust_arguments
from tpengine.last_words import read_last_words
from tpengine.planner.diagnose import chain, diagnose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine diagnose` understands."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run with --train.profile-steps")
    parser.add_argument("--json", action="store_true", help="print numbers and words as JSON")
    add_trust_arguments(parser)


def print_diagnosis(args: argparse.Namespace) -> None:
    """Print how the run ended, if ranks left last words; then the verdict, what else was found, and its basis.

    A run that ended by a hang may have recorded no steps: then its end is all that is said.
    """
    words = read_last_words(args.run_dir)
    has_steps = not words or (args.run_dir / "profile.json").exists()
    found = diagnose(args.run_dir, args.architecture) if has_steps else None
    end = [chain(words)] if words else []
    if args.json:
        content: dict[str, Any] = {} if found is None else found.to_json()
        print(json.dumps(content | {"end": end[0] if end else None}, indent=1))
        return
    print("\n".join(end + ([] if found is None else found.lines())))
