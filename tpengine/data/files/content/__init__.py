"""What a text must contain.

hash.py     the hash of a text, computed once per host and noted
check.py    its check, slowly, while training goes on
"""
