"""The matmul on which all else is built: as an operator, and as device functions that the fused kernels share."""

from tpkernels.ops.matmul.operator import matmul
from tpkernels.ops.matmul.swiglu import matmul_swiglu

__all__ = ["matmul", "matmul_swiglu"]
