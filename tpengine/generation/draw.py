"""The next token of each sequence, drawn from its row of logits by counters: no generator has a state."""

from __future__ import annotations

import torch
from torch import Tensor
from tpkernels.random import uniform

from tpengine.generation.drawing import Drawing


def draw(logits: Tensor, number: int, how: Drawing) -> Tensor:
    """Draw a token for each sequence.

        next = argmax over the kept v of logits[v] / temperature + g[v],   g[v] = -log(-log(uniform[v]))

    Adding Gumbel noise and taking the maximum draws from the softmax over what is kept. Equal logits give equal tokens,
    whoever draws, and whatever is drawn besides.

    Args:
        logits: [B, V], without padding.
        number: how many tokens have been drawn before.
        how: see Drawing.

    Returns:
        int64 [B].

    Source: Maddison et al., "A* sampling", NeurIPS 2014, section 2; top-p: Holtzman et al., arXiv 1904.09751.
    """
    if how.temperature == 0:
        return logits.argmax(-1)
    scores = _kept(logits.double() / how.temperature, how)
    columns = torch.arange(logits.shape[1], device=logits.device)
    noise = torch.stack([uniform(how.seed, f"generate/{row}/{number}", columns) for row in range(len(logits))])
    return (scores - (-noise.log()).log()).argmax(-1)


def _kept(scores: Tensor, how: Drawing) -> Tensor:
    """Return scores [B, V], those that may not be drawn as -inf."""
    if 0 < how.top_k < scores.shape[1]:
        least = scores.topk(how.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if how.top_p < 1:
        ordered, places = scores.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        # What is likelier has enough already. The likeliest of all always stays.
        enough = probabilities.cumsum(-1) - probabilities >= how.top_p
        scores = scores.masked_fill(enough.scatter(1, places, enough), -torch.inf)
    return scores
