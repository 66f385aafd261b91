"""What `tpengine advise`, `plan` and `diagnose` say, held against what was measured.

machine/ (this machine's file), blind/ (steps predicted before they ran), diagnosis/ (faults put into real runs),
published/ (runs that others published), advise.py (how long an answer takes).
"""
