"""The planner: what a plan will take, in time and memory, before anything runs; and what to change. No torch.

costs.py (the durations and sizes of a step), simulator.py, links.py (when transfers run) and memory.py turn a plan
into a timeline; figures.py computes its totals.

modelled/   costs from a configuration and a machine
machine/    machines by name and by file
profiles/   costs from a measured run, and the files and lines that recorded steps become
draw/       timelines as pictures
advice/     which layout is fastest and fits; where a layout's time and memory go
diagnose/   a run that has recorded steps: why its step takes as long as it does
"""

from tpengine.planner.costs import ChunkBytes, Costs
from tpengine.planner.figures import StepFigures
from tpengine.planner.simulator import simulate

__all__ = ["ChunkBytes", "Costs", "StepFigures", "simulate"]
