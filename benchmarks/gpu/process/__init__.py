"""The process of a case: what starts it, what runs in it, and which comes next."""
