"""Rung: one process. Logits, gradients and greedy continuations are transformers', in float64, for drawn sizes.

By default a few configurations of each architecture; `pytest -m slow` has twenty.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.architectures.drawn import CONFIGS, drawn_config
from support.architectures.parity import assert_parity
from support.architectures.transformers_models import Widened, built, config_json, in_files, ours

from tpengine.architectures.registry import model_of

PROMPT, CONTINUED = 5, 32


def cases(by_default: int) -> list[object]:
    return [
        pytest.param(name, seed, marks=() if seed < by_default else pytest.mark.slow)
        for name in CONFIGS
        for seed in range(20)
    ]


@pytest.mark.parametrize(("architecture", "seed"), cases(3))
def test_logits_and_gradients_are_those_of_transformers(architecture: str, seed: int) -> None:
    assert_parity(drawn_config(architecture, seed), seed)


@pytest.mark.by_default("llama-0", "gpt2-0", "gemma3-0")
@pytest.mark.parametrize(("architecture", "seed"), cases(1))
def test_a_greedy_continuation_is_that_of_transformers(architecture: str, seed: int) -> None:
    """transformers keeps keys and values of earlier tokens; here each token is computed from all before it.

    Drawn weights often repeat one token, whatever the positions: so the logits of each step are compared too.
    """
    length = PROMPT + CONTINUED
    given = {"n_positions": length} if architecture == "gpt2" else {}
    config = drawn_config(architecture, seed, vocab_size=256, **given)
    theirs, model = built(config, seed), model_of(config_json(config))
    prompt = torch.randint(0, 256, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = dict(do_sample=False, return_dict_in_generate=True, output_logits=True)
    # Of a window of one token transformers keeps all, where it should keep none: its slice is [-1 + 1:].
    options["use_cache"] = getattr(config, "sliding_window", None) != 1
    with Widened():
        found = theirs.generate(prompt, max_new_tokens=CONTINUED, **options)
    net, got = ours(model, in_files(theirs, theirs.state_dict())), prompt[0]
    with torch.no_grad():
        for want in found.logits:
            logits = net(got, len(got))[-1, :256]
            assert (logits - want[0]).abs().max() <= 1e-10 * want.abs().max()
            got = torch.cat((got, logits.argmax().view(1)))
    assert len(got) == length
    assert got.tolist() == found.sequences[0].tolist()
