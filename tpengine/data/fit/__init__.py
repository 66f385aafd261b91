"""Documents fitted whole into samples of S tokens, computed once and stored beside the data. No torch.

best_fit.py  which documents share a sample
index.py     the file that says so, read a sample at a time
writing.py   write it
"""
