"""The kernels of the matmuls that communicate: gather_kernel.py, scatter_kernel.py, and what slots.py adds up."""
