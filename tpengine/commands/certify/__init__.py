"""`tpengine certify`: is training in one layout, bit for bit, training in another?

evidence.py compares what witness.py saw on each rank; distance.py measures fast mode against exact instead; command.py
is the command. Only witness.py needs torch, and only the ranks import it.
"""
