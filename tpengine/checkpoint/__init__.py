"""Checkpoints that any layout can read: safetensors shards and a JSON index, nothing pickled.

index.py directory.py   what a checkpoint is on disk, and which ones there are; no torch
block.py                a rank's piece of a global tensor
storage.py              how such pieces become files, and come out of them
save.py load.py         saving beside training; loading into a rank's tensors
"""
