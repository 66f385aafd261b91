"""Subcommands that look at a step without running it, or after it has run. No torch.

advise.py                       `tpengine advise`: the fastest layouts on a machine, and why the others lose
plan.py                         `tpengine plan`: one layout worked out
schedule.py schedule_model.py   `tpengine schedule`: print and draw the plan of a schedule or of a configuration
asked.py fixed.py               what these are asked: model, machine, batch, settings that are fixed
layout_asked.py phase_asked.py  one layout, and the phases of a run in it
progress.py                     how far a search has come
diagnose.py                     `tpengine diagnose`: why the steps of a run take as long as they do
"""
