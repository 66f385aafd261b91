"""What becomes of rows: tables, bars, and the file of a machine."""
