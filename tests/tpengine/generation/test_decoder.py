"""Rung: gloo ranks. Tokens with the cache are those without, and transformers' own, in any layout, in float64.

What only a GPU checks: the same through the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.architectures.drawn import CONFIGS, EXPERTS
from support.architectures.runs import beginning, saved, trained_pieces
from support.architectures.transformers_models import Widened, in_files, ours
from support.ranks.rank_pool import RankPool
from tpkernels.ops.matmul import host

from tpengine.commands.generate import GenerateOptions, find_model
from tpengine.commands.generate_rank import generating_rank
from tpengine.generation import decoder
from tpengine.generation.decoder import draw
from tpengine.generation.text import Drawing

GREEDY, DRAWN = Drawing(temperature=0), Drawing(temperature=3.0, top_k=40, top_p=0.9, seed=5)
# Of one token, and longer than the windows of the drawn models (3 to 7).
PROMPTS = [[17], [3, 14, 15, 92, 65, 35, 89, 79, 32, 38], [2, 71, 82]]
ROOM = 20


def generated(options: GenerateOptions, prompts: list[list[int]], drawing: Drawing, most_rows: int) -> list[list[int]]:
    """A rank's program: the continuation of each prompt."""
    decoder.MOST_ROWS = most_rows
    rank = generating_rank(find_model(options).config, prompts, ROOM, drawing, 1)
    problem, _ = rank.prepare()
    assert not problem, problem
    return [list(tokens) for tokens in zip(*(rank.step() for _ in range(ROOM)), strict=True)]


@torch.no_grad()
def without_cache(theirs: Any, model: Path, prompts: list[list[int]], drawing: Drawing) -> list[list[int]]:
    """The same from whole sequences, each computed anew for each token."""
    net = ours(find_model(GenerateOptions(str(model))).config.model, in_files(theirs, theirs.state_dict()))
    sequences = [list(prompt) for prompt in prompts]
    for number in range(ROOM):
        rows = [net(torch.tensor(tokens), len(tokens))[-1, : net.model.vocab_size] for tokens in sequences]
        drawn = draw(torch.stack(rows), number, drawing).tolist()
        sequences = [[*tokens, token] for tokens, token in zip(sequences, drawn, strict=True)]
    return [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]


@pytest.mark.by_default("llama", "gpt2")
@pytest.mark.parametrize("architecture", [*CONFIGS, *EXPERTS])
def test_greedy_tokens_are_transformers(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    theirs, options = saved(architecture, tmp_path), GenerateOptions(str(tmp_path))
    (got,) = ranks.run(generated, 1, options, PROMPTS, GREEDY, 512)
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        with Widened(), torch.no_grad():
            given = torch.tensor([prompt])
            whole = theirs.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=ROOM, do_sample=False, pad_token_id=0
            )
        assert whole[0, len(prompt) :].tolist() == tokens, prompt


CASES = [
    ("gemma3", PROMPTS, DRAWN, 512),
    ("gpt2", PROMPTS, GREEDY, 2),
    *(pytest.param(name, PROMPTS[1:2], DRAWN, 4, marks=pytest.mark.slow) for name in (*CONFIGS, *EXPERTS)),
]


@pytest.mark.by_default("gemma3-prompts0-drawing0-512-1-1", "gpt2-prompts1-drawing1-2-2-2")
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("architecture", "prompts", "drawing", "most_rows"), CASES)
def test_tokens_are_those_without_a_cache_in_any_layout(
    ranks: RankPool,
    tmp_path: Path,
    architecture: str,
    prompts: list[list[int]],
    drawing: Drawing,
    most_rows: int,
    tp: int,
    pp: int,
) -> None:
    """With fewer KV heads than 4 ranks; several prompts, and one; prompts read in one piece, and row by row."""
    theirs, options = saved(architecture, tmp_path), GenerateOptions(str(tmp_path), tp=tp, pp=pp)
    want = without_cache(theirs, tmp_path, prompts, drawing)
    assert ranks.run(generated, tp * pp, options, prompts, drawing, most_rows) == [want] * (tp * pp)


def generated_for_one_row(options: GenerateOptions, prompt: list[int]) -> tuple[list[int], int]:
    """A rank's program: a prompt's continuation, and how many products of one row read a matrix laid out for it."""
    one_row, num_read = host._for_mkl, 0

    def counting(matrix: host.Matrix, num_rows: int) -> torch.Tensor:
        nonlocal num_read
        num_read += num_rows == 1 and isinstance(matrix, host.PreparedMatrix) and matrix.for_one_row is not None
        return one_row(matrix, num_rows)

    with patch.object(host, "has_onednn", lambda: True), patch.object(host, "_for_mkl", counting):
        (tokens,) = generated(options, [prompt], GREEDY, 512)
    return tokens, num_read


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN")
def test_one_sequence_reads_matrices_laid_out_for_one_row(ranks: RankPool, tmp_path: Path) -> None:
    theirs, options = saved("llama", tmp_path), GenerateOptions(str(tmp_path), tp=2, dtype="float32")
    (want,) = without_cache(theirs, tmp_path, PROMPTS[1:2], GREEDY)
    num_layers = find_model(options).config.model.num_layers
    for tokens, num_read in ranks.run(generated_for_one_row, 2, options, PROMPTS[1]):
        assert tokens == want
        # q, k and v together, o, gate and up together, down; and the head.
        assert num_read == (4 * num_layers + 1) * (ROOM - 1)


def exchanges_of_a_token(options: GenerateOptions) -> int:
    """A rank's program: how often the tp ranks wait for each other for one token of each prompt."""
    rank = generating_rank(find_model(options).config, PROMPTS, ROOM, GREEDY, 1)
    problem, _ = rank.prepare()
    assert not problem, problem
    rank.step()
    arena = rank._decoder._ranks.comms.tp.arena
    assert arena is not None
    before = arena.epoch
    rank.step()
    return arena.epoch - before


@pytest.mark.slow
def test_a_token_takes_one_exchange_of_each_half_of_a_block(ranks: RankPool, tmp_path: Path) -> None:
    """And one each for the embedding and the logits; rows that are cut need nearly twice as many."""
    saved("llama", tmp_path)
    num_layers = find_model(GenerateOptions(str(tmp_path))).config.model.num_layers
    assert ranks.run(exchanges_of_a_token, 2, GenerateOptions(str(tmp_path), tp=2)) == [2 * num_layers + 2] * 2


@pytest.mark.slow
def test_weights_are_read_from_a_checkpoint_of_another_layout(ranks: RankPool, tmp_path: Path) -> None:

    model, run = tmp_path / "model", tmp_path / "run"
    theirs = saved("qwen3", model)
    run.mkdir()
    config = replace(beginning(model, (2, 1, 1), dtype="float64", steps=2, checkpoint_every=100), run_dir=str(run))
    ranks.run(trained_pieces, 2, config)
    (got,) = ranks.run(generated, 1, GenerateOptions(str(run)), PROMPTS, DRAWN, 512)
    assert got == without_cache(theirs, model, PROMPTS, DRAWN)
    # In another dtype: float32, as a user may ask for.
    one, other = ranks.run(generated, 2, GenerateOptions(f"{run}@2", pp=2, dtype="float32"), PROMPTS, GREEDY, 512)
    assert one == other == without_cache(theirs, model, PROMPTS, GREEDY)


@pytest.mark.parametrize("problem", ["no such weights", "a damaged file", "no memory"])
def test_what_a_rank_cannot_use_is_told_in_one_line(ranks: RankPool, tmp_path: Path, problem: str) -> None:
    saved("llama", tmp_path)
    room = ROOM
    if problem == "no such weights":
        (tmp_path / "config.json").write_text(
            (tmp_path / "config.json").read_text().replace('"intermediate_size": 48', '"intermediate_size": 50')
        )
        expected = "weights must be those of the model: "
    elif problem == "a damaged file":
        file = next(tmp_path.glob("model-*.safetensors"))
        file.write_bytes(file.read_bytes()[:-8])
        expected = "a safetensors file must be whole: "
    else:
        room, expected = (
            10**12,
            "weights and cache must fit into memory: a rank would hold 0.2 MB and 1,536,000,000.0 MB, ",
        )
    said = ranks.run(problem_of, 2, GenerateOptions(str(tmp_path), tp=2), room)
    assert said[0].startswith(expected) and "\n" not in said[0], said
    assert said[1] == said[0]


def problem_of(options: GenerateOptions, room: int) -> str:
    """A rank's program."""
    try:
        config = find_model(options).config
    except ValueError as error:
        return str(error)
    return generating_rank(config, PROMPTS, room, GREEDY, 1).prepare()[0]
