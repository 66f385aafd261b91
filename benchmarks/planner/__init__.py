"""What `tpengine advise`, `plan` and `diagnose` say, held against what was measured.

machine/ (this machine's file), blind/ (steps predicted before they ran), published/ (runs that others published),
advise.py (how long an answer takes). README.md has what faults in real runs were called (tests/support/faults).
"""
