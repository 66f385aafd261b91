"""Matmuls that communicate: all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce.

The operators have the names of their modules, so this package exports no names; `tpkernels` exports them.
"""
