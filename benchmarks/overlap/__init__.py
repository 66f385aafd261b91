"""Matmuls fused with their communication against matmul and collective; exchanges alone."""
