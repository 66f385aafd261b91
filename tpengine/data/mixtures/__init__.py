"""Mixtures: several sources in one sequence of samples, by weight. No torch.

table.py     the file of a mixture
shares.py    which sample of which source is sample i
samples.py   the samples of a mixture, and what is held out of each source
"""
