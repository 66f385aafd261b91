"""Files of tokens, read where they are and when they are needed. No torch.

stored_tokens.py                    an open file, and a range of tokens in it
token_file.py writing.py            our own format
documents.py                        where documents begin in a file
content_hash.py content_check.py    the hash of a text, and its check while training goes on
"""
