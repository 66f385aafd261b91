"""The blind proof: are the steps right that `tpengine advise` predicts on this machine, of models it never saw run?

command.py (options, what is said), predictions.py (which layouts are compared, what is predicted), visits.py (steps
while the machine is as its file says, and their journal), rank.py (a rank that runs layouts), verdict.py (rows, table,
bars).
"""
