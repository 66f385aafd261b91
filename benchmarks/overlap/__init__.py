"""Matmuls fused with their communication against matmul and collective; and exchanges alone."""
