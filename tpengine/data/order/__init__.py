"""The order of samples: a permutation without memory, and where a run is in it. No torch.

permutation.py  one-to-one, keyed, computed for any place
position.py     which order, how many samples were read, what is left out
"""
