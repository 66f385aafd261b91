"""A loss of everything that an output offers, one of hidden states alone, and the training of either by hand: plain
torch, one process, float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from support.engine.parity import whole_weights
from support.engine.torch_adamw import TorchAdamW
from tpengine.config import IGNORED_LABEL, Config
from tpengine.data import open_corpus
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer
from tpengine.runs.evaluation import held_out_losses
from tpengine.runs.trainer import Trainer
from tpengine.training.last_output import LastOutput
from tpengine.training.objective import MicroBatch, Objective

Found = tuple[list[tuple[float, ...]], dict[str, tuple[tuple[int, ...], Tensor]]]


def weights_of(batch: MicroBatch) -> Tensor:
    return (1 + batch.tokens % 3) * (batch.labels != IGNORED_LABEL)


def own_loss(output: LastOutput, batch: MicroBatch) -> Tensor:
    logprobs = output.token_logprobs(batch.labels)
    by_document = output.sum_by_document(weights_of(batch) * logprobs)
    around = 0.1 * output.entropy().sum() + 0.01 * output.hidden().square().sum() + 1e-3 * output.logits().pow(2).sum()
    smooth = output.cross_entropy(batch.labels, weights_of(batch).float(), label_smoothing=0.1, z_loss=1e-3)
    return around - by_document.sum() + 1e-3 * by_document.square().sum() + 0.1 * smooth


def own_count(batch: MicroBatch) -> float:
    return float(weights_of(batch).sum())


def entropy(output: LastOutput, batch: MicroBatch) -> tuple[Tensor, int]:
    return output.entropy().sum(), len(batch.tokens)


def right(output: LastOutput, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    return (output.logits().argmax(1) == batch.labels).sum(), (batch.labels != IGNORED_LABEL).sum()


def logprob(output: LastOutput, batch: MicroBatch) -> Tensor:
    return (weights_of(batch) * output.token_logprobs(batch.labels)).sum()


OWN = Objective(own_loss, own_count, {"entropy": entropy, "right": right, "logprob": logprob})


def hidden_loss(output: LastOutput, batch: MicroBatch) -> Tensor:
    return (output.hidden() - 1).square().sum()


HIDDEN = Objective(hidden_loss)


def logits_and_hidden(net: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    kept: list[Any] = []
    hook = net.lm_head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    z = net(tokens.flatten(), tokens.shape[1])
    hook.remove()
    return z, kept[0]


def hidden_by_hand(net: Transformer, tokens: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    """As numbers_by_hand, of HIDDEN; the head's gradient is zeros, not none, so that it decays as any weight."""
    z, hidden = logits_and_hidden(net, tokens)
    return (hidden - 1).square().sum() + 0 * z.sum(), (labels != IGNORED_LABEL).sum()


def numbers_by_hand(net: Transformer, tokens: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    """Loss, count, and the sums and counts of the metrics of samples [count, S], by formulas of torch."""
    z, hidden = logits_and_hidden(net, tokens)
    z = z[:, :vocab_size]
    log_q = z.log_softmax(1)
    valid = labels.flatten() != IGNORED_LABEL
    known = labels.flatten().clamp_min(0)
    weights = (1 + tokens.flatten() % 3) * valid
    logprobs = log_q.gather(1, known[:, None])[:, 0]
    spread = -(log_q.exp() * log_q).sum(1)
    by_document = (weights * logprobs).view(tokens.shape).sum(1)
    smooth = -0.9 * logprobs - 0.1 * log_q.mean(1) + 1e-3 * z.logsumexp(1).square()
    around = 0.1 * spread.sum() + 0.01 * hidden.square().sum() + 1e-3 * z.square().sum()
    loss = around - by_document.sum() + 1e-3 * by_document.square().sum() + 0.1 * (smooth * weights).sum()
    count = weights.sum()
    is_right = ((z.argmax(1) == known) & valid).sum()
    return loss, count, spread.sum(), torch.tensor(len(known)), is_right, valid.sum(), by_document.sum(), count


def by_hand(config: Config, num_steps: int, numbers: Callable[..., tuple[Tensor, ...]] = numbers_by_hand) -> Found:
    """Train the model on one process: every step's (loss, norm, metrics), then those held out; and the weights."""
    model, train = config.model, config.train
    net = Transformer(FastParts(model, Communicator(None), dtype=torch.float64))
    net.initialise(train.seed)
    corpus = open_corpus(config)
    adamw = TorchAdamW(net.held.values(), config)
    each, found = 4 * train.micro_batch_size, []
    for step in range(num_steps):
        tokens, labels = (torch.from_numpy(of) for of in corpus.train.batch(step * each, each))
        loss, count, *sums = numbers(net, tokens, labels, model.vocab_size)
        norm = adamw.update(loss / count, step)
        found.append(
            (
                float(loss / count),
                norm,
                *(float(a) / float(b) for a, b in zip(sums[::2], sums[1::2], strict=True)),
            )
        )
    tokens, labels = (torch.from_numpy(of) for of in corpus.held_out.batch(0, train.eval_samples))
    loss, count, *sums = numbers(net, tokens, labels, model.vocab_size)
    found.append((float(loss / count), *(float(a) / float(b) for a, b in zip(sums[::2], sums[1::2], strict=True))))
    return found, {name: ((0,) * weight.dim(), weight.detach()) for name, weight in net.held.items()}


def by_engine(config: Config, num_steps: int, objective: Objective = OWN) -> Found:
    """The same on this rank of the engine."""
    trainer, found = Trainer(config, open_corpus(config), torch.device("cpu"), objective=objective), []
    for step in range(num_steps):
        result = trainer.step.run(step)
        found.append((result.loss, result.grad_norm, *(result.metrics[name] for name in objective.metrics)))
    held_out = held_out_losses(trainer.state, None, trainer.objective)
    assert held_out.of_all is not None
    found.append((held_out.of_all, *(held_out.metrics[name] for name in objective.metrics)))
    with whole_weights(trainer):
        pieces, held = trainer.state.model.pieces, trainer.state.model.held
        return found, {name: (pieces[name].block[0], weight.detach().clone()) for name, weight in held.items()}


def evaluated(config: Config) -> Config:
    """Held out are samples that no number of replicas shares evenly."""
    return replace(config, train=replace(config.train, eval_samples=7, eval_micro_batches=4))
