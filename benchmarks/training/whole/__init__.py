"""A run with everything on that people switch on, beside its bare steps."""
