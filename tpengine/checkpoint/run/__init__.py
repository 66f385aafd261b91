"""What a run's directory holds and keeps: configuration, checkpoints that stay, rollbacks, uploads.

run_directory.py   created or found, and locked by one run
resume.py          a run's configuration and checkpoints, and whether they belong together
retention.py       which checkpoints stay
rollbacks.py       the samples that rollbacks leave out
upload.py          the command that is run for complete checkpoints; guardian.py ends it with its rank
"""
