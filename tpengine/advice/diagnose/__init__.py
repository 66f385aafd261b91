"""Why the steps of a run take as long as they do: one verdict, and the change that the simulator says helps most.

evidence.py    what a run has left in its directory; baseline.py, the recorded step, simulated again
changes.py     other settings of the run: the verified plan that they give, with the recorded costs
reasons/       a slow rank, a bubble, exposed exchanges, a lack of memory, the host
finding.py     a reason with what it is worth; verdict.py chooses
hang.py        how a run ended that could not go on
"""

from tpengine.advice.diagnose.finding import Fault, Finding
from tpengine.advice.diagnose.hang import chain
from tpengine.advice.diagnose.verdict import Diagnosis, diagnose

__all__ = ["Diagnosis", "Fault", "Finding", "chain", "diagnose"]
