"""What ranks exchange over: communicators, and the shared memory that they and the fused matmuls read and write."""
