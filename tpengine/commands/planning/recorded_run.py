"""`--profile RUN` of plan and advise: a run that was recorded, of the model that is planned."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tpengine.config import Config
from tpengine.planner.diagnose.evidence import Evidence, read_evidence


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
