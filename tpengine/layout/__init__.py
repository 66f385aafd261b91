"""Which rank holds what, and the plan of a step that follows from it. No torch."""
