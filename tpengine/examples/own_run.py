"""A run of your own from Python: data, loss, metric and callback; it takes the flags of `tpengine train` too.

Run: torchrun --nproc-per-node 2 -m tpengine.examples.own_run
"""

import sys
from typing import Any

import numpy as np

import tpengine


class Counting:
    """Samples of 32 tokens and the label of the last: each counts upwards modulo 64, in steps of 1 to 7."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> Any:
        return (number // 7 + np.arange(33) * (1 + number % 7)) % 64


def unsure(output: tpengine.LastOutput, batch: tpengine.MicroBatch) -> Any:
    return -output.token_logprobs(batch.labels).sum() - 0.01 * output.entropy().sum()


class SayEntropy(tpengine.Callback):
    on_first_rank_only = True

    def after_evaluation(self, numbers: Any) -> None:
        print(f"step {numbers['step']}: entropy {numbers['held_out_metric/entropy']:.2f} nats", file=sys.stderr)


metrics = {"entropy": lambda output, batch: output.entropy().sum()}
sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 96, "num_layers": 2, "vocab_size": 64}
train = {"seq_len": 32, "steps": 60, "eval_every": 20, "sample_tokens": 0}
if __name__ == "__main__":
    own: dict[str, Any] = {"data": Counting(), "loss": unsure, "metrics": metrics, "callbacks": [SayEntropy()]}
    tpengine.run(sys.argv[1:], **own, model=sizes, train=train)
