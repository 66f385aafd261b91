"""`tpengine diagnose`: why a run's steps take as long as they do, and how it ended if it could not go on. No torch.

Also here: the recorded run that `--profile RUN` of plan and advise names, which must be of the model that is planned.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tpengine.commands.parsing import add_trust_arguments
from tpengine.config import Config
from tpengine.last_words import read_last_words
from tpengine.planner.diagnose import chain, diagnose
from tpengine.planner.diagnose.evidence import Evidence, read_evidence


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


def recorded_by(path: Path, base: Config, own: str = "") -> Evidence:
    """Return what a run has recorded.

    Args:
        path: the run's directory, or its profile.json.
        base: what is planned.
        own: the user's own file of the run's architecture; empty takes the run's copy.

    Raises:
        ValueError: it is of another model or dtype; a profile that is missing or wrong.
    """
    run_dir = path.parent if path.name == "profile.json" else path
    evidence = read_evidence(run_dir, own)
    compared = {
        "model": (replace(evidence.config.model, path=""), replace(base.model, path="")),
        "dtype": (evidence.config.train.dtype, base.train.dtype),
        "sequence length": (evidence.config.train.seq_len, base.train.seq_len),
        "reduction": (evidence.config.train.reduction, base.train.reduction),
    }
    for what, (found, wanted) in compared.items():
        if found != wanted:
            said = f"{found}, asked {wanted}" if what != "model" else _model_difference(found, wanted)
            raise ValueError(
                f"--profile must be of the run that is planned: {run_dir} has another {what}: {said}: record a run of "
                "this one with --train.profile-steps, or leave --profile out"
            )
    return evidence


def _model_difference(found: Any, wanted: Any) -> str:
    """Return the first setting in which two models differ."""
    first = next(of.name for of in fields(wanted) if getattr(found, of.name) != getattr(wanted, of.name))
    return f"{first} {getattr(found, first)}, asked {getattr(wanted, first)}"
