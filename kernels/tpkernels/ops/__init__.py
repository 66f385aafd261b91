"""Operators without communication; each has a kernel, its configuration and its definition in torch."""
