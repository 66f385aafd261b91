"""Which rank holds what, and the plan of a step that follows from it. No torch.

parameters.py   the table of parameters: names, shapes, how each is cut, its gradient bucket
step_plan.py    from a configuration to verified plans
"""
