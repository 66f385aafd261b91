"""What `DataParallel` does with any `nn.Module`, by stage.

whole_gradients.py    zero 0: every replica holds everything, and sums whole gradients
sliced_replicas.py    zero 1 to 3: what the hooks on a model do, in the order of a step
units.py              zero 1 to 3: which modules are gathered together, and how parameters lie in buckets
unit_weights.py       the weights of all buckets, and the float32 slices that the optimizer updates
unit_gradients.py     the gradients of all buckets, whole only while backward fills them
forwards.py           zero 2 and 3: what a forward runs: all, or a chunk of a pipeline's stage
gather_order.py       zero 3: which units are whole, and what is gathered next
passes.py             zero 2 and 3: ranks that run different numbers of forward and backward passes wait for each other
"""
