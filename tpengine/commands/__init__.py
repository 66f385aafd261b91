"""The subcommands of `tpengine` and the command line of training. No torch is imported before a command needs it.

Each command is a parser and a function of its arguments; cli.py lists them.

arguments.py flags.py             the command line of a training run; its flags, made from the settings
keywords.py                       the same from Python: what tpengine.run is given
parsing.py                        what all commands share: parsers, --trust, signals that end a command
options.py                        what the slow commands understand; their own files are imported when they run
plan_arguments.py                 what advise, plan and schedule are asked
advise.py plan.py                 the fastest layouts on a machine; one layout worked out
schedule.py schedule_model.py schedule_packing.py   the plan of a schedule or of a configuration, printed and drawn
doctor.py doctor_arguments.py      look at a machine before a run; pack what to send back
doctor_rank.py doctor_report.py   a rank of it; its table and the files that it writes
diagnose.py watch.py              why a run's steps take as long as they do; what runs report, drawn
data_write.py data_shards.py data_check.py   token files from text, written, cut into files, checked and fitted
data_chat.py                      token files from conversations
weights.py                        import and export
generate.py generate_rank.py      continue prompts by a model's tokens; a rank of it
logprobs.py logprobs_rank.py      how likely a model finds each token of a text, as a column; a rank of it
generate_chat.py                  talk with a model, turn by turn
checkpoint.py checkpoint_diff.py  list, verify and compare the checkpoints of a run
certify.py certify_witness.py certify_compare.py    start layouts, record what ranks compute, compare
"""
