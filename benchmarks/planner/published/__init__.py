"""Training runs that others published, predicted without a look at what they measured, and then judged.

Our cost model knows our engine alone; theirs are subclasses of it here. Constants are not fitted to published steps.

row.py sizes.py machines.py      what a row says: its text and notes, its numbers, its machine
frameworks.py engine.py          its engine: which options its framework has, and what they mean
operators.py chunk.py costs.py   what these take and hold: subclasses of tpengine/planner/modelled
lowering.py predict.py           its verified plan; its step, memory and MFU
command.py                       `python -m benchmarks.run published`: tables in, predictions and scores out
"""
