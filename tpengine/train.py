"""Train a transformer: `torchrun --nproc-per-node 4 -m tpengine.train`, `srun python -m tpengine.train` under SLURM, or
`python -m tpengine.train` for one process.

Whatever a user can get wrong is found before a process group exists; hence torch is imported late.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from functools import partial

from tpengine.activity import Activity
from tpengine.arguments import exit_on_user_error, leave, parse_config
from tpengine.data import open_corpus
from tpengine.resume import find_checkpoint
from tpengine.run_dir import open_run_dir
from tpengine.watch import Watch

# A process lets go of its connections a moment before it is gone, and the report is to say which rank is.
_DYING_SECONDS = 0.5


def main() -> None:
    """Parse, check, train."""
    message = None
    with exit_on_user_error(os.environ) as launch, Watch(launch.rank, Activity()) as watch:
        os.environ.update(launch.variables())  # what srun said in other words
        config = parse_config(sys.argv[1:], launch.world_size)
        # Reading a text without a hash takes as long as the disk does.
        corpus = open_corpus(config, say=partial(print, flush=True) if launch.rank == 0 else lambda _: None)
        from tpengine.distributed import choose_device, lost_peer
        from tpengine.run import Job, train
        from tpengine.trainer import RunError

        device = choose_device(config.device, launch)
        # Held until this process ends, so that no other run writes there.
        run_dir, _lock = open_run_dir(config) if launch.rank == 0 else (None, None)
        if run_dir is not None:
            corpus.note_hash(run_dir)
        checkpoint = None
        if config.resume:
            ends = corpus.fingerprint_of_ends
            checkpoint = find_checkpoint(config, corpus.fingerprint(), fingerprint_of_ends=ends)
        try:
            train(Job(config, corpus, launch, device, run_dir, checkpoint), watch)
        except RunError as error:
            message = str(error)
        except Exception as error:
            lost = lost_peer(error)
            if lost:
                time.sleep(_DYING_SECONDS)
                watch.report_and_leave(lost)
            traceback.print_exc()
            watch.report_and_leave(repr(error.__cause__ or error))
    if message is not None:
        leave(message, os.environ, speaks=launch.rank == 0)


if __name__ == "__main__":
    main()
