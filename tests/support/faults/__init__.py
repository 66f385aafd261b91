"""Faults put into real runs: cases.py has them in their sizes; faulty_runs.py, runs whose blocks take a given time.

tests/tpengine/planner/diagnose/test_real_runs.py shows that `tpengine diagnose` names them.
"""
