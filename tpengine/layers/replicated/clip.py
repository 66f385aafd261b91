"""Clip gradients by their global norm, in a model of your own over tensor-parallel ranks and pipeline stages.

The engine's own clipping works on flat buffers (training/update/optimizer.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.layers.placement import placements_of
from tpengine.layers.replicated.modules import num_ranks_of, refuse_unsummed


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, tp: Communicator, pp: Communicator | None = None) -> Tensor:
    """Scale the gradients so that their norm over all parameters of the model is at most `max_norm`; collective.

        norm = (sum over pp, tp and parameters of |gradient|^2, each counted once)^(1/2)
        gradient *= min(1, max_norm / norm)

    What several tp ranks hold counts once: norms, the bias behind a row-parallel product, KV heads that ranks share,
    what went through `replicate` or `summed`. Of a parameter that is cut the part of each rank counts.

    Args:
        model: this rank's part; call this after the gradients have been summed over replicas.
        max_norm: the largest norm that is left as it is; above zero.
        tp: the tensor-parallel ranks.
        pp: the pipeline's ranks; None without a pipeline.

    Returns:
        The norm before clipping, a float64 scalar, the same on all these ranks; not finite if a gradient is not.

    Raises:
        ValueError: `max_norm` is not above zero; `tp` is one rank, and the model lies over several; nothing
            sums the gradient of a parameter over tp, as check_replicated says.

    Cost: an all-reduce of one number over tp and one over pp. The host does not wait for the device.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above zero: got {max_norm}: use 1.0")
    placed = placements_of(model)
    if tp.size == 1 < (size := num_ranks_of(placed)):
        raise ValueError(
            f"a norm is taken over all ranks that hold a part of the model: it is over {size} tensor-parallel ranks, "
            "got tp 1: pass the communicator of its layers"
        )
    # Here is seen what was frozen when the model was checked, and is not any more.
    refuse_unsummed(model, placed, tp.size)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    counted = [
        (parameter.grad, placed[parameter].num_holders if parameter in placed else 1)
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    # The squares of this rank's gradients; what several ranks hold is divided among them.
    square = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient, num_holders in counted:
        norm_here = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        square += norm_here.double().square() / num_holders
    # Sum over the ranks, then scale every gradient by the same factor.
    for ranks in (tp, pp):
        if ranks is not None:
            ranks.all_reduce_(square)
    norm = square.sqrt()[0]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient, _ in counted:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
