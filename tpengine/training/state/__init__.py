"""The state of a run: save it, restore it, check it, and list the steps that were skipped."""
