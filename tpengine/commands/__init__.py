"""The subcommands of `tpengine` and the command line of training. No torch is imported before a command needs it.

Each command is a parser and a function of its arguments; cli.py lists them. Where a command's own imports are slow, the
two are in an arguments.py of their own.

arguments.py   the command line of a training run
parsing.py     what all parsers share
given.py       what a command line names is permitted: --trust, --model.architecture, --config
stopping.py    signals that end a command
planning/      advise, plan, schedule, diagnose: a step that is not run here
data/          token files from text
watching/      watch: what runs report, drawn
weights/       import and export
generate/      continue prompts by a model's tokens
checkpoint/    list, verify and compare the checkpoints of a run
certify/       compare what the ranks computed in two layouts
"""
