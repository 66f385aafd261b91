"""Costs and bytes of a step from its configuration alone.

operators.py (the operators of a chunk, on a machine), actions.py (what each action takes), costs.py (the step's
durations and sizes), packed.py (pairs of queries and keys in packed documents), bytes.py (what a block keeps),
activations.py and working.py (what an action holds), prepared.py (copies of weights on a CPU), memory.py (what a rank
holds, by kind). Of other engines: engine.py (what they do differently), flash.py (attention kernels), kept.py (what
their layers keep).
"""
