"""What the slow commands understand: data, import and export, generate, logprobs, certify.

Each command's own file is imported when it runs, once its options are known to be right: torch and numpy take longer to
import than `--help` to print.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from tpengine.commands.parsing import add_trust_arguments, count, dtype, stoppable
from tpengine.config.settings import DEFAULT_SHARE_HELD_OUT
from tpengine.plan import SCHEDULES

DATA_DESCRIPTION = (
    "Write token files from text files, each one document, .jsonl files (.gz, .zst too), each line one document, and "
    ".parquet files, each row one document; or check token files, or fit their documents into samples. A command that "
    "was killed goes on where it stopped when it is given again."
)
IMPORT_DESCRIPTION = (
    "Write a run's directory: config.toml, a checkpoint of step 0 that any layout begins from, and "
    "what goes with the weights. All other flags, after DIR, are settings of the run, as --train.steps 200."
)
GENERATE_DESCRIPTION = (
    "Continue prompts by a model's tokens, printed as they come; the speed is said on standard error. Processes are "
    "started here, on this host. A prompt is text where the model has a tokenizer or is one of bytes, else numbers. "
    "Several prompts are continued together, and printed when all are done."
)
LOGPROBS_DESCRIPTION = (
    "Compute the log-probability of each token under a model, given those before it in its document, and write them as "
    "a column beside the token files (what DPO calls reference log-probabilities). Documents are cut as --data.packing "
    "fit cuts them. Processes are started here, on this host, tp x pp x dp of them."
)
CERTIFY_DESCRIPTION = (
    "Train a small model with dropout, clipping and ignored labels in two layouts, on the CPU, in "
    "processes started here (about 0.4 GB each; a minute for 5 steps on 2 cores), and compare every bit. "
    "Exit code 0: identical; 1: not, and the first difference is named; 2: the layouts cannot be."
)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine data` understands."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="directories and files; or - for JSON lines from the standard input",
    )
    what.add_argument(
        "--chat",
        type=Path,
        nargs="+",
        metavar="FILE",
        help='files of JSON lines, a conversation each ({"messages": [...], "tools": [...]}), written by the chat '
        "template of --tokenizer, with a weight for each token; or -",
    )
    what.add_argument(
        "--check",
        metavar="PATH",
        help="check token files, named as --data.path names them: hashes, ids, documents and their marks",
    )
    what.add_argument(
        "--fit",
        nargs=2,
        metavar=("S", "PATH"),
        help="put the documents of token files, named as --data.path names them, into samples of S tokens, whole where "
        "they fit, for --data.packing fit; the index is written beside the first file",
    )
    parser.add_argument(
        "--held-out-fraction",
        type=float,
        metavar="X",
        help=f"with --fit: data.held_out_fraction of the run (default {DEFAULT_SHARE_HELD_OUT}); 0 of one "
        "with data.held_out",
    )
    parser.add_argument(
        "--train-on",
        choices=("assistant", "last", "all"),
        help="with --chat: which tokens have weight 1, the others 0: all answers of the assistant (the default), its "
        "last one, or all tokens",
    )
    parser.add_argument("--seq-len", type=count, metavar="S", help="with --chat: refuse a conversation of more tokens")
    parser.add_argument("--out", type=Path, metavar="FILE", help="token file to write, a new one; or a directory")
    parser.add_argument(
        "--pattern", default="**/*", metavar="GLOB", help="which files of a directory (default '**/*', all)"
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="of a line of JSONL or a row, has the text (default text)"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="DIR",
        help="directory with a tokenizer.json, of a model or a run; or bytes (the default), as tokens",
    )
    for name in ("begin", "end"):
        parser.add_argument(
            f"--{name}",
            nargs="?",
            const="",
            metavar="TOKEN",
            help=f"{name} each document with this token or id; without one, with the tokenizer's own",
        )
    parser.add_argument(
        "--shard-tokens",
        type=count,
        metavar="N",
        help="write a directory of token files, each of so many tokens and the rest of a document",
    )
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="processes that encode (default: as many as cores; 1: this one); the bytes are the same for any number",
    )


def run_data(args: argparse.Namespace) -> None:
    """Turn text files into token files, or check token files."""
    _check_together(args)
    if args.check is not None:
        from tpengine.commands.data_check import check_data

        with stoppable():
            check_data(args.check, args.tokenizer)
        return
    if args.fit is not None:
        from tpengine.commands.data_check import fit_data

        with stoppable():
            fit_data(args.fit[1], args.fit[0], args.held_out_fraction)
        return
    if args.out is None:
        made_of = "--from" if args.chat is None else "--chat"
        raise ValueError(f"{made_of} needs --out: the token file to write, such as --out text.tokens")
    if args.chat is not None:
        from tpengine.commands.data_chat import write_chat

        with stoppable():
            write_chat(args.chat, args.tokenizer, args.out, args.train_on or "assistant", args.seq_len)
        return
    from tpengine.commands.data_write import WriteOptions, write_data

    with stoppable():
        asked = WriteOptions(
            args.sources,
            args.pattern,
            args.field,
            args.tokenizer,
            begin=args.begin,
            end=args.end,
            out=args.out,
            shard_tokens=args.shard_tokens,
            workers=args.workers,
        )
        write_data(asked)


def _check_together(args: argparse.Namespace) -> None:
    """Raise ValueError if an option is given that the command would not use."""
    if args.held_out_fraction is not None and args.fit is None:
        raise ValueError("--held-out-fraction goes with --fit: use tpengine data --fit S PATH, or leave it out")
    for name in ("train_on", "seq_len"):
        if getattr(args, name) is not None and args.chat is None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} goes with --chat: use tpengine data --chat FILE, or leave it out")
    if args.sources is not None:
        return
    for name in ("begin", "end", "shard_tokens", "workers", *(["out"] if args.chat is None else [])):
        if getattr(args, name) is not None:
            used = next(f"--{mode}" for mode in ("chat", "check", "fit") if getattr(args, mode) is not None)
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} goes with --from, not with {used}: leave it out")


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
    from tpengine.commands.weights import import_weights

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
    from tpengine.commands.weights import export

    with stoppable():
        names = export(args.run_dir, args.step, args.out, args.dtype, args.architecture)
    print(f"{args.out}: {len(names)} tensors; load it with AutoModelForCausalLM.from_pretrained({str(args.out)!r})")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine generate` understands."""
    parser.add_argument("model", metavar="RUN", help="RUN or RUN@STEP, or a directory that transformers loads")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a prompt from a file, or - for standard input",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="talk by the tokenizer's chat template: each line of the standard input is a message, answers are printed",
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
    from tpengine.commands.generate import GenerateOptions, generate
    from tpengine.commands.generate_chat import chat

    options = GenerateOptions(
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
        chat(options) if args.chat else generate(options)


def add_logprobs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine logprobs` understands."""
    parser.add_argument("model", metavar="MODEL", help="RUN or RUN@STEP, or a directory that transformers loads")
    parser.add_argument("data", metavar="DATA", help="token files, as --data.path names them")
    parser.add_argument("--out", required=True, metavar="COLUMN", help="name of the new column, such as ref_logprobs")
    for axis, what in (("tp", "ranks that share every matrix"), ("pp", "pipeline stages"), ("dp", "replicas")):
        parser.add_argument(f"--{axis}", type=count, default=1, help=f"{what} (default 1)")
    parser.add_argument(
        "--seq-len", type=count, default=0, help="tokens of a sequence (default that of the run, or 2048)"
    )
    parser.add_argument("--dtype", type=dtype, help="float32, bfloat16, float16 or float64 (default the weights')")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    add_trust_arguments(parser)


def run_logprobs(args: argparse.Namespace) -> None:
    """Write the log-probabilities of all tokens of a text, as a column beside it."""
    from tpengine.commands.logprobs import LogprobsOptions, write_logprobs

    options = LogprobsOptions(
        model=args.model,
        data=args.data,
        out=args.out,
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        seq_len=args.seq_len,
        dtype=args.dtype or "",
        device=args.device,
        architecture=args.architecture,
    )
    with stoppable():
        write_logprobs(options)


def add_certify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine certify` understands."""
    for axis in ("tp", "pp"):
        parser.add_argument(f"--{axis}", type=count, default=1, help=f"size of the axis {axis} (default 1)")
    parser.add_argument("--dp", type=count, help="size of the axis dp (default 1, or what --ep needs)")
    parser.add_argument("--ep", type=count, default=1, help="ranks that share experts, as in training (default 1)")
    parser.add_argument(
        "--zero", type=int, choices=range(4), default=0, help="what replicas shard, as in training (default 0)"
    )
    parser.add_argument(
        "--against", metavar="LAYOUT", help="the other one, as tp=4,pp=1,dp=1 or tp=4 (default one process)"
    )
    parser.add_argument(
        "--preset", default="", help="tiny, bench, llama_1b or certify (the default); with --ep tiny_moe is the default"
    )
    parser.add_argument(
        "--train.balance",
        dest="balance",
        choices=("none", "loss", "bias"),
        default="none",
        help="what keeps experts even, as in training (default none)",
    )
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
    from tpengine.commands.certify import CertifiedLayout, CertifyOptions, certify, parse_layout

    # ep divides tp * dp.
    dp = args.dp or args.ep // math.gcd(args.ep, args.tp)
    layout = CertifiedLayout(args.tp, args.pp, dp, args.zero, args.ep)
    against = None if args.against is None else parse_layout(args.against)
    layouts = (layout,) if against is None else (layout, against)
    options = CertifyOptions(
        layout=layout,
        against=against,
        preset=args.preset or ("certify" if max(of.ep for of in layouts) == 1 else "tiny_moe"),
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
        balance=args.balance,
        dp_follows_ep=args.dp is None,
    )
    with stoppable():
        return certify(options)
