"""Other engines, as options of the cost model. No torch.

engine.py (what they do differently from ours), flash.py (attention kernels), kept.py (what their layers keep).
"""
