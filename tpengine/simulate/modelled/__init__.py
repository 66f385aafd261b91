"""Costs and bytes of a step from its configuration alone.

costs.py    the step's durations and sizes
actions.py  what each action takes
memory.py   what a rank holds, by kind
times/      seconds of operators on a machine, and of the actions that they make up
held/       bytes: what is kept of a micro-batch, what actions hold, prepared copies of weights

The rooms import each other from top to bottom.
"""
