"""The matmul that everything else is built on: plain, and as the device functions that the fused kernels share."""
