"""The subcommands of `tpengine` and the command line of training. No torch.

arguments.py                    the command line of a training run
schedule.py schedule_model.py   `tpengine schedule`: a plan printed and drawn, of a schedule or of a configuration
certify/                        `tpengine certify`: what the ranks saw, compared; distances
"""
