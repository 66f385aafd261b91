"""What `tpengine certify` understands. No numpy: it takes longer to import than the other subcommands to run."""

from __future__ import annotations

import argparse

from tpengine.commands.given import add_trust_arguments
from tpengine.commands.parsing import count, dtype
from tpengine.commands.stopping import stoppable
from tpengine.plan import SCHEDULES

DESCRIPTION = (
    "Train a small model with dropout, clipping and ignored labels in two layouts, on the CPU, in "
    "processes started here (about 0.4 GB each; a minute for 5 steps on 2 cores), and compare every bit. "
    "Exit code 0: identical; 1: not, and the first difference is named; 2: the layouts cannot be."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    for axis in ("tp", "pp", "dp"):
        parser.add_argument(f"--{axis}", type=count, default=1, help=f"size of the axis {axis} (default 1)")
    parser.add_argument(
        "--zero", type=int, choices=range(4), default=0, help="what replicas shard, as in training (default 0)"
    )
    parser.add_argument(
        "--against", metavar="LAYOUT", help="the other one, as tp=4,pp=1,dp=1 or tp=4 (default one process)"
    )
    parser.add_argument("--preset", default="certify", help="tiny, bench, llama_1b or certify (the default)")
    parser.add_argument(
        "--model.path", dest="model_path", metavar="DIR", help="the preset with the sizes of a model's directory"
    )
    add_trust_arguments(parser)
    parser.add_argument("--data.path", dest="data_path", metavar="FILE", help="as in training (default stdlib)")
    parser.add_argument("--data.mixture", dest="mixture", default="", metavar="FILE", help="as in training")
    parser.add_argument(
        "--data.packing", dest="packing", choices=("cut", "documents", "fit"), default="cut", help="as in training"
    )
    parser.add_argument("--phases", default="", metavar="FILE.toml", help="each phase by itself, with --steps of each")
    parser.add_argument("--dtype", type=dtype, default="float32", help="float32, bfloat16 or float64 (default float32)")
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)} (default 1f1b)")
    parser.add_argument("--tp-comm", default="fused", help="fused or plain, as in training (default fused)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout (default 0)")
    parser.add_argument("--steps", type=count, default=5, help="optimizer steps (default 5)")
    parser.add_argument(
        "--fast", action="store_true", help="measure fast mode's distance to exact mode instead, against a bound"
    )


def run_certify(args: argparse.Namespace) -> int:
    """Compare training in two layouts bit by bit, or fast mode with exact."""
    from tpengine.commands.certify.command import Layout, Options, certify, parse_layout

    options = Options(
        layout=Layout(args.tp, args.pp, args.dp, args.zero),
        against=None if args.against is None else parse_layout(args.against),
        preset=args.preset,
        model_path=args.model_path,
        architecture=args.architecture,
        dtype=args.dtype,
        schedule=args.schedule,
        tp_comm=args.tp_comm,
        seed=args.seed,
        steps=args.steps,
        fast=args.fast,
        data_path=args.data_path,
        mixture=args.mixture,
        packing=args.packing,
        phases=args.phases,
    )
    with stoppable():
        return certify(options)
