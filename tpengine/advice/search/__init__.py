"""The search: best_first.py goes through layouts by their bounds (bounds.py); nearest.py explains what is too large.

lists.py is what bounds know of a schedule: when its actions can run, and what is held at once.
"""

from tpengine.advice.search.best_first import search
from tpengine.advice.search.found import CLOSE, Found, Row, TooLarge

__all__ = ["CLOSE", "Found", "Row", "TooLarge", "search"]
