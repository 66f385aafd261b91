"""The way from text to a step's batch, against what the tokenizers' library and a disk allow.

command.py   which cases there are; rows and the table
corpus.py    what is measured with: many files of documents, a text, a tokenizer
members.py   what the measured processes do
"""
