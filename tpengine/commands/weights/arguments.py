"""What `tpengine import` and `tpengine export` understand. No torch: it takes longer to import than others to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from tpengine.commands.given import add_trust_arguments
from tpengine.commands.parsing import dtype
from tpengine.commands.stopping import stoppable

IMPORT_DESCRIPTION = (
    "Write a run's directory: config.toml, a checkpoint of step 0 that any layout begins from, and "
    "what goes with the weights. All other flags, after DIR, are settings of the run, as --train.steps 200."
)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine import` understands; the run's settings are left to `run_import`, as args.settings."""
    parser.add_argument("source", metavar="DIR", help="a directory that transformers loads, or RUN or RUN@STEP")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="directory to write, new or empty")
    add_trust_arguments(parser, has_architecture=False)
    parser.set_defaults(settings=())


def run_import(args: argparse.Namespace) -> None:
    """Write a run's directory that begins with the weights of a directory, or of another run."""
    from tpengine.architectures.model_path import dropout_not_taken
    from tpengine.commands.arguments import parse_imported

    config = parse_imported(args.source, str(args.out), args.settings)
    from tpengine.commands.weights.import_weights import import_weights

    with stoppable():
        names = import_weights(config, args.out)
    if left_out := dropout_not_taken(config.model):
        print(left_out)
    trust = " --trust" * (config.model.architecture.endswith(".py") or bool(config.train.after_checkpoint))
    print(f"{args.out}: {len(names)} tensors, step 0; train with --config {args.out / 'config.toml'}{trust}")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine export` understands."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint (default the newest)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write, new or empty")
    parser.add_argument(
        "--dtype", type=dtype, help="float32, bfloat16, float16 or float64 (default the source's, or the run's)"
    )
    add_trust_arguments(parser)


def run_export(args: argparse.Namespace) -> None:
    """Write a checkpoint as a directory that transformers loads."""
    from tpengine.commands.weights.export import export

    with stoppable():
        names = export(args.run_dir, args.step, args.out, args.dtype, args.architecture)
    print(f"{args.out}: {len(names)} tensors; load it with AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
