"""Memory that every rank of a group has, and signals in it.

processes.py host_memory.py         which ranks share a host; memory that they share; no torch
memory.py signals.py                every rank's memory as tensors; flags, bounded waits, poison
signals_kernel.py wait_kernels.py   the same signals inside Triton kernels; kernels that only wait
stream_memory.py                    waits and writes of a stream, by the driver's memory operations
device_clock.py                     the clock by which waits inside kernels end
cuda_memory.py                      memory in which GPUs address each other; co-located ranks in one process
"""
