"""Text becomes tokens: files, the documents in them, and who turns a document into ids. No torch.

sources.py      which files are read; the standard library as bytes
documents.py    a document per text file or per line of JSONL, in pieces
encode.py       documents as arrays of ids
"""
