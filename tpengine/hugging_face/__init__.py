"""Directories of Hugging Face weights: read into any layout, and written. Nothing is pickled, and no network is used.

directory.py             a model's directory: its open files, what they hold, and whether a model wants it; no torch
read.py                  boxes of parameters out of its files
write.py                 files of at most 5 GB with their index, a block of rows at a time
names.py                 what our parameters are called in the files; no torch
beginning.py             what a run or generating begins with: such a directory, or a checkpoint of a run
tokenizer_files.py       tokenizer and other files that go with weights, and what a run keeps of them; no torch
chat_template.py         how a tokenizer writes conversations, by transformers
"""
