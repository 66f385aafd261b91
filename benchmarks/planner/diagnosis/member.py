"""One rank of the runs with faults: it trains some steps of one run at a time."""

from __future__ import annotations

import gc

from benchmarks.planner.diagnosis.faults import Fault, run_with
from tpengine.config import Config


class Member:
    """One rank; see tpengine.distributed.local_ranks.Ranks. The processes stay up from run to run."""

    def run(self, config: Config, run_dir: str, fault: Fault, forward_seconds: float) -> list[float]:
        """See faults.run_with."""
        gc.collect()
        return run_with(config, run_dir, fault, forward_seconds)
