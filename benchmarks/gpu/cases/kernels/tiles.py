"""The case that tunes matmul's tiles for this GPU, against cuBLAS, and writes the file that the operators read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tpkernels.launch import Target, target_of
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.ops.matmul.tuned import (
    AttentionKey,
    Key,
    Tile,
    TunedAttention,
    TunedFile,
    attention_key,
    is_allowed,
    path_for,
    read_tuned,
    tile_key,
    written,
)
from tpkernels.ops.matmul.wgrad_choice import add_by_torch, refusal_of

from benchmarks.gpu.cases.clock import device_here, medians, write
from benchmarks.harness.rows import environment
from benchmarks.harness.shapes import MODELS, REHEARSED, WHOLE_MODELS, Model
from tpengine.files import write_beside

MODELS_BY_NAME = {model.name: model for model in (*MODELS, *WHOLE_MODELS, REHEARSED)}
# Block sizes, tiles in a column, warps, stages: those of the tables, of the fused operators, and their neighbours.
CANDIDATES = tuple(
    MatmulConfig(*numbers)
    for numbers in (
        (128, 256, 64, 4, 8, 3),
        (128, 256, 64, 8, 8, 4),
        (256, 128, 64, 4, 8, 3),
        (256, 128, 64, 8, 8, 4),
        (128, 128, 64, 8, 4, 3),
        (128, 128, 64, 8, 8, 4),
        (128, 128, 128, 8, 8, 3),
        (64, 256, 64, 8, 4, 4),
        (64, 128, 64, 8, 4, 4),
        (64, 64, 64, 8, 4, 4),
    )
)
# Torch's ways, by their names in rows: cuBLAS; into float32; and with an addition behind it.
_MM, _ADDMM, _MM_AND_ADD = "mm", "addmm", "mm_and_add"
SMALL_CANDIDATES = (MatmulConfig(16, 16, 16, 2, 4, 1), MatmulConfig(32, 16, 16, 2, 4, 1))


class Product(NamedTuple):
    """A product of a rank: its name, and its operands in the order in which training multiplies them.

    Attributes:
        accumulates: whether it is added to a buffer in float32, as a weight's gradient is.
    """

    name: str
    a: Tensor
    b: Tensor
    accumulates: bool = False


def tune(
    rows: Path,
    model: str,
    tokens: Sequence[int],
    copy: str | None = None,
    into: str | None = None,
    most: int = 100,
    kinds: Sequence[str] = ("forward", "dgrad", "wgrad"),
) -> int:
    """Time every candidate for every product of a model, and write the fastest; return 1 if a product is wrong.

    Args:
        rows: a row for each product: the fastest tile, and its speed over torch.mm's; and one for each candidate.
        model: of which one rank's products are tuned.
        tokens: numbers of rows.
        copy: a directory that gets a copy of the file.
        into: the directory of the file; default where the operators look.
        most: products of each number of tokens.
        kinds: which products: forward, dgrad, wgrad, alone.
    """
    device = device_here()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    path = path_for(gpu) if into is None else Path(into) / path_for(gpu).name
    target = target_of(torch.empty(0, device=device))
    found: dict[Key, Tile] = {}
    wrong = 0
    for num_tokens in tokens:
        every = products(MODELS_BY_NAME[model], num_tokens, device)
        of_kinds = (product for product in every if product.name.rpartition("_")[2] in kinds)
        for product in itertools.islice(of_kinds, most):
            tile, is_right = _tuned(rows, product, f"{model}/tokens_{num_tokens}/{product.name}", target)
            wrong |= not is_right
            if tile is not None:
                found[tile_key(tile)] = tile
        # Written after each number of tokens: a cut leaves what was found.
        copied = None if copy is None else Path(copy) / path.name
        save(path, gpu, target, tiles=found.values(), copied=copied)
    return int(wrong)


def products(model: Model, tokens: int, device: torch.device) -> Iterator[Product]:
    """Yield forward, dgrad and wgrad of each projection, as training launches them: q, k, v as one, and gate and up.

    Then the head's wgrad; and, to see what one product saves, the weight gradients that are its parts, each `alone`.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device).to(dtype)

    for name, (out, inner) in model.projections.items():
        x, dy, weight = normal(tokens, inner), normal(tokens, out), normal(out, inner)
        yield Product(f"{name}_forward", x, weight.T)
        yield Product(f"{name}_dgrad", dy, weight)
        yield Product(f"{name}_wgrad", dy.T, x, accumulates=True)
    x = normal(tokens, model.hidden)
    yield Product("head_wgrad", normal(tokens, model.vocabulary).T, x, accumulates=True)
    mixed, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    for names, sizes in ((("q", "k", "v"), (mixed, keys, keys)), (("gate", "up"), (model.ffn, model.ffn))):
        pieces = normal(tokens, sum(sizes)).split(sizes, dim=1)
        for name, piece in zip(names, pieces, strict=True):
            yield Product(f"{name}_alone", piece.T, x, accumulates=True)


def _tuned(rows: Path, product: Product, case: str, target: Target) -> tuple[Tile | None, bool]:
    """Time the candidates of one product; return the fastest right one, and whether all that ran were right."""
    _, a, b, accumulates = product
    wide = a.double() @ b.double()
    of_torch = (a @ b).double()
    unit = torch.finfo(a.dtype).eps * float(wide.abs().max())
    allowed = max(unit, 2 * float((of_torch - wide).abs().max()))
    sums = torch.zeros(a.shape[0], b.shape[1], device=a.device) if accumulates else None
    rivals = _rivals(a, b, sums)
    launch = functools.partial(launch_matmul, a, b, out=sums, accumulate=accumulates)
    tiles: dict[str, MatmulConfig] = {}
    calls: dict[str, Callable[[], object]] = dict(rivals)
    is_right = True
    for config in CANDIDATES if a.is_cuda else SMALL_CANDIDATES:
        name = "x".join(map(str, config[:6]))
        if not is_allowed(config, a.element_size(), target):
            continue
        try:
            if sums is not None:
                sums.zero_()
            error = float((launch(config=config).double() - wide).abs().max())
        except Exception as raised:  # a candidate that does not compile or fit costs itself alone
            text = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
            write(rows, f"tiles/{case}/{name}", {"left_out": text})
            continue
        if not error <= allowed:
            write(rows, f"tiles/{case}/{name}", {}, f"failed: wrong by {error:.2g}, allowed are {allowed:.2g}")
            is_right = False
            continue
        tiles[name] = config
        calls[name] = functools.partial(launch, config=config)
    if not tiles:
        return None, is_right
    times = medians({**calls, "present": launch}, a.device, rounds=10 if a.is_cuda else 1)
    for name in tiles:
        write(rows, f"tiles/{case}/{name}", {"tile_us": 1e6 * times[name].median})
    best = min(tiles, key=lambda name: times[name].median)
    best_rival = min(rivals, key=lambda name: times[name].median)
    seconds, of_rival = times[best].median, times[best_rival].median
    fields = {
        "tile": best,
        "tile_us": 1e6 * seconds,
        "torch_us": 1e6 * of_rival,
        "best_rival": best_rival,
        "speedup_over_best_rival_median_ratio": of_rival / seconds,
        "gain_over_present_ratio": times["present"].median / seconds,
        "ours": "tile",
    }
    write(rows, f"tiles/{case}", fields | {f"{name}_us": 1e6 * times[name].median for name in rivals})
    (m, k), n = a.shape, b.shape[1]
    dtype, orders = str(a.dtype).removeprefix("torch."), (a.stride(1) == 1, b.stride(1) == 1)
    # What the operator would take instead: no product with an addition behind it.
    taken = times.get(_ADDMM if accumulates else _MM)
    return Tile(
        m, n, k, dtype, *orders, accumulates, tiles[best], _us(seconds), None if taken is None else _us(taken.median)
    ), is_right


def _rivals(a: Tensor, b: Tensor, sums: Tensor | None) -> dict[str, Callable[[], object]]:
    """Return torch's ways to compute a @ b, or to add it to `sums`."""
    if sums is None:
        return {_MM: functools.partial(torch.mm, a, b)}
    found: dict[str, Callable[[], object]] = {_MM_AND_ADD: lambda: sums.add_(torch.mm(a, b))}
    if not refusal_of(a.device, a.dtype):
        found[_ADDMM] = functools.partial(add_by_torch, sums, a.T, b)
    return found


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def save(
    path: Path,
    gpu: str,
    target: Target,
    *,
    tiles: Iterable[Tile] = (),
    attentions: Iterable[TunedAttention] = (),
    copied: Path | None = None,
) -> None:
    """Write what was found to both places, beside what either has of an earlier run and this one lacks."""
    places = [place for place in (copied, path) if place is not None]
    every_tile: dict[Key, Tile] = {}
    every_attention: dict[AttentionKey, TunedAttention] = {}
    for known_tiles, known in [
        *(read_tuned(place, gpu, target) for place in places if place.exists()),
        (tiles, attentions),
    ]:
        every_tile |= {tile_key(tile): tile for tile in known_tiles}
        every_attention |= {attention_key(*one[:5]): one for one in known}
    where = environment()
    head = gpu, where["date"], where["commit"], where["torch"], where["triton"]
    file = TunedFile(*head, [*every_tile.values()], [*every_attention.values()])
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_beside(place, written(file))
