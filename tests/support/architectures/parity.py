"""What is compared with transformers, in float64: logits and gradients, the losses of training, what is exported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.architectures.runs import Pieces
from support.architectures.transformers_models import Widened, built, config_json, in_files, ours, tensor_of
from support.engine.torch_adamw import TorchAdamW
from tpengine.architectures.registry import check_architecture, model_of
from tpengine.config import Config, ModelConfig
from tpengine.data import open_corpus
from tpengine.layout.parameters import stage_specs

SEQ, BATCH = 14, 2


def assert_parity(config: Any, seed: int) -> None:
    """Compare logits and all gradients of one process with those of transformers' model of a configuration."""
    theirs, model = built(config, seed), model_of(config_json(config))
    check_architecture(model)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.vocab_size, (BATCH, SEQ), generator=generator)
    weights = torch.randn(BATCH, SEQ, model.vocab_size, generator=generator, dtype=torch.float64)

    with Widened():
        want = theirs(tokens).logits
        (want * weights).sum().backward()
    net = ours(model, in_files(theirs, theirs.state_dict()))
    got = net(tokens.flatten(), SEQ)[:, : model.vocab_size].view(want.shape)
    (got * weights).sum().backward()

    error = (got - want).abs().max()
    assert error <= 1e-10 * want.abs().max(), f"logits: error {error}"
    gradients = in_files(theirs, {name: weight.grad for name, weight in theirs.named_parameters()})
    for name, parameter in net.held.items():
        expected = tensor_of(model, net.pieces[name].spec, gradients)
        assert parameter.grad is not None
        assert (parameter.grad - expected).abs().max().item() <= 1e-9 * max(1.0, expected.abs().max().item()), name


def transformers_losses(theirs: Any, config: Config, after_step: Callable[[int], None] | None = None) -> list[float]:
    """Train transformers' model with torch's AdamW: same samples, decay groups, clipping and learning rates.

    Args:
        theirs: in the dtype of the run; in float64 it computes all in float64.
        config: of the run.
        after_step: called with each step's number.
    """
    train, corpus, adamw = config.train, open_corpus(config), TorchAdamW(theirs.parameters(), config)
    found = []
    for step in range(train.steps):
        count = train.micro_batch_size * train.num_micro_batches
        tokens, labels = (torch.from_numpy(of) for of in corpus.train.batch(step * count, count))
        with Widened() if theirs.dtype == torch.float64 else nullcontext():
            logits = theirs(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        adamw.update(loss, step)
        found.append(loss.item())
        if after_step is not None:
            after_step(step)
    return found


def assert_exported(out: Path, model: ModelConfig, held: list[Pieces]) -> Any:
    """Load an exported directory as transformers does, and compare each tensor with what the ranks hold of it.

    Args:
        out: the directory, in float64.
        model: of the run.
        held: of each rank; copies of a tied table on several ranks are all compared.

    Returns:
        transformers' model, in float64.
    """
    from transformers import AutoModelForCausalLM

    # What is misshapen is named; without the flag it would be an error of another kind.
    options = dict(output_loading_info=True, attn_implementation="eager", ignore_mismatched_sizes=True)
    if model.details.num_experts:
        options["experts_implementation"] = "eager"  # its other ways do not take float64
    with Widened():
        found: Any = AutoModelForCausalLM.from_pretrained(out, **options)
    theirs, said = found
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not said[what], f"{what}: {said[what]}"
    whole, specs = (
        in_files(theirs, theirs.state_dict()),
        {spec.name: spec for spec in stage_specs(model, 1, 0, model.num_layers)},
    )
    seen = set()
    for pieces in held:
        for name, (offset, values) in pieces.items():
            spec = specs[name]
            expected: Tensor = tensor_of(model, spec, whole)[: spec.valid_rows]
            cut = tuple(slice(first, first + size) for first, size in zip(offset, values.shape, strict=True))
            expected = expected[cut]
            assert torch.equal(values[: len(expected)], expected), name
            seen.add(name)
    assert seen == set(specs)
    return theirs
