"""Train a transformer: `torchrun --nproc-per-node 4 -m tpengine.train`, or `python -m tpengine.train` for one process.

Whatever a user can get wrong is found before a process group exists; hence torch is imported late.
"""

from __future__ import annotations

import os
import sys

from tpengine.arguments import exit_on_user_error, leave, parse_config
from tpengine.data import open_corpus


def main() -> None:
    """Parse, check, train."""
    with exit_on_user_error(os.environ) as launch:
        config = parse_config(sys.argv[1:], launch.world_size)
        corpus = open_corpus(config)
        from tpengine.distributed import choose_device
        from tpengine.run import create_run_dir, train
        from tpengine.trainer import RunError

        device = choose_device(config.device, launch)
        run_dir = create_run_dir(config) if launch.rank == 0 else None
    try:
        train(config, corpus, launch, device, run_dir)
    except RunError as error:
        leave(str(error), os.environ, speaks=launch.rank == 0)
    except KeyboardInterrupt:
        if launch.rank == 0:
            print(f"\ntpengine: interrupted: what was measured is in {run_dir}", file=sys.stderr, flush=True)
        # Other ranks may be gone already: nothing that talks to them may run any more.
        os._exit(130)


if __name__ == "__main__":
    main()
