"""Rung: gloo ranks (one, in this process). `tpengine.run` is the command line's run, bit for bit, from Python."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpengine
from tpengine import ModelConfig, OptimConfig, train
from tpengine.commands.keywords import asked_in_python
from tpengine.config.settings import ModelDetails, ParameterGroup
from tpengine.config.toml import dump_toml
from tpengine.data import write_tokens

MODEL = {"hidden_size": 32, "num_heads": 4, "ffn_size": 48, "num_layers": 1}
TRAIN = {
    **{"seq_len": 16, "micro_batch_size": 2, "num_micro_batches": 2, "steps": 3, "checkpoint_every": 2},
    **{"eval_micro_batches": 2, "sample_tokens": 0},
}


def flags(**sections: dict[str, Any]) -> list[str]:
    return [
        part
        for section, values in sections.items()
        for name, value in values.items()
        for part in (f"--{section}.{name}", str(value))
    ]


def left_by(run_dir: Path) -> tuple[list[tuple[float, float]], dict[str, str]]:
    """Losses and norms, and the hash of every file of the checkpoints."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    files = (run_dir / "checkpoints").rglob("*.safetensors")
    return [(row["loss"], row["grad_norm"]) for row in rows], {
        str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def test_each_form_of_a_configuration_gives_the_command_lines_bits(tmp_path: Path) -> None:
    train.main([*flags(model=MODEL, train=TRAIN), "--device", "cpu", "--run-dir", str(tmp_path / "line")])
    want = left_by(tmp_path / "line")
    assert len(want[0]) == 3 and len(want[1]) == 2
    tpengine.run(model=MODEL, train=TRAIN, device="cpu", run_dir=tmp_path / "keywords")
    assert left_by(tmp_path / "keywords") == want
    # This process is no rank of a launcher's for having trained: --nproc may start ranks from here.
    assert not {"RANK", "WORLD_SIZE"} & os.environ.keys()
    config = tpengine.Config(model=tpengine.ModelConfig(**MODEL), train=tpengine.TrainConfig(**TRAIN))
    (tmp_path / "run.toml").write_text(dump_toml(replace(config, device="cpu")))
    tpengine.run(tmp_path / "run.toml", run_dir=tmp_path / "file")
    assert left_by(tmp_path / "file") == want
    # It is resumed by keywords alone, and by the command line; what is given last decides.
    config = replace(config, train=replace(config.train, steps=9), device="cpu", run_dir=str(tmp_path / "config"))
    assert tpengine.run(config, train={"steps": 2}).step == 2
    result = tpengine.run(run_dir=tmp_path / "config", resume=True, train={"steps": 3})
    assert left_by(tmp_path / "config") == want and result.loss == want[0][-1][0]
    assert tpengine.run(["--run-dir", str(tmp_path / "config"), "--resume"]).loss is None


class Rows:
    """Own data in 15 lines: samples of seq_len + 1 tokens."""

    def __init__(self, tokens: Any, seq_len: int) -> None:
        self.rows = [tokens[first : first + seq_len + 1] for first in range(0, len(tokens) - seq_len, seq_len)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


def test_own_data_train_as_a_file_of_them_does_and_a_resume_refuses_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 16 * 60 + 1)
    write_tokens(tmp_path / "text.tokens", tokens, 256)
    common: dict[str, Any] = {"model": {**MODEL, "vocab_size": 256}, "train": TRAIN, "device": "cpu"}
    tpengine.run(data=tmp_path / "text.tokens", run_dir=tmp_path / "file", **common)
    want = left_by(tmp_path / "file")
    tpengine.run(data=tokens, run_dir=tmp_path / "row", **common)
    assert left_by(tmp_path / "row") == want
    tpengine.run(data=Rows(tokens, 16), run_dir=tmp_path / "rows", **common)
    assert left_by(tmp_path / "rows") == want
    # A resume with other data, or without any.
    capsys.readouterr()
    other = tokens.copy()
    other[-1] ^= 1
    for data in (Rows(other, 16), None):
        with pytest.raises(SystemExit) as end:
            tpengine.run(data=data, run_dir=tmp_path / "rows", resume=True, train={"steps": 4})
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.count("\n") == 1
        assert "60 samples given to tpengine.run, SHA-256 of 60 " in said
    assert tpengine.run(data=Rows(tokens, 16), run_dir=tmp_path / "rows", resume=True, train={"steps": 4}).step == 4


def by_hand(output: Any, batch: Any) -> Any:
    """The loss of the next token, otherwise computed."""
    return -output.token_logprobs(batch.labels).sum()


def test_an_own_loss_and_metrics_are_the_runs_and_a_resume_keeps_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {"model": MODEL, "device": "cpu", "train": {**TRAIN, "dtype": "float64"}}
    tpengine.run(run_dir=tmp_path / "line", **common)
    own: dict[str, Any] = {"loss": by_hand, "metrics": {"again": by_hand}, "count": lambda batch: 2 * len(batch.labels)}
    result = tpengine.run(run_dir=tmp_path / "own", **own, **common)
    want, rows = left_by(tmp_path / "line")[0], left_by(tmp_path / "own")[0]
    assert rows[0][0] == pytest.approx(want[0][0] / 2, rel=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [line["metric/again"] for line in lines] == [line["loss"] for line in lines]
    assert lines[-1]["held_out_metric/again"] == result.held_out_loss
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main(["--run-dir", str(tmp_path / "own"), "--resume", "--train.steps", "4"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert "was saved with the loss by_hand, counted by test_an_own" in said
    assert "this run has the loss of the next token: call tpengine.run with" in said
    assert tpengine.run(run_dir=tmp_path / "own", resume=True, **own, train={"steps": 4}).step == 4


class Descent:
    """An optimizer of one's own."""

    name, states, operations = "descent", ("moment",), 3

    def update(self, weight: Any, gradient: Any, states: Any, numbers: Any) -> Any:
        moment = states["moment"] * numbers.beta1 + gradient
        return weight - numbers.lr * moment, {"moment": moment}


def test_an_own_optimizer_updates_and_a_resume_without_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: dict[str, Any] = {"model": MODEL, "device": "cpu"}
    plain = tpengine.OptimConfig(name="sgd", weight_decay=0.0)
    tpengine.run(run_dir=tmp_path / "sgd", train=TRAIN, optim=plain, **common)
    run_dir = tmp_path / "own"
    tpengine.run(run_dir=run_dir, optimizer=Descent(), train={**TRAIN, "steps": 2}, optim={"weight_decay": 0}, **common)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        tpengine.run(run_dir=run_dir, resume=True, train={"steps": 3})
    said = capsys.readouterr().err
    assert "got 'descent'" in said and "hand one of your own to tpengine.run (optimizer=)" in said
    tpengine.run(run_dir=run_dir, resume=True, train={"steps": 3}, optimizer=Descent())
    assert left_by(run_dir)[0] == left_by(tmp_path / "sgd")[0]


def test_sections_groups_and_details_may_be_the_settings_own_classes() -> None:
    group, details = ParameterGroup("*.q_proj.weight", lr=0.5), ModelDetails(head_size=16, mlp_bias=True)
    tables = {"groups": ({"pattern": group.pattern, "lr": 0.5},)}, {"details": {"head_size": 16, "mlp_bias": True}}
    mixed = {"groups": [group]}, {"details": details}
    for optim, model in (tables, mixed, (OptimConfig(groups=(group,)), ModelConfig(details=details))):
        given = asked_in_python((), None, {"optim": optim, "model": model}).given
        assert given["optim.groups"] == (group,) and given["model.details"] == details


class NoData:
    pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train": {"stpes": 3}}, "tpengine.run: unknown key train.stpes: did you mean train.steps?"),
        ({"train": {"steps": "3"}}, "tpengine.run: train.steps must be of type int: got '3': use 3"),
        ({"trian": {}}, "tpengine.run has no setting trian: did you mean train?"),
        ({"callback": []}, "tpengine.run has no setting callback: did you mean callbacks?"),
        ({"num_layers": 2}, "tpengine.run has no setting num_layers: use model={'num_layers': ...}"),
        ({"train": 3}, "tpengine.run: train must be a table: got 3: write [train]"),
        ({"config": 3}, "config must be a tpengine.Config, the path of a TOML file, or flags: got int: give settings"),
        ({"config": ["--train.stpes", "3"]}, "unknown option --train.stpes: perhaps you meant --train.steps"),
        ({"config": ["--nproc", "2"]}, "--nproc starts ranks, and this process is rank 0 of 1 already: leave it out"),
        ({"config": tpengine.Config(), "preset": "bench"}, "preset= is what a file or settings are given over: got"),
        ({"preset": "bensh"}, "use bench"),
        ({"train": {"steps": 0}}, "train.steps must be at least 1: got 0: use 1"),
        ({"callbacks": [3]}, "callbacks must be objects of classes that derive from tpengine.Callback: got 3: derive"),
        ({"callbacks": tpengine.Callback()}, "callbacks must be a list: got Callback: give [Callback()]"),
        ({"loss": 3}, "a loss, its count and metrics are functions: loss is 3: give the function"),
        (
            {"metrics": [by_hand]},
            "metrics must be a dictionary of functions by name: got list: use metrics={'mine': mine}",
        ),
        ({"loss": by_hand, "train": {"z_loss": 0.1}}, "which a loss of your own replaces"),
        (
            {"optimizer": 3},
            "an optimizer of one's own is an UpdateRule (tpengine.training.elementwise): got int without",
        ),
        ({"data": NoData()}, "data must be tokens in one row, or samples with __len__ and __getitem__: got NoData"),
        ({"data": [1, 2], "config": ["--data.path", "x"]}, "a run trains on one text: got data of your own, and x"),
        ({"data": [256, 2]}, "data: tokens must be at least 0 and below model.vocab_size: got 256"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_the_command_lines_one_line(
    given: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        tpengine.run(**given, **({} if "config" in given else {"run_dir": tmp_path / "out"}))
    out, errors = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert errors.count("\n") == 1 and errors.startswith("tpengine: error: ") and said in errors
