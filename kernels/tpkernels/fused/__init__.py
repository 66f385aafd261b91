"""Matmuls that communicate: all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce.

The operators are named like their modules, so this package names nothing; `tpkernels` does.
"""
