"""Simulation: what a plan will take, in time and memory, before anything runs. No torch.

costs.py (the durations and sizes of a step), links.py, memory.py and simulator.py turn a plan into a timeline;
figures.py computes its totals. modelled/ derives costs from a configuration and a machine/, profiles/ from a measured
run; draw/ draws timelines.
"""

from tpengine.simulate.costs import ChunkBytes, Costs
from tpengine.simulate.figures import StepFigures
from tpengine.simulate.simulator import simulate

__all__ = ["ChunkBytes", "Costs", "StepFigures", "simulate"]
