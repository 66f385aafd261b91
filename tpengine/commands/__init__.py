"""The subcommands of `tpengine` and the command line of training. No torch."""
