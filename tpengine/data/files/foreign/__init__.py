"""Token files of others, read where they are.

megatron.py     `.bin` with `.idx` beside, of Megatron-LM and NeMo
datatrove.py    `.ds` with `.ds.index` and `.ds.metadata` beside
plain.py        ids one behind the other, with a `.json` beside that says what they are
problems.py     what is said of a file that is not what it should be
"""
