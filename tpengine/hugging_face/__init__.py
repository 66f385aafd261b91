"""Directories of Hugging Face weights: read into any layout. Nothing is pickled, and no network is used.

header.py                the header of a safetensors file, checked; no torch
directory.py check.py    a model's directory: what its files hold, and whether this is what a model wants; no torch
source.py read.py        bytes of open files, counted; boxes of parameters out of them
"""
