"""What would be launched on a GPU, without one.

operators.py (the launches of every operator), compile.py (each of them compiled for every target), step.py (those of a
training step), count.py (how many a block and a step's end make), traffic.py (the bytes that kernels load and store),
host_time.py and kernel_time.py (what fused calls and launches cost the host).
"""
