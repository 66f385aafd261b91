"""A run from start to finish: its phases, its loop, and all that a step does not do. README.md says what is where."""
