"""What is measured of each operator, and its rivals."""
