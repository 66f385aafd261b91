"""Operators that communicate with nobody; a kernel, its configuration and its definition in torch each."""
