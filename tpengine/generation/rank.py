"""One rank of `tpengine generate`: builds its part of the model, fills it, and continues prompts when it is asked.

What a user can mend is returned in words, on all ranks alike, and not raised: the process that started the ranks says
it in one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.matmul.host import has_onednn
from tpkernels.symmetric.host_memory import available_bytes

from tpengine.config import Config
from tpengine.distributed.connect import GroupError
from tpengine.distributed.launch import Launch
from tpengine.distributed.mesh import Communicators, Shape, build_mesh
from tpengine.distributed.process import choose_device, link_device
from tpengine.generation.decoder import MOST_ROWS, Decoder, DecoderRank, most_rows, rows_to_prepare
from tpengine.generation.text import Drawing
from tpengine.layers.collectives import WholeRows
from tpengine.layers.rows import cache_bytes
from tpengine.layout.parameters import kv_replicas, pieces_of, stage_specs
from tpengine.layout.step_plan import Layout, layout_of
from tpengine.model.meta_modules import Uninitialized
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer
from tpengine.runs.restoring import on_all_ranks
from tpengine.training.planned_run import RunError

_CACHE = "cache", "fewer --max-tokens or prompts"


def build(
    config: Config,
    layout: Layout,
    device: torch.device,
    rows_of: Callable[[Communicator], Communicator] = WholeRows,
) -> DecoderRank:
    """Build this rank's part of a model, its weights not filled; collective over all ranks.

    Args:
        config: validated; train.seq_len is the rows of the largest pass.
        layout: of it.
        device: where this rank computes.
        rows_of: the tp ranks -> as layers exchange rows with them; by default every rank has all rows.
    """
    shape = Shape.of(config.parallel)
    link = link_device(device)
    mesh = build_mesh(shape, link.type, kv_replicas(config.model, shape.tp))
    comms = Communicators.of(mesh, config, device)
    try:
        comms.connect(link)
    except GroupError as error:
        raise RunError(str(error)) from error
    dtype = getattr(torch, config.train.dtype)
    parts = FastParts(config.model, rows_of(comms.tp), replicas=comms.replica, dtype=dtype, device=device)
    with Uninitialized():
        model = Transformer(parts, chunks=layout.layers_of(mesh.at.pp))
    return DecoderRank(config, layout, mesh, comms, model.requires_grad_(False), device)


class GeneratingRank:
    """What a started rank holds (distributed/local_ranks.py).

    Args:
        config: as for `build`; model.path says where the weights are.
        prompts: at least one token each; none where they come later, one by one (`begin`).
        room: how many tokens each is continued by at most.
        drawing: how.
        num_threads: of a rank on a CPU.
        fill: fills a model's weights from config.model.path; collective. It raises RunError or CheckpointError, on all
            ranks alike.
    """

    def __init__(
        self,
        config: Config,
        prompts: list[list[int]],
        room: int,
        drawing: Drawing,
        num_threads: int,
        fill: Callable[[Transformer, Config], None],
    ) -> None:
        torch.set_num_threads(num_threads)
        rows = most_rows([len(prompt) for prompt in prompts]) if prompts else MOST_ROWS
        self._config = replace(config, train=replace(config.train, seq_len=rows))
        self._prompts, self._room, self._drawing, self._fill = prompts, room, drawing, fill
        self._decoder: Decoder | None = None

    def prepare(self) -> tuple[str, int]:
        """Build the model and read its weights; collective.

        Returns:
            What is wrong, on all ranks alike, or nothing; the bytes of this rank's cache.
        """
        config, rank, world = self._config, dist.get_rank(), dist.get_world_size()
        try:
            device = choose_device(config.device, Launch(rank, world, rank, world))
            layout = layout_of(config)
            weights, cache = rank_bytes(config, layout, self._prompts, self._room)
            copies = 1 + (device.type == "cpu" and config.train.dtype == "float32" and has_onednn())
            on_all_ranks(lambda: check_memory(copies * weights, cache, device, _CACHE))
            ranks = build(config, layout, device)
            self._fill(ranks.model, config)
            # On a CPU: a copy of the weights that products of few rows read up to twice as fast.
            ranks.model.prepare(rows_to_prepare(max(1, len(self._prompts))))
        except (RunError, ValueError) as problem:  # a CheckpointError is one
            return str(problem), 0
        self._ranks = ranks
        if self._prompts:
            self._decoder = Decoder(ranks, self._prompts, self._room, self._drawing)
        return "", cache

    def begin(self, prompt: list[int], num_drawn: int) -> str:
        """Begin with another prompt, read as a whole; the one before it is forgotten. Collective.

        Args:
            prompt: at least one token.
            num_drawn: tokens drawn for those before, whose draws are not repeated.

        Returns:
            What is wrong, on all ranks alike, or nothing.
        """
        ranks = self._ranks
        self._decoder = None
        _, cache = rank_bytes(self._config, ranks.layout, [prompt], self._room)
        try:
            on_all_ranks(lambda: check_memory(0, cache, ranks.device, _CACHE))
        except RunError as problem:
            return str(problem)
        self._decoder = Decoder(ranks, [prompt], self._room, self._drawing, num_drawn)
        return ""

    def step(self) -> list[int]:
        """Return the next token of each sequence; collective."""
        assert self._decoder is not None, "there is no prompt yet"
        with torch.no_grad():
            return self._decoder.step()


def rank_bytes(config: Config, layout: Layout, prompts: list[list[int]], room: int) -> tuple[int, int]:
    """Return the bytes of this rank's weights, in the dtype they are computed with, and those of its cache."""
    model, shape = config.model, Shape.of(config.parallel)
    at, item = shape.coordinates(dist.get_rank()), getattr(torch, config.train.dtype).itemsize
    chunks = layout.layers_of(at.pp)
    held = range(at.tp, at.tp + 1)
    specs = [spec for chunk in chunks for spec in stage_specs(model, shape.tp, *chunk)]
    sizes = {piece.name: math.prod(piece.block[1]) for spec in specs for piece in pieces_of(spec, shape.tp, held)}
    heads, seq = max(1, model.num_kv_heads // shape.tp), max(map(len, prompts), default=0) + room
    num_layers = sum(last - first for first, last in chunks)
    return sum(sizes.values()) * item, cache_bytes(num_layers, len(prompts), seq, heads, model.head_size, item)


def check_memory(weights: int, more: int, device: torch.device, what: tuple[str, str]) -> None:
    """Raise ValueError if what a rank holds does not fit into the memory there is for it.

    Args: weights: bytes. more: bytes of what lies beside them. what: that is, and what would make it less.
    """
    world = dist.get_world_size()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] // -(-world // torch.cuda.device_count())
    else:
        free = available_bytes() // world
    if free and weights + more > free:
        raise ValueError(
            f"weights and {what[0]} must fit into memory: a rank would hold {weights / 1e6:,.1f} MB and "
            f"{more / 1e6:,.1f} MB, and there are {free / 1e6:,.1f} MB for it: use {what[1]}, a narrower --dtype, or "
            "more ranks on several GPUs"
        )
