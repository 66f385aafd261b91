"""Mixture of experts: which experts a token is sent to, the order of its rows, products of each expert's rows."""
