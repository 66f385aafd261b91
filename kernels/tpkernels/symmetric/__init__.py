"""Memory that every rank of a group has, and signals in it."""
