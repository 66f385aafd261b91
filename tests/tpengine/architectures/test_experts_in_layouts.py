"""Rung: gloo ranks. Mixtures of experts shared by 1 to 4 ranks are transformers' in float64: logits, gradients, norm.

What is compared is a step of a run that begins with their weights: the logits of every micro-batch, the gradient of
every element after clipping (as AdamW's first moment has it, also where replicas own slices), its norm before and
after. By default one layout; `pytest -m slow` has the grid of ep 1 to 4 with tp 2, pp 2 and zero 3.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures.drawn import EXPERTS
from support.architectures.runs import beginning, begun, saved
from support.architectures.transformers_models import Widened, in_files, tensor_of
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.nn.functional import cross_entropy

from tpengine.checkpoint.storage import parts_of
from tpengine.config import Config, validate
from tpengine.data import open_corpus
from tpengine.layout.parameters import hf_name, stage_specs
from tpengine.training.checkpoint_blocks import blocks_of

# Of a step, whatever dp is.
MICRO_BATCHES, CLIP_NORM = 12, 0.5
PARTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
    },
    "mixtral": {"num_local_experts": 12, "num_experts_per_tok": 2},
}
MOMENT = "optimizer.exp_avg."


# Of a rank: the norm; by micro-batch of all replicas the logits [T, V/tp] from a column on; by name parts of the
# clipped gradient, each at its offset.
Step = tuple[float, dict[int, tuple[int, Tensor]], dict[str, list[tuple[tuple[int, ...], Tensor]]]]


def configured(
    path: Path, dp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1, zero: int = 0, **parallel: Any
) -> Config:
    base = beginning(path, (1, 1, 1), steps=1)
    train = replace(base.train, micro_batch_size=1, num_micro_batches=MICRO_BATCHES // dp)
    layout = replace(base.parallel, dp=dp, tp=tp, pp=pp, ep=ep, zero=zero, **parallel)
    optim = replace(base.optim, clip_norm=CLIP_NORM)
    return validate(replace(base, train=train, parallel=layout, optim=optim), dp * tp * pp)


def step_of(config: Config) -> Step:
    """A step on this rank."""
    trainer, logits = begun(config), {}
    batch, at = trainer.step.batch, trainer.state.rank.mesh.at
    of_logits = batch.loss

    def loss(y: Tensor, microbatch: int) -> Tensor:
        logits[batch.number_of(microbatch)] = at.tp * y.shape[1], y.detach().clone()
        return of_logits(y, microbatch)

    batch.loss = loss  # type: ignore[method-assign]
    result = trainer.step.run(0)
    found: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for name, blocks in blocks_of(trainer.state).items():
        if name.startswith(MOMENT):
            parts = [(part.offset, part.tensor / (1 - config.optim.beta1)) for part in parts_of(blocks)]
            found[name.removeprefix(MOMENT)] = parts
    return result.grad_norm, logits, found


def wanted(theirs: Any, config: Config) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits [samples, seq, V], the norm, and clipped gradients, of transformers' model and autograd."""
    tokens, labels = (torch.from_numpy(of) for of in open_corpus(config).train.batch(0, MICRO_BATCHES))
    with Widened():
        logits = theirs(tokens).logits
    cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    weights = dict(theirs.named_parameters())
    norm = torch.stack([weight.grad.norm() for weight in weights.values()]).norm().item()
    gradients = in_files(theirs, {name: weight.grad * (CLIP_NORM / norm) for name, weight in weights.items()})
    model, found = config.model, {}
    for spec in stage_specs(model, 1, 0, model.num_layers):
        found[hf_name(spec.name)] = tensor_of(model, spec, gradients)[: spec.valid_rows]
    return logits.detach(), norm, found


LAYOUTS: dict[str, dict[str, int]] = {
    "ep 1, tp 2": dict(tp=2),
    "ep 1, pp 2": dict(pp=2),
    "ep 1, zero 3": dict(dp=2, zero=3),
    "ep 2, tp 2": dict(tp=2, ep=2),
    "ep 2, pp 2": dict(dp=2, pp=2, ep=2),
    "ep 2, zero 3": dict(dp=4, ep=2, zero=3),
    "ep 3, pp 2": dict(dp=3, pp=2, ep=3),
    "ep 3, zero 3": dict(dp=6, ep=3, zero=3),
    # ep is tp times a divisor of dp: with tp 2 three replicas share experts among 6 ranks.
    "ep 6, tp 2": dict(dp=3, tp=2, ep=6),
    "ep 4, tp 2": dict(dp=2, tp=2, ep=4),
    "ep 4, pp 2": dict(dp=4, pp=2, ep=4),
    "ep 4, zero 3": dict(dp=4, ep=4, zero=3),
    "ep 4, tp 2, zero 3": dict(dp=4, tp=2, ep=4, zero=3),
}


@pytest.mark.by_default("qwen3_moe-ep 2, pp 2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", EXPERTS)
def test_a_step_is_that_of_transformers(ranks: RankPool, tmp_path: Path, architecture: str, layout: str) -> None:
    theirs = saved(architecture, tmp_path, num_hidden_layers=2, tie_word_embeddings=False, **PARTS[architecture])
    config = configured(tmp_path, **LAYOUTS[layout])
    logits, norm, gradients = wanted(theirs, configured(tmp_path))
    parallel = config.parallel
    assert parallel.dp and parallel.tp and parallel.pp and norm > CLIP_NORM
    steps = ranks.run(step_of, parallel.dp * parallel.tp * parallel.pp, config)
    seen = {name: torch.zeros_like(of, dtype=torch.bool) for name, of in gradients.items()}
    whole = {name: torch.zeros_like(of) for name, of in gradients.items()}
    num_logits = 0
    for got_norm, got_logits, got_gradients in steps:
        assert abs(got_norm - norm) <= 1e-12 * norm
        for microbatch, (first, got) in got_logits.items():
            want = logits[microbatch][:, first : first + got.shape[1]]
            assert (got - want).abs().max() <= 1e-10 * logits.abs().max()
            num_logits += got.numel()
        for name, parts in got_gradients.items():
            most = gradients[name].abs().max()
            for offset, part in parts:
                cut = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
                assert (part - gradients[name][cut]).abs().max() <= 1e-9 * most, name
                seen[name][cut], whole[name][cut] = True, part
    assert num_logits == logits.numel() and all(bool(of.all()) for of in seen.values())
    clipped = torch.stack([of.norm() for of in whole.values()]).norm().item()
    assert abs(clipped - CLIP_NORM) <= 1e-12 * CLIP_NORM
