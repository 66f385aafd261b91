"""The blind proof: are the steps right that `tpengine advise` predicts on this machine, of models it never saw run?

command.py (options, what is said), predictions.py (which layouts are compared, what is predicted), visits.py (turns of
a machine's file and the layouts that it predicts, and their journal), rank.py (a rank that runs layouts), verdict.py
(rows, table, bars).
"""
