"""Cut an nn.Sequential into the parts of a pipeline: by the cost of each module, or by hand.

profile.py says what modules cost and return.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from tpengine.pipeline.profile import ModuleProfile, children_of
from tpengine.plan import Chunk, partition_layers


def cut_by_cost(costs: Sequence[float], ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the half-open module range of each part that makes the slowest rank fastest: see `partition_layers`.

    Raises:
        ValueError: fewer modules than parts.
    """
    return partition_layers(costs, 0, 0, ranks)


def cut_by_hand(sizes: Sequence[int], num_modules: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Return the half-open module range of each part, given the number of modules per part.

    Raises:
        ValueError: there is not one size per part, a size is below 1, or they do not sum to the number of modules.
    """
    if len(sizes) != num_chunks or sum(sizes) != num_modules or min(sizes) < 1:
        raise ValueError(
            f"a cut gives every part at least one module and uses all: cut {list(sizes)}, {num_chunks} parts, "
            f"{num_modules} modules: leave cut out, and it is balanced by cost"
        )
    ends = [sum(sizes[: chunk + 1]) for chunk in range(num_chunks)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def check_cut(
    model: nn.Sequential,
    layers: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    profiles: Sequence[ModuleProfile],
) -> None:
    """Refuse a cut whose parts cannot train as the whole model does.

    Args:
        layers, ranks: module range and rank of each part.

    Raises:
        ValueError: two ranks share a parameter or buffer, or a part other than the first passes no gradient back.
    """
    modules = children_of(model)
    owner: dict[Tensor, int] = {}
    for chunk, ((first, last), rank) in enumerate(zip(layers, ranks, strict=True)):
        held = nn.Sequential(OrderedDict(modules[first:last]))
        for kind, named in (("parameter", held.named_parameters()), ("buffer", held.named_buffers())):
            for name, tensor in named:
                if owner.setdefault(tensor, rank) != rank:
                    raise ValueError(
                        f"a {kind} must belong to one rank: {name} of rank {rank} is shared with rank "
                        f"{owner[tensor]}: choose a cut that keeps both uses together, or untie them"
                    )
        if last < len(modules) and not profiles[last - 1].differentiable:
            raise ValueError(
                f"the output of a part must be able to carry a gradient: module {modules[last - 1][0]} returns "
                f"{profiles[last - 1].output}: choose a cut elsewhere"
            )
        for place in range(first, last):
            if chunk > 0 and not profiles[place].passes_gradient:
                raise ValueError(
                    f"only the first part may stop gradients: module {modules[place][0]} of part {chunk} passes none "
                    "to its input: choose a cut that has it in the first part"
                )


def chunks_of(
    layers: Sequence[tuple[int, int]], ranks: Sequence[int], profiles: Sequence[ModuleProfile]
) -> tuple[Chunk, ...]:
    """Return the plan's chunks, each with the shape and dtype of its input and output."""
    boundary = [profiles[last - 1].output for _, last in layers]
    return tuple(
        Chunk(
            rank,
            span,
            input=boundary[chunk - 1] if chunk > 0 else None,
            output=boundary[chunk] if chunk < len(layers) - 1 else None,
        )
        for chunk, (span, rank) in enumerate(zip(layers, ranks, strict=True))
    )
