"""`tpengine diagnose`: why the steps of a run take as long as they do. No torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tpengine.advice.diagnose import diagnose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine diagnose` understands."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run with --train.profile-steps")
    parser.add_argument("--json", action="store_true", help="print numbers and words as JSON")


def print_diagnosis(args: argparse.Namespace) -> None:
    """Print the verdict in one line, then what else was found, and what it is based on."""
    found = diagnose(args.run_dir)
    print(json.dumps(found.to_json(), indent=1) if args.json else "\n".join(found.lines()))
