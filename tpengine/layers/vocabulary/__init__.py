"""The layers whose rows are the vocabulary, cut over tp.

embedding.py   rows of a table, by tokens
loss.py        cross-entropy over cut logits
"""
