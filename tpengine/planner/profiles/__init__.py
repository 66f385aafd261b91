"""What a recorded run took: its profile as a file (file.py), with what each rank did (ranks.py), and the costs of a
step from it (costs.py). No torch.
"""
