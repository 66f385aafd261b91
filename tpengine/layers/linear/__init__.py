"""Column- and row-parallel linear layers, their products fused with their communication.

column.py    the way of a column-parallel product, one weight's or several's; read it first
row.py       the row-parallel layer
weights.py   who owns the memory of a weight, and the forms in which it is multiplied
bias.py      biases, and learned positions
"""
