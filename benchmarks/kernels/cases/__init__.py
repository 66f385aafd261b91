"""What is measured of each operator, and against which rivals."""
