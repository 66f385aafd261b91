"""Why the steps of a run take as long as they do: one verdict, and the change that the simulator says helps most.

evidence.py               what a run has left in its directory; the recorded step, simulated again; a finding
changes.py                other settings of the run: the verified plan that they give, with the recorded costs
slow_ranks.py             reasons on ranks: one that is slow, a bubble, the host
exchanges_and_memory.py   reasons between ranks: exposed exchanges, a lack of memory
verdict.py                which reason is worth most; how a run ended that could not go on
"""

from tpengine.planner.diagnose.evidence import Fault, Finding
from tpengine.planner.diagnose.verdict import Diagnosis, chain, diagnose

__all__ = ["Diagnosis", "Fault", "Finding", "chain", "diagnose"]
