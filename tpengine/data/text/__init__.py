"""Text becomes tokens: files, the documents in them, and who turns a document into ids. No torch.

sources.py              which files are read; the standard library as bytes
documents.py            a document per text file, per line of JSONL or per row, in pieces
parquet.py              the rows
tokenizer.py            tokenizer.json and the special tokens declared beside it
encode.py windows.py    documents as arrays of ids; long ones in windows, with the ids of the whole
pool.py worker.py       other processes that encode
"""
