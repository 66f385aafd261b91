"""`tpengine doctor`: look at a machine before a run; `--pack RUN` writes what to send back of one. No torch.

What it understands is in doctor_arguments.py; the ranks' side, which needs torch, in doctor_rank.py; how the answer
is printed and kept in doctor_report.py.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from tpengine.commands.doctor_arguments import check_out, check_written, out_of
from tpengine.distributed.launch import Launch
from tpengine.distributed.launcher import is_started, run_ranks_here, taken_nproc
from tpengine.doctor.archive import write_archive

_PROGRAM = "tpengine.commands.doctor_rank:rank_main"
# Ranks where there is no GPU: enough for what two of them share.
_RANKS_ON_CPU = 2


def run_doctor(args: argparse.Namespace) -> int:
    """Examine, or pack; return the exit code.

    Raises:
        ValueError: arguments that contradict each other, or name what is not there.
    """
    if args.pack is not None:
        return _pack(args)
    if args.machine is not None:
        raise ValueError("--machine goes with --pack, which sends it back: got it alone: use --out to write one")
    check_out(out_of(args))
    if args.run_dir.exists() and not args.run_dir.is_dir():
        raise ValueError(f"--run-dir must be a directory: {args.run_dir} is a file: name a directory")
    launch = Launch.of(os.environ)
    if is_started(launch, os.environ):
        if args.nproc is not None:
            raise ValueError(
                f"--nproc starts ranks, and this process is rank {launch.rank} of {launch.world_size} already: leave "
                "it out, or start one process without torchrun or srun"
            )
        from tpengine.commands.doctor_rank import examine

        return examine(args, launch)
    check_written(out_of(args))
    num_ranks, _ = taken_nproc([] if args.nproc is None else ["--nproc", args.nproc])
    if num_ranks is None:
        num_ranks = (num_gpus() if args.device != "cpu" else 0) or _RANKS_ON_CPU
    return run_ranks_here(num_ranks, _PROGRAM, _for_ranks(args))


def num_gpus() -> int:
    """Return how many GPUs the driver shows this process, by CUDA_VISIBLE_DEVICES too; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return 0
    return number.value


def _for_ranks(args: argparse.Namespace) -> list[str]:
    """Return the arguments that ranks understand as this command did."""
    given: Mapping[str, object] = {
        "--device": args.device,
        "--dtype": args.dtype,
        "--run-dir": args.run_dir,
        "--out": args.out,
    }
    arguments = [f"{name}={value}" for name, value in given.items() if value is not None]
    return [*arguments, *(["--quick"] if args.quick else [])]


def _pack(args: argparse.Namespace) -> int:
    out: Path = args.out or Path("report.tar.gz")
    packed = write_archive(out, args.pack, args.machine, os.environ)
    for line in packed:
        print(line)
    print(f"wrote {out}: look into it before you send it: tar -xzOf {out} | less")
    return 0
