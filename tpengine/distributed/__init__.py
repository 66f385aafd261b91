"""Processes: how ranks start, meet, form groups and agree.

launcher.py                      the ranks of a run, started on this host by one command; no torch
launch.py                        rank and number of processes, from the environment of torchrun or srun; the interface
                                 on which ranks of one host listen; no torch
meeting.py                       how ranks meet before there is a process group
process.py                       device, backend, start and end of one process
facts.py                         what of the ranks' hosts, GPUs and NCCL cannot work together; no torch
groups.py                        process groups: split off NCCL's default group, or made by their members
nccl_limits.py                   processors that NCCL may hold, by group; its environment, its buffers; no torch
connect.py                       the first exchange of each group; a dead link ends all ranks with one line
mesh.py                          the axes pp, dp, tp, ep and their groups; which groups exchange through shared memory
agreement.py                     whether all ranks have built the same model; messages that are not tensors
local_ranks.py rank_process.py   ranks that one command starts on this host, and the program of each
"""
