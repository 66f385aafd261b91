"""`tpengine data`: text files become a token file.

arguments.py   what the command understands
write.py       documents to tokens to a file
"""
