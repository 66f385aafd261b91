"""What a machine is and does, before a run: limits, links, fused products, clocks, and the rates the planner reads.

A room of its own, a wing: it measures with the engine's layers and kernels, which the planner, that reads what it
found, must not import; commands/doctor.py joins both. Benchmarks measure a machine with the same files (measure/).

finding.py                     a line of the table, and the verdict of all
facts.py gpu_facts.py nvml.py  what a rank finds about its host, its GPU, and what the driver tells
looks.py verdicts.py           what facts mean, and what measurements mean: findings; pure
together.py                    looks that all ranks take: bounded, and who fails is said by rank
examination.py                 the looks in their order, on a rank
groups.py                      the process groups, from what always works to NCCL
hosts.py shared_directory.py   messages between hosts and their clocks; whether they share a directory
links.py products.py           what GPUs of a host carry; whether fused products are right, and what they gain
archive.py                     what is sent back of a run: one file without secrets
measure/                       rates of a rank by microbenchmarks: what planner/machine/found.py makes a machine of
"""
