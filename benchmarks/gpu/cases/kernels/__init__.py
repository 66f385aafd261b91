"""Cases of kernels: operators and their tiles, attention, fused matmuls, and what processes exchange."""
