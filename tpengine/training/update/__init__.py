"""The update of a step, after its gradients are summed.

optimizer.py      AdamW over the flat gradients, the learning rate, clipping
gradient_norm.py  the norm of the global gradient; in exact mode in blocks that add in a tree
loss_scale.py     float16: what the loss is multiplied by, and when that changes
"""
