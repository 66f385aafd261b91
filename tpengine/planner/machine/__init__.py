"""What a machine computes, reads and sends in a second, for costs before anything has run. No torch.

machine.py (a rank and its links), measured.py (a quantity by size; what the engine's operators attain), sheets.py
(machines by name, from data sheets), file.py (a measured machine's TOML file, and what `--machine` accepts), found.py
(a machine of what microbenchmarks found).
"""

from tpengine.planner.machine.file import machine_named, machine_of_values, machine_text, machine_values, read_machine
from tpengine.planner.machine.machine import Link, Machine
from tpengine.planner.machine.measured import Curve, Measured
from tpengine.planner.machine.sheets import CPU_CORE, MACHINES, machine_on

__all__ = [
    "CPU_CORE",
    "MACHINES",
    "Curve",
    "Link",
    "Machine",
    "Measured",
    "machine_named",
    "machine_of_values",
    "machine_on",
    "machine_text",
    "machine_values",
    "read_machine",
]
