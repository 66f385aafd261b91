"""The subcommands of `tpengine` and the command line of training. No torch, but in import and export and
in the ranks that certify starts.

arguments.py                    the command line of a training run
schedule.py schedule_model.py   `tpengine schedule`: print and draw the plan of a schedule or of a configuration
advise.py                       `tpengine advise`: the fastest layouts on a machine, and why the others lose
plan.py                         `tpengine plan`: one layout worked out
plan_table.py                   `tpengine plan --table`: published runs, predicted row by row
data.py                         `tpengine data`: text files become a token file
import_weights.py               `tpengine import`: a directory, or a run's checkpoint, as a run that has not begun
diagnose.py                     `tpengine diagnose`: why the steps of a run take as long as they do
export.py                       `tpengine export`: a checkpoint as a directory that transformers loads
progress.py                     how far a command has come that writes many bytes
certify/                        `tpengine certify`: compare what the ranks computed in two layouts
"""
