"""What an architecture is: the parts of its blocks, the table of its parameters, and where config.json has its numbers.

A file of this folder, or one of a user's (`--model.architecture FILE.py`), ends with

    ARCHITECTURE = Architecture("Qwen3ForCausalLM", table=..., block=..., numbers=...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpengine.architectures.describe.config_json import ConfigJson
from tpengine.architectures.describe.orders import Order, pre_norm
from tpengine.architectures.describe.parts import Ends, Part
from tpengine.architectures.describe.table import Table
from tpengine.config import ModelConfig


def _plain_ends(_: ModelConfig) -> Ends:
    return Ends()


@dataclass(frozen=True)
class Architecture:
    """One kind of transformer.

    Attributes:
        name: as `architectures` in config.json has it.
        table: a rule for each parameter.
        block: the parts of a model's layer number i, by name, in the order of their use.
        numbers: config.json -> the model.
        order: how a block's parts are put together: a function of orders.py, or one of your own.
        ends: what stands before and behind the blocks.
        prefix: what the names in the files begin with, the output head's apart.
        undecayed: patterns of names (our names, as fnmatch has them) of matrices that weight decay passes over, such as
            "embed_*". Norm weights and biases never decay.
    """

    name: str
    table: Table
    block: Callable[[ModelConfig, int], Mapping[str, Part]]
    numbers: Callable[[ConfigJson], ModelConfig]
    order: Order = pre_norm
    ends: Callable[[ModelConfig], Ends] = _plain_ends
    prefix: str = "model."
    undecayed: tuple[str, ...] = ()
