"""What the rows of a layer's input are: sequences of one length, documents, or what follows on a cache.

documents.py   documents packed into a micro-batch: where each begins
cache.py       keys and values of earlier tokens, for generation
"""
