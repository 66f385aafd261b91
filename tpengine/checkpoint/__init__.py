"""Checkpoints that any layout can read: safetensors files and a JSON index, without pickle.

index.py directory.py   a checkpoint on disk, and the list of a run's checkpoints; no torch
block.py                a rank's piece of a global tensor
storage.py              write such pieces to files, and read them, hashed meanwhile
save.py load.py         save while training goes on; load into a rank's tensors
run/                    what a run's directory holds and keeps
"""
