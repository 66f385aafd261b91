"""Train a transformer: `torchrun --nproc-per-node 4 -m tpengine.train`, or `python -m tpengine.train` for one process.

Whatever a user can get wrong is found before a process group exists; hence torch is imported late.
"""

from __future__ import annotations

import os
import sys

from tpengine.arguments import exit_on_user_error, parse_config
from tpengine.data import open_corpus


def main() -> None:
    """Parse, check, train."""
    with exit_on_user_error(os.environ) as launch:
        config = parse_config(sys.argv[1:], launch.world_size)
        corpus = open_corpus(config)
        from tpengine.distributed import Process, choose_device
        from tpengine.run import create_run_dir, train

        process = Process.from_environment()
        device = choose_device(config.device, process)
        run_dir = create_run_dir(config) if launch.rank == 0 else None
    train(config, corpus, process, device, run_dir)


if __name__ == "__main__":
    main()
