"""Directories of Hugging Face weights: read into any layout, and written. Nothing is pickled, and no network is used.

directory.py check.py    a model's directory: what its files hold, and whether this is what a model wants; no torch
source.py read.py        bytes of open files, counted; boxes of parameters out of them
write.py                 files of at most 5 GB with their index, a block of rows at a time
names.py                 what our parameters are called in the files; no torch
kept.py                  what a run keeps of the directory it began from; no torch
companions.py            tokenizer and other files that go with the weights, as they came; no torch
"""
