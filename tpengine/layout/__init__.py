"""Which rank holds what, and the plan of a step that follows from it. No torch.

parameters.py   the table of parameters: names, shapes, how each is cut, its gradient bucket
groups.py       which parameters are trained, and how: groups by pattern
step_plan.py    from a configuration to verified plans; the layout of each phase of a run
flops.py        model flops and hardware flops of a step
slices.py       how buckets and tensors are cut over data-parallel replicas (ZeRO)
state_bytes.py  what a rank holds from step to step, in bytes
update_work.py  what an update of the weights takes, by optimizer
decided.py      what a run decides by its ranks' memory, and the memory through which kernels move experts' rows
stored.py       which part of which tensor of a directory of Hugging Face weights a parameter is
"""
