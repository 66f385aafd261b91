"""Samples, read by their numbers. No torch.

reader.py   what is asked of samples
windows.py  the windows of a text
ahead.py    the thread that reads the samples of coming steps
"""
