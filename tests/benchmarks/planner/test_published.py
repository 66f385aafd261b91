"""Rung: pure. The score of predictions by hand: errors by table, memory, regret; a table through the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.planner.published import Scored, summary
from benchmarks.run import main


def scored(
    measured: float | None,
    predicted: float | None,
    *,
    ran_out: bool = False,
    fits: bool | None = True,
    model: str = "m",
) -> Scored:
    names = {"gpu": "a", "gpus": "8", "seq_len": "1", "global_batch": "8"}
    return Scored({"source": "s", "table": "t", "model": model, **names}, measured, predicted, ran_out, fits)


def test_figures_by_hand() -> None:
    rows = [
        *(scored(10.0, 11.0), scored(12.0, 9.0), scored(None, None, fits=None)),
        *(scored(None, 5.0, ran_out=True, fits=False), scored(None, 5.0, ran_out=True)),
        *(scored(20.0, 20.0, model="n", fits=False), scored(20.0, 10.0, model="o")),
    ]
    found = dict(summary(rows))
    assert found["published/step"] == found["published/step/s / t"]
    assert found["published/step"]["num_rows"] == 4
    assert found["published/step"]["mean_percent"] == pytest.approx((10 + 25 + 0 + 50) / 4)
    assert found["published/step"]["worst_percent"] == pytest.approx(50.0)
    assert found["published/step"]["signed_percent"] == pytest.approx((10 - 25 - 50) / 4)
    memory = found["published/memory"]
    assert (memory["num_rows"], memory["num_out_of_memory"], memory["num_refused"]) == (6, 2, 2)
    assert memory["recall_percent"] == memory["precision_percent"] == 50.0
    # One group has a choice: 12 s were predicted to be the fastest and 10 s were.
    assert found["published/regret"] == {
        "num_groups": 1,
        "mean_percent": pytest.approx(20.0),
        "worst_percent": pytest.approx(20.0),
    }
    assert dict(summary([]))["published/regret"] == {"num_groups": 0}


def test_a_table_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "runs.csv", tmp_path / "rows.jsonl"
    row = {
        **{"id": "a", "source": "Megatron", "table": "by hand", "model": "GPT", "layers": "4", "hidden": "1024"},
        **{"heads": "16", "vocab": "51200", "seq_len": "1024", "gpu": "A100-80", "gpus": "8", "tp": "8", "pp": "1"},
        **{"dp": "1", "micro_batch": "2", "global_batch": "8", "recompute": "none", "metric_name": "step_time_s"},
        "notes": "mlp=gelu4h; precision=bf16; step_s=0.1",
    }
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows([row, row | {"id": "b", "metric_name": "oom"}, row | {"id": "c", "gpu": "TPUv4"}])
    assert main(["published", "--table", str(table), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "3 rows" in said and "Calculon" in said
    stored = {row["case"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert stored["published/step"]["num_rows"] == 1
    assert (stored["published/memory"]["num_out_of_memory"], stored["published/memory"]["recall_percent"]) == (1, 0.0)
    assert main(["published", "--table", str(tmp_path / "no.csv")]) == 2
    assert "--table needs a readable CSV file" in capsys.readouterr().err
