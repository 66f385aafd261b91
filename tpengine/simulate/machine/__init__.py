"""What a machine computes, reads and sends in a second, for costs before anything has run. No torch.

curve.py (a quantity by size), link.py (messages and collectives), measured.py (what the engine's operators attain),
machine.py (a rank and its links), sheets.py (machines by name, from data sheets), file.py (a measured machine's TOML
file, and what `--machine` accepts).
"""

from tpengine.simulate.machine.curve import Curve
from tpengine.simulate.machine.file import machine_named, machine_of_values, machine_text, machine_values, read_machine
from tpengine.simulate.machine.link import Link
from tpengine.simulate.machine.machine import Machine
from tpengine.simulate.machine.measured import Measured
from tpengine.simulate.machine.sheets import CPU_CORE, MACHINES, machine_on

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
