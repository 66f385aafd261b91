"""The verifier: plan.py runs the checks in order; each file holds one family of rules.

A check takes a plan and returns None or raises PlanError. It may rely on the checks that run before it.
"""

from tpengine.plan.verify.plan import verify

__all__ = ["verify"]
