"""Rung: gloo ranks. Scripts with a loss of their own: their first step's loss and metrics by hand, and that they learn.

Cut over tp, from columns of token files; by hand is plain torch of one process.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import ROOT
from support.engine.parity import config_of
from support.programs import run_ranks
from support.ranks.rank_pool import RankPool
from support.readmes import snippets_in
from torch import Tensor

from tpengine.config import Config
from tpengine.data import Column, open_corpus, open_file, write_column
from tpengine.examples import classify, distill, dpo
from tpengine.runs.trainer import Trainer
from tpengine.training.objective import Objective
from tpengine.training.planned_run import RunError

CPU = torch.device("cpu")
SEQ = 24
OBJECTIVES = {
    "classify": Objective(classify.loss, classify.count, {"right": classify.right}),
    "dpo": Objective(dpo.loss, dpo.count, {"preferred": dpo.preferred}),
    "distill": Objective(distill.loss, metrics={"agreed": distill.agreed}),
}
COLUMNS = {"classify": "grade", "dpo": "reference", "distill": "top_ids,top_logprobs"}


def pairs(num: int) -> list[tuple[dpo.Answer, dpo.Answer]]:
    """Prompts whose chosen answer goes on counting, and whose rejected one does not."""
    generator = np.random.default_rng(0)
    found: list[tuple[dpo.Answer, dpo.Answer]] = []
    for _ in range(num):
        prompt = (int(generator.integers(40)) + np.arange(4)).tolist()
        length = int(generator.integers(3, 8))
        found.append(((prompt, [*range(prompt[-1] + 1, prompt[-1] + 1 + length)]), (prompt, [7] * length)))
    return found


def teachings(num: int, width: int) -> list[distill.Document]:
    generator = np.random.default_rng(0)
    found = []
    for _ in range(num):
        length = int(generator.integers(5, 40))
        logprobs = np.log(generator.dirichlet(np.ones(width + 1), length)[:, :width])
        found.append((generator.integers(0, 64, length), generator.integers(0, 64, (length, width)), logprobs))
    return found


def written(name: str, path: Path) -> Path:
    if name == "classify":
        classify.write(path, 200)
    elif name == "dpo":
        dpo.write(path, 64, SEQ // 2, pairs(60))
        generator = np.random.default_rng(1)
        write_column(open_file(path), Column("reference"), -generator.random(60 * SEQ))
    else:
        distill.write(path, 64, 3, teachings(80, 3))
    return path


def config_for(name: str, path: Path, tp: int) -> Config:
    config = config_of(1, tp, 1, tied=False, kv_heads=2, num_layers=1)
    data = replace(config.data, path=str(path), packing="documents", columns=COLUMNS[name], ignore_token=None)
    if name == "dpo":
        # Pairs are samples from the first token on, and nothing is held out of them.
        config = replace(config, train=replace(config.train, eval_micro_batches=0, sample_tokens=0))
        data = replace(data, held_out_fraction=0.0)
    return replace(config, data=data, model=replace(config.model, vocab_size=64))


def first_step(config: Config, name: str) -> tuple[float, dict[str, float]]:
    result = Trainer(config, open_corpus(config), CPU, objective=OBJECTIVES[name]).step.run(0)
    return result.loss, dict(result.metrics)


def logits_of(config: Config) -> tuple[Tensor, Tensor, list[tuple[int, int]], dict[str, Tensor]]:
    """Log-probabilities and labels of the first step's tokens, its documents, and its columns, of one process."""
    corpus = open_corpus(config)
    numbers = np.arange(8)
    tokens, labels, starts = corpus.train.read_with_starts(numbers)
    columns = corpus.train.read_columns(numbers, labels)
    net = Trainer(config, corpus, CPU).state.model
    rows, documents = [], []
    for row, of_row in enumerate(starts):
        bounds = [0, *of_row.tolist(), SEQ]
        for first, last in itertools.pairwise(bounds):
            # Each document by itself.
            alone = torch.from_numpy(tokens[row, first:last])
            rows.append(net(alone, len(alone))[:, :64].detach().log_softmax(1))
            documents.append((row * SEQ + first, row * SEQ + last))
    flat = {name: torch.from_numpy(column.reshape(8 * SEQ, *column.shape[2:])) for name, column in columns.items()}
    return torch.cat(rows), torch.from_numpy(labels.reshape(-1)), documents, flat


def by_hand(config: Config, name: str) -> tuple[float, dict[str, float]]:
    log_p, labels, documents, columns = logits_of(config)
    valid, numbers = labels != -100, range(len(labels))
    if name == "classify":
        places = [(at, int(columns["grade"][at]) - 1) for at in numbers if columns["grade"][at]]
        among = [(log_p[at, :3].log_softmax(0), of_class) for at, of_class in places]
        loss = -sum(float(classes[of_class]) for classes, of_class in among) / len(places)
        return loss, {"right": sum(int(classes.argmax()) == of_class for classes, of_class in among) / len(places)}
    if name == "dpo":
        gained = torch.zeros(len(labels), dtype=torch.float64)
        for at in numbers:
            if valid[at]:
                gained[at] = columns["weights"][at] * (log_p[at, labels[at]] - columns["reference"][at])
        of_documents = [float(gained[first:last].sum()) for first, last in documents]
        margins = [0.1 * (a - b) for a, b in zip(of_documents[::2], of_documents[1::2], strict=True)]
        loss = -sum(float(F.logsigmoid(torch.tensor(margin, dtype=torch.float64))) for margin in margins) / 8
        return loss, {"preferred": sum(margin > 0 for margin in margins) / 8}
    total, agreed = 0.0, 0.0
    for at in numbers:
        if valid[at]:
            for of_teacher, token in zip(columns["top_logprobs"][at], columns["top_ids"][at], strict=True):
                total += float(of_teacher.exp() * (of_teacher - log_p[at, int(token)]))
            agreed += float(log_p[at, int(columns["top_ids"][at, 0])].exp())
    return total / int(valid.sum()), {"agreed": agreed / int(valid.sum())}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_first_step_is_as_by_hand(ranks: RankPool, tmp_path: Path, name: str) -> None:
    path = written(name, tmp_path / "text.tokens")
    (want,) = ranks.run(by_hand, 1, config_for(name, path, 1), name)
    for loss, metrics in ranks.run(first_step, 2, config_for(name, path, 2), name):
        assert loss == pytest.approx(want[0], rel=1e-6) and metrics == pytest.approx(want[1], rel=1e-6)


def refused(config: Config, name: str) -> str:
    """A rank's program: why the first step ends the run."""
    with pytest.raises(RunError) as error:
        first_step(config, name)
    return str(error.value)


def test_a_text_that_does_not_fit_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Sequences that are not two documents, as of another train.seq_len or packing; classes that there are not."""
    config = config_for("dpo", written("dpo", tmp_path / "pairs.tokens"), 2)
    graded = written("classify", tmp_path / "graded.tokens")
    file = open_file(graded)
    write_column(file, Column("grade", "uint8"), np.full(len(file.tokens), classify.CLASSES + 1, np.uint8))
    for name, wrong, said in (
        (
            "dpo",
            replace(config, train=replace(config.train, seq_len=2 * SEQ)),
            "two documents of 24 tokens with weights",
        ),
        ("dpo", replace(config, data=replace(config.data, packing="cut")), "got documents at [], with weights: "),
        ("classify", config_for("classify", graded, 2), "a grade must be 0, or a class + 1, at most 3: got 4: "),
    ):
        for line in ranks.run(refused, 2, wrong, name):
            assert line.startswith("the count raised ValueError: ") and said in line and "\n" not in line, line


def test_the_snippet_of_the_page_runs() -> None:
    ((num_ranks, source),) = snippets_in((ROOT / "tpengine" / "training" / "own_loss.md").read_text())
    assert num_ranks == 1
    exec(compile(source, "own_loss.md", "exec"), {})


def trained(directory: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    """Run a script on two ranks; return its rows."""
    run = ("--run-dir", str(directory / name), *flags)
    ends = run_ranks(2, f"tpengine.examples.{name}", *run, cwd=directory)
    assert not any(end.returncode for end in ends), [end.stderr for end in ends]
    return [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_scripts_learn(tmp_path: Path) -> None:
    classify.write(tmp_path / "graded.tokens", 4000)
    rows = trained(tmp_path, "classify", "--data.path", str(tmp_path / "graded.tokens"))
    assert rows[-1]["metric/right"] > 0.8 and rows[-1]["held_out_metric/right"] > 0.8
    path = written("distill", tmp_path / "teacher.tokens")
    sizes = (
        "--model.vocab-size",
        "64",
        "--train.seq-len",
        str(SEQ),
        "--train.steps",
        "30",
        "--train.sample-tokens",
        "0",
    )
    rows = trained(tmp_path, "distill", *sizes, "--data.path", str(path), "--optim.warmup-steps", "2")
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    pairs_path = written("dpo", tmp_path / "pairs.tokens")
    rows = trained(tmp_path, "dpo", *sizes, "--data.path", str(pairs_path), "--optim.warmup-steps", "2")
    assert rows[-1]["metric/preferred"] > 0.9 and rows[-1]["loss"] < rows[0]["loss"]


def test_a_prompt_without_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="room for its answer: 4 of 4 tokens"):
        dpo.write(tmp_path / "p", 64, 4, [(([1, 2, 3, 4], [5]), ([1], [2]))])
