"""`python -m benchmarks.run gpu`: everything that is worth knowing about one GPU, in the minutes that there are."""
