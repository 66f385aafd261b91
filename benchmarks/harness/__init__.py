"""What every benchmark shares: rounds in turns, rows of results, tables, the registry."""
