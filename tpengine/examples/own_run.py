"""A run of your own from Python, with your data and your callback; it takes the flags of `tpengine train` too.

Run: torchrun --nproc-per-node 2 -m tpengine.examples.own_run
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tpengine


class Counting:
    """Samples of 32 tokens and the label of the last: each counts upwards modulo 64, in steps of 1 to 7."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        return (number // 7 + np.arange(33) * (1 + number % 7)) % 64


class Report(tpengine.Callback):
    """Says on the first rank how much surer than chance the model is of a token, in nats."""

    on_first_rank_only = True

    def after_evaluation(self, numbers: Mapping[str, Any]) -> None:
        print(f"step {numbers['step']}: {np.log(64) - numbers['held_out_loss']:.2f} nats surer", file=sys.stderr)


model = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 96, "num_layers": 2, "vocab_size": 64}
train = {"seq_len": 32, "steps": 60, "eval_every": 20, "sample_tokens": 0}
if __name__ == "__main__":
    result = tpengine.run(sys.argv[1:], data=Counting(), callbacks=[Report()], model=model, train=train)
