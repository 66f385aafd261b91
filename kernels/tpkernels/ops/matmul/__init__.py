"""The matmul that everything else is built on: plain, and as the device functions that the fused kernels share."""

from tpkernels.ops.matmul.operator import matmul
from tpkernels.ops.matmul.swiglu import matmul_swiglu

__all__ = ["matmul", "matmul_swiglu"]
