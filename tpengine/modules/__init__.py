"""Any torch module in data parallel, in a pipeline, or cut over tensor-parallel ranks: its forward, its own names.

data_parallel.py      `DataParallel`: gradients in flat buckets, summed while backward runs
sharded_optimizer.py  `ShardedOptimizer`: the state of any torch optimizer, divided over the replicas; ownership.py says
                      who owns what and sends it, step_agreement.py whether all do the same step, optimizer_parts.py
                      loads what another number of replicas has saved
pipeline.py           `Pipeline`: any nn.Sequential; cut.py has costs and cuts, pipeline_checks.py refusals and losses
foreign_model.py      `parallelize` cuts a model that somebody else wrote in place, by a table (rules.py), and puts
                      foreign_layers.py in place of its layers; `whole_state_dict` gives its weights back in one piece

Nothing that trains our own models imports this room. Layers for a model of your own, which cut activations over the
tokens too, are in tpengine.layers.
"""

from tpengine.modules.data_parallel import DataParallel
from tpengine.modules.foreign_model import parallelize, whole_state_dict
from tpengine.modules.pipeline import Pipeline
from tpengine.modules.sharded_optimizer import ShardedOptimizer

__all__ = ["DataParallel", "Pipeline", "ShardedOptimizer", "parallelize", "whole_state_dict"]
