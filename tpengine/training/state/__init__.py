"""The state of a run: saved, restored, checked, and which steps left it as it was."""
