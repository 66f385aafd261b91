"""Which optimizers there are (optim.name): what each keeps of a weight, what an update costs, whom we refuse. No torch.

    adamw    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = (1 - lr decay) w - lr m' / (sqrt(v') + eps)
    lion     w = (1 - lr decay) w - lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
    sgd      g = g + decay w;  m = b1 m + g;  w = w - lr m
    torch.X  torch.optim.X as torch has it, with its own kind of decay: of decoupled decay only torch.AdamW's

b1, b2, eps, decay and lr are optim.beta1, beta2, eps, weight_decay and the rate of the step. A class of torch takes
them where it has them: beta1 as its momentum, beta2 as its alpha or rho; its other options keep torch's defaults.

Ranks update slices of tensors. So an optimizer must work element by element, and what it keeps are tensors of the
weight's shape that begin as zeros: then any cut gives the same numbers. One that looks at whole matrices will have to
ask for them by actions of the plan, as gathers are; there is none yet.

A user's own optimizer (training/elementwise.py: UpdateRule) is told to everything that has only a configuration by its
name, which carries what is known of it: OwnName.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tpengine.config.settings import OptimConfig
from tpengine.spelling import use


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of an optimizer without running it.

    Attributes:
        states: what it keeps of each weight, by the names that checkpoints use.
        operations: of an update, each a pass over its elements that reads two numbers and writes one.
    """

    states: tuple[str, ...]
    operations: int


_TWO_MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        "adamw": OptimizerKind(_TWO_MOMENTS, 14),
        "lion": OptimizerKind(("exp_avg",), 10),
        "sgd": OptimizerKind(("momentum_buffer",), 6),
        "torch.SGD": OptimizerKind(("momentum_buffer",), 5),
        "torch.Adam": OptimizerKind(_TWO_MOMENTS, 10),
        "torch.AdamW": OptimizerKind(_TWO_MOMENTS, 10),
        "torch.NAdam": OptimizerKind(_TWO_MOMENTS, 11),
        "torch.RAdam": OptimizerKind(_TWO_MOMENTS, 11),
        "torch.Adamax": OptimizerKind(("exp_avg", "exp_inf"), 9),
        "torch.Adagrad": OptimizerKind(("sum",), 6),
        "torch.Adadelta": OptimizerKind(("square_avg", "acc_delta"), 12),
        "torch.RMSprop": OptimizerKind(("square_avg", "momentum_buffer"), 9),
    }
)
# By name: why there is none of torch's.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "torch.Adafactor": "it keeps sums of a matrix's rows and columns",
        "torch.LBFGS": "it takes products of whole gradients, and computes the loss several times a step",
        "torch.Muon": "it multiplies whole matrices",
        "torch.SparseAdam": "it is for sparse gradients, and all of ours are dense",
        "torch.ASGD": "what it keeps follows from the rates of all steps before, and does not begin as zeros",
        "torch.Rprop": "the steps that it keeps begin as the first step's rate, not as zeros",
    }
)


class OwnName(str):
    """The name of a user's own optimizer, as a value of optim.name; equal to the text alone.

    Attributes:
        kind: what is known of it.
    """

    kind: OptimizerKind

    @classmethod
    def of(cls, name: str, kind: OptimizerKind) -> OwnName:
        """Return the name of an optimizer of this kind."""
        own = cls(name)
        own.kind = kind
        return own


def optimizer_kind(optim: OptimConfig) -> OptimizerKind:
    """Return what is known of an optimizer.

    Raises:
        ValueError: there is none of that name.
    """
    name = optim.name
    if isinstance(name, OwnName):
        return name.kind
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name in _REFUSED:
        raise ValueError(
            "an optimizer must work element by element, because ranks update slices of tensors: optim.name "
            f"{name}: {_REFUSED[name]}: use one of {', '.join(OPTIMIZERS)}"
        )
    raise ValueError(
        f"optim.name must be one of {', '.join(OPTIMIZERS)}: got {name!r}: {use(name, OPTIMIZERS)}, or hand one of "
        "your own to tpengine.run (optimizer=)"
    )
