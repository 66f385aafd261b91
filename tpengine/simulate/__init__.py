"""What a plan will take, in time and memory, before anything runs; no torch.

costs.py (what is known of a step), links.py, memory.py and simulator.py turn a plan into a timeline, figures.py sums it
up; modelled/ derives costs from a configuration, profiles/ from a measured run; draw/ shows timelines.
"""

from tpengine.simulate.costs import ChunkBytes, Costs
from tpengine.simulate.figures import StepFigures
from tpengine.simulate.simulator import simulate

__all__ = ["ChunkBytes", "Costs", "StepFigures", "simulate"]
