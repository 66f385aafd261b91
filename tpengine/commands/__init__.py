"""The subcommands of `tpengine` and the command line of training. No torch, but in export and
in the ranks that certify starts.

arguments.py                    the command line of a training run
schedule.py schedule_model.py   `tpengine schedule`: print and draw the plan of a schedule or of a configuration
data.py                         `tpengine data`: text files become a token file
export.py                       `tpengine export`: a checkpoint as a directory that transformers loads
certify/                        `tpengine certify`: compare what the ranks computed in two layouts
"""
