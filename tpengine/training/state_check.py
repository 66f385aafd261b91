"""Check that a run's state may be saved: every number is finite, and replicas are equal to the last bit.

Several ranks hold the same tensors: everything over data parallelism; norm weights, and shared KV heads, over tensor
parallelism; tied ends over the pipeline. These start equal, and every update keeps them equal, since each replica adds
the same sum. A bit that flips in one rank's memory breaks that for good, and nothing shows it. A checkpoint, of which
each replica writes a part, would then mix two models. So each rank hashes what it holds, and all compare the hashes.
Where replicas own slices (ZeRO), forward reads what is gathered of them: so each weight must lie in the buffer that is
gathered into, and a slice must be what its master rounds to.

    h(x) = sum over rows r of M[r] * (sum over columns c of m[c] * mix(x[r, c]))  mod 2**64,   mix(x) = x ^ (x >> 32)

over the tensor's bits in words of 64 bits, with odd factors `m` and `M`. A single flipped bit changes mix(x) by an odd
number times a power of two below 2**64, and so always changes h. Several flipped bits may cancel: with a probability of
some 2**-32 if all of them are the highest bits of their words, and of some 2**-64 otherwise. The hash does not protect
against deliberate changes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from tpengine.distributed.process import link_device, max_over_ranks
from tpengine.layout.groups import frozen_of, moved_of
from tpengine.layout.parameters import hf_name, stage_specs
from tpengine.training.planned_run import RunError
from tpengine.training.train_state import TrainState

_NO_HASH = torch.iinfo(torch.int64).min
# Words of a row, and rows hashed at a time: temporaries of 0.5 MB stay in a core's cache.
_COLUMNS, _ROWS = 1 << 14, 4


def check_finite(state: TrainState) -> None:
    """Check every weight, master and moment of every rank; collective.

    Raises:
        RunError: on all ranks alike: names the first tensor that is not finite.

    Cost: one pass over the state, and a maximum over ranks of one number.
    """
    places = _ShardNumbers(state)
    found = list(_tensors(state))
    # Where replicas own slices, one may own nothing.
    each = [torch.stack(torch.aminmax(tensor)).isfinite().all() for _, _, tensor in found]
    finite = torch.stack(each).tolist() if each else []
    bad = [
        -float(places.of(kind, name)) for (kind, name, _), is_finite in zip(found, finite, strict=True) if not is_finite
    ]
    (first,) = max_over_ranks([max(bad, default=-torch.inf)], state.rank.device)
    if first != -torch.inf:
        raise RunError(
            f"a checkpoint's numbers must be finite: {places.name(int(-first))} is not: nothing is saved: --resume "
            "from the newest checkpoint with a lower --optim.lr"
        )


def check_replicas(state: TrainState, num_steps: int, *, masters_only: bool = False) -> None:
    """Compare what several ranks hold; collective.

    Args:
        num_steps: steps done, for the message.
        masters_only: compare only the masters (a weight without a master copy is its own); else the whole state.

    Raises:
        RunError: on all ranks alike: names the first tensor that differs, and two ranks; or a weight that forward reads
            elsewhere than it is trained (ZeRO).

    Cost: one pass over what is compared; each rank sends 16 bytes per tensor, shard and kind.
    """
    if dist.get_world_size() == 1:
        return
    _check_what_forward_reads(state, num_steps)
    # Hash: every tensor at the place that it has on all ranks.
    places, link = _ShardNumbers(state), link_device(state.rank.device)
    mine = torch.full((places.num,), _NO_HASH, dtype=torch.int64, device=state.rank.device)
    for kind, name, tensor in _tensors(state, masters_only):
        mine[places.of(kind, name)] = bits_hash(tensor)
    mine = mine.to(link)
    # Compare: one all-reduce gives the maximum of the hashes, and of their complements, hence also the minimum.
    extremes = torch.stack([mine, torch.where(mine == _NO_HASH, mine, ~mine)])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest = extremes[0], ~extremes[1]
    differing = ((largest != smallest) & (largest != _NO_HASH)).nonzero().flatten().tolist()
    if not differing:
        return
    # Name the first tensor that differs, and two ranks that disagree.
    place = differing[0]
    hashes = [torch.empty_like(mine[:1]) for _ in range(dist.get_world_size())]
    dist.all_gather(hashes, mine[place : place + 1].contiguous())
    by_rank = {rank: int(of_rank) for rank, of_rank in enumerate(hashes) if int(of_rank) != _NO_HASH}
    one = min(by_rank)
    other = min(rank for rank, found in by_rank.items() if found != by_rank[one])
    raise RunError(
        f"replicas must be equal: after step {num_steps} {places.name(place)} differs between ranks {one} and {other}: "
        "memory or a link has failed, or the ranks' processors differ: nothing is saved: --resume from the newest "
        "checkpoint"
    )


def note_frozen(state: TrainState) -> None:
    """Note what the frozen weights are, for check_frozen: before the first step that trains the others."""
    moved, pieces = moved_of(state.part.config), state.model.pieces
    stays = {name: weight for name, weight in state.frozen.items() if pieces[name].spec.name not in moved}
    state.frozen_hashes = {name: bits_hash(weight) for name, weight in stays.items()}


def check_frozen(state: TrainState, num_steps: int) -> None:
    """Check that frozen weights are what they were; collective, and nothing where none are frozen.

    Raises:
        RunError: on all ranks alike: names the first that is not.

    Cost: one pass over them.
    """
    if not frozen_of(state.part.config):
        return
    places = _ShardNumbers(state)
    moved = [
        -float(places.of("", name))
        for name, noted in state.frozen_hashes.items()
        if int(bits_hash(state.frozen[name])) != int(noted)
    ]
    (first,) = max_over_ranks([max(moved, default=-torch.inf)], state.rank.device)
    if first != -torch.inf:
        raise RunError(
            f"frozen weights must stay as they are: after step {num_steps} {places.name(int(-first))} is another one: "
            "memory has failed, or something has written to it: nothing is saved: --resume from the newest checkpoint"
        )


def _check_what_forward_reads(state: TrainState, num_steps: int) -> None:
    """Check that the weights which forward reads are those that replicas own and update (ZeRO); collective."""
    if state.sliced is None:
        return
    places = _ShardNumbers(state)
    wrong = state.sliced.moved()
    for name, weight in state.weights.items():
        master = state.optimizer.masters[name]
        if master is not weight and not _same_bits(weight.detach(), master.detach().to(weight.dtype)):
            wrong.append(name)
    numbers = [-float(places.of("", name)) for name in wrong]
    (first,) = max_over_ranks([max(numbers, default=-torch.inf)], state.rank.device)
    if first != -torch.inf:
        raise RunError(
            f"forward must read the weights that are trained: after step {num_steps} {places.name(int(-first))} is "
            "another one, in memory of its own or not what its master rounds to: nothing is saved: --resume from the "
            "newest checkpoint, and report it if nothing but tpengine has touched the weights"
        )


def _same_bits(x: Tensor, y: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.view(integer), y.view(integer))


def bits_hash(tensor: Tensor) -> Tensor:
    """Hash the bits of a tensor, on its device; see the module's head.

    Returns:
        int64 []; equal for equal bits and shapes, on every device.
    """
    words = _words(tensor)
    whole = words.numel() // _COLUMNS * _COLUMNS
    factors = _factors(_COLUMNS, words.device)
    rows = [_mixed(part.view(-1, _COLUMNS), factors) for part in words[:whole].split(_ROWS * _COLUMNS)] if whole else []
    if whole < words.numel():
        rows.append(_mixed(words[whole:].view(1, -1), factors[: words.numel() - whole]))
    sums = torch.cat(rows)
    # The factors of the rows must differ from those of the columns.
    return (sums * _odd(torch.arange(_COLUMNS, _COLUMNS + sums.numel(), device=words.device))).sum()


class _ShardNumbers:
    """Numbers the shards of all ranks' state: by kind, then in the parameter table's order, then by shard.

    Where replicas own slices (ZeRO), each has places of its own for what is cut: only ranks inside a replica hold the
    same.
    """

    def __init__(self, state: TrainState) -> None:
        model, table_size, self._pieces = state.part.config.model, state.model.parts.table_size, state.model.pieces
        # In exact mode a rank has all shards of its experts.
        self._table_size, ep = table_size, state.model.ep
        self._size = table_size * ep if state.model.parts.is_exact else max(table_size, ep)
        self._names = [spec.name for spec in stage_specs(model, table_size, 0, model.num_layers)]
        self._first = {name: number * self._size for number, name in enumerate(self._names)}
        self._each = len(self._names) * self._size
        self._kinds = ("", "master", *state.optimizer.state_dtypes)
        self._of_replica = len(self._kinds) * self._each
        self._state = state
        self.num = self._of_replica * (1 if state.sliced is None else state.rank.mesh.shape.dp)

    def of(self, kind: str, piece: str) -> int:
        """Return the place of a piece of this rank."""
        spec, holder = self._pieces[piece].spec, self._pieces[piece].holder
        holder += self._pieces[piece].part * self._table_size
        first = self._state.replicas_of(piece).rank * self._of_replica if self._state.is_cut(piece) else 0
        return first + self._kinds.index(kind) * self._each + self._first[spec.name] + holder

    def name(self, place: int) -> str:
        """Return the name that the tensor at a place is saved under."""
        kind, rest = divmod(place % self._of_replica, self._each)
        name = hf_name(self._names[rest // self._size])
        return f"optimizer.{self._kinds[kind]}.{name}" if kind else name


def _tensors(state: TrainState, masters_only: bool = False) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, piece, tensor) of everything that this rank holds."""
    for name, weight in state.frozen.items():
        yield "", name, weight.detach()
    for name, weight in state.weights.items():
        if masters_only:
            master = state.optimizer.masters[name]
            yield "" if master is weight else "master", name, master.detach()
            continue
        yield "", name, weight.detach()
        for kind, tensor in state.optimizer.state_of(name).items():
            yield kind, name, tensor.detach()


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as int64: 64 bits per word if they divide evenly, else one element per word."""
    flat = tensor.detach().contiguous().view(-1)
    size = flat.element_size()
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).long()


def _mixed(words: Tensor, factors: Tensor) -> Tensor:
    """Return one sum per row; `words` is not changed."""
    return (words >> 32).bitwise_xor_(words).mul_(factors).sum(1)


@functools.cache
def _factors(number: int, device: torch.device) -> Tensor:
    return _odd(torch.arange(number, device=device))


def _odd(number: Tensor) -> Tensor:
    """Return an odd pseudo-random factor per number: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = number * -0x61C8864680B583EB
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return z ^ (z >> 31 & (1 << 33) - 1) | 1
