"""The verifier's checks, one rule family per file; `tpengine.plan.verify` runs them in order.

Each takes a plan, returns None or raises PlanError. A check may rely on those that run before it.
"""
