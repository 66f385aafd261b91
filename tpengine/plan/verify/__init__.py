"""The verifier: plan.py runs its checks in order, one family of rules per file.

A check takes a plan, returns None or raises PlanError. It may rely on those that run before it.
"""

from tpengine.plan.verify.plan import verify

__all__ = ["verify"]
