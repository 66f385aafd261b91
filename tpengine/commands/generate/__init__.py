"""`tpengine generate`: what a model says.

arguments.py   what the command understands
command.py     starts the ranks, prints their tokens as they come
"""
