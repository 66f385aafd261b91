"""`tpengine data`: text files become token files, and token files are checked.

arguments.py   what the command understands
write.py       documents to tokens
shards.py      tokens to files, and what a killed command has begun
fit.py         documents to samples of one length
check.py       whether files hold what they say
"""
