"""Files of tokens, read where they are and when they are needed. No torch.

source.py find.py                   a source: one file, a directory, a glob or a list
one_file.py source_tokens.py        a file of a source; the tokens of all of them
stored_tokens.py documents.py       a range of tokens in an open file; where documents begin in it
token_file.py writing.py            our own format
foreign/                            Megatron's, datatrove's, plain ids
content/                            the hash of a text, and its check while training goes on
"""
