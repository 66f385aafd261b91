"""Checkpoints that any layout can read: safetensors files and a JSON index, without pickle; and a run's directory.

index.py directory.py       a checkpoint on disk; the list of a run's checkpoints, and which of them stay; no torch
storage.py                  a rank's piece of a global tensor; write pieces to files, and read them, hashed meanwhile
save.py load.py             save while training goes on; load into a rank's tensors
run_directory.py resume.py  created or found, and locked by one run; its configuration and checkpoints, and their fit
fingerprint.py              what identifies the data of a run, and what has changed of it
rollbacks.py                the samples that rollbacks leave out
upload.py guardian.py       the command that is run for complete checkpoints; what ends it with its rank
"""
