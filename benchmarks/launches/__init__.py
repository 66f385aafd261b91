"""What would be launched on a GPU, without one.

operators.py (the launches of every operator), compile.py (each of them compiled for every target), host_time.py (what a
fused call costs the host).
"""
