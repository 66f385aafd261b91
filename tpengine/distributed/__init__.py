"""Processes: how ranks start, meet, form groups and agree.

launch.py                        rank and number of processes, as torchrun or srun says them; no torch
meeting.py                       where ranks meet before there is a process group
process.py                       device, transport, start-up and end of one process
mesh.py groups.py                the axes pp, dp, tp and their groups; which of them exchange through memory
agreement.py messages.py         whether all ranks have built the same; what they tell each other beside tensors
local_ranks.py rank_process.py   ranks that one command starts on this host, and what each of them runs
loopback.py                      where ranks of one host listen
"""
