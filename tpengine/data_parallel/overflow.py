"""An overflow that one rank's GradScaler has found, agreed on by all ranks: all skip the step and halve the scale.

torch.amp.GradScaler hands itself to the step of an optimizer that has an argument `grad_scaler` and says
`_step_supports_amp_scaling`. The step then asks the scaler what it has found, and may change it: `update` reads the
same tensors. The other contract, attributes of the optimizer, leaves `update` with what this rank alone has found.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from tpkernels.exchange.communicator import Communicator

# Said at each first step, of the contract that is used here on purpose.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def agreed_overflow(
    optimizer: Optimizer, scaler: GradScaler, axes: Sequence[Communicator]
) -> tuple[bool, Tensor | None]:
    """Return whether any rank has found an overflow, and 1/scale if gradients are still scaled; collective.

    Args:
        optimizer: whose gradients the scaler looks at; it is told what all ranks have found.
        scaler: whose `unscale_` the user may have called before.
        axes: all ranks that hold a part of the model, one axis after the other.
    """
    device = optimizer.param_groups[0]["params"][0].device
    found = scaler._found_inf_per_device(optimizer)
    inverse = None
    if not found:
        # unscale_ has not been called.
        found = scaler._check_inf_per_device(optimizer)
        scale = scaler._get_scale_async()
        assert scale is not None, "a scaler that steps has a scale"
        inverse = scale.double().reciprocal().float()
    if not found:
        # A rank without any gradient.
        found[device] = torch.zeros((), device=device)
    total = torch.stack([each.to(device) for each in found.values()]).sum().view(1)
    for ranks in axes:
        ranks.all_reduce_max_(total)
    for each in found.values():
        each.copy_(total[0])
    return bool(total), inverse
