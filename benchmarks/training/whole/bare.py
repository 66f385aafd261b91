"""The steps of a run and nothing else: no evaluation, checkpoint, metrics, watch or line; a rank's own process.

Takes the flags of `tpengine.train`, and writes <run_dir>/bare.json: all losses, and the seconds of the timed steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

# As in tpengine.distributed.process: imported after the process group exists, it would keep that group alive.
import torch.distributed.nn.functional

from tpengine.commands.arguments import parse_config
from tpengine.data import open_corpus
from tpengine.distributed.launch import Launch, loopback_variables
from tpengine.runs.trainer import Trainer

# Of each start, not timed: kernels are loaded, and memory is first touched.
WARMUP_STEPS = 5


def main() -> None:
    """Run one rank."""
    launch = Launch.of(os.environ)
    config = parse_config(sys.argv[1:], launch.world_size)
    os.environ.update(loopback_variables(os.environ))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=launch.rank, world_size=launch.world_size)
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    losses, begin = [], 0.0
    for step in range(config.train.steps):
        if step == WARMUP_STEPS:
            begin = time.perf_counter()
        losses.append(trainer.step.run(step).loss)
    seconds = time.perf_counter() - begin
    if launch.rank == 0:
        Path(config.run_dir, "bare.json").write_text(json.dumps({"losses": losses, "seconds": seconds}))
    # The groups end with the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
