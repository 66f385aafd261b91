"""`tpengine checkpoint ls|verify|diff`: look at the checkpoints of a run, whatever layout wrote them.

arguments.py   what the command understands; which checkpoint RUN@STEP names; tables
listing.py     ls: what the indices say; no tensor is read
verify.py      verify: every file against its hash
diff.py        diff: two checkpoints, tensor by tensor
"""
