"""What `tpengine generate` understands. No numpy: it takes longer to import than `--help` to print."""

from __future__ import annotations

import argparse

from tpengine.commands.given import add_trust_arguments
from tpengine.commands.parsing import count, dtype
from tpengine.commands.stopping import stoppable

DESCRIPTION = (
    "Continue prompts by a model's tokens, printed as they come; the speed is said on standard error. Processes are "
    "started here, on this host. A prompt is text where the model has a tokenizer or is one of bytes, else numbers. "
    "Several prompts are continued together, and printed when all are done."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    parser.add_argument("model", metavar="RUN", help="RUN or RUN@STEP, or a directory that transformers loads")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a prompt from a file, or - for standard input",
    )
    parser.add_argument("--max-tokens", type=count, default=200, help="of each continuation (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest (default 0, all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="then among those of this probability (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--tp", type=count, default=1, help="ranks that share every matrix (default 1)")
    parser.add_argument("--pp", type=count, default=1, help="pipeline stages (default 1)")
    parser.add_argument("--dtype", type=dtype, help="float32, bfloat16, float16 or float64 (default the weights')")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    add_trust_arguments(parser)
    parser.add_argument("--tokenizer", default="", metavar="DIR", help="a tokenizer's directory, or bytes")


def run_generate(args: argparse.Namespace) -> None:
    """Continue prompts by a model's tokens."""
    from tpengine.commands.generate.command import Options, generate

    options = Options(
        model=args.model,
        prompts=tuple(args.prompt),
        files=tuple(args.prompt_file),
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        tp=args.tp,
        pp=args.pp,
        dtype=args.dtype or "",
        device=args.device,
        tokenizer=args.tokenizer,
        architecture=args.architecture,
    )
    with stoppable():
        generate(options)
