"""One layout, worked out. No torch.

sheet.py (its plan, simulated), parts.py (the step's time by cause), memory.py (its memory as formulas with numbers put
in).
"""
