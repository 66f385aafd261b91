"""Column- and row-parallel linear layers, their products fused with their communication.

products.py   the differentiable products; read it first
layers.py     the two layers
memory.py     who owns the memory of a weight
packed.py     several column-parallel weights in one storage, read by one product
prepared.py   the forms in which a weight is multiplied
bias.py       biases, and learned positions
sizes.py      what must be divisible
"""
