"""Samples, read by their numbers. No torch.

reader.py   what is asked of samples
windows.py  the windows of a text
fitted.py   whole documents, put together by an index
ahead.py    the thread that reads the samples of coming steps
"""
