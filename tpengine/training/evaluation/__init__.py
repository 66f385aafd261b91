"""Held-out loss and sampling: the model that is trained, run through a forward-only plan on the engine's executor.

`forward_pass.py` runs micro-batches through the model; `held_out.py` sums their losses; `sampling.py` draws tokens;
`between_steps.py` does both while a run goes on.
"""
