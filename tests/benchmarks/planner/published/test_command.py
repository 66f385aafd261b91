"""Rung: pure. The score of predictions by hand: errors by table, memory, regret; tables through the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.planner.published.command import Scored, summary
from benchmarks.planner.published.predict import predicted
from benchmarks.planner.published.row import Row
from benchmarks.run import main

RUN = {
    **{"id": "a", "source": "Megatron", "table": "by hand", "model": "GPT", "layers": "4", "hidden": "1024"},
    **{"heads": "16", "vocab": "51200", "seq_len": "1024", "gpu": "A100-80", "gpus": "8", "tp": "8", "pp": "1"},
    **{"dp": "1", "zero_stage": "", "micro_batch": "2", "global_batch": "8", "recompute": "none"},
    **{"metric_name": "step_time_s", "notes": "mlp=gelu4h; precision=bf16; step_s=0.1"},
}


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
    rows = [RUN, RUN | {"id": "b", "metric_name": "oom"}, RUN | {"id": "c", "gpu": "TPUv4"}]
    table, out = written(tmp_path / "runs.csv", rows), tmp_path / "rows.jsonl"
    assert main(["published", "--table", str(table), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "3 rows" in said and "Calculon" in said
    stored = {row["case"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert stored["published/step"]["num_rows"] == stored["published/step/Megatron / by hand"]["num_rows"] == 1
    assert (stored["published/memory"]["num_out_of_memory"], stored["published/memory"]["recall_percent"]) == (1, 0.0)


def written(path: Path, rows: list[dict[str, str]], more: str = "") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        file.write(more)
    return path


def test_predictions_are_written_a_row_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a table in which nothing was measured, and of rows that cannot be predicted."""
    blind = {key: value for key, value in RUN.items() if key not in ("metric_name", "source", "table")}
    blind["notes"] = "mlp=gelu4h; precision=bf16"
    rows = [
        blind,
        blind | {"id": "b", "gpu": "TPUv5p"},
        blind | {"id": "f", "tp": "1", "dp": "8", "global_batch": "16"},
    ]
    table, out = written(tmp_path / "runs.csv", rows, "short,row\n"), tmp_path / "predictions.csv"
    assert main(["published", "--table", str(table), "--predictions", str(out)]) == 0
    assert "4 rows, 2 of them predicted" in capsys.readouterr().out
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["id", "step_seconds", "mfu", "peak_bytes", "fits", "notes"]
    assert [row["id"] for row in found] == ["a", "b", "f", "short"]
    assert [bool(row["step_seconds"]) for row in found] == [True, False, True, False]
    assert found[1]["fits"] == found[1]["peak_bytes"] == found[1]["mfu"] == "" and "TPUv5p" in found[1]["notes"]
    of = predicted(Row.of(blind))
    assert float(found[0]["step_seconds"]) == pytest.approx(of.step_seconds, rel=1e-5)
    assert found[0]["fits"] == "yes" and int(found[0]["peak_bytes"]) == of.peak_bytes


def test_names_stay_in_another_encoding_too(tmp_path: Path) -> None:
    """Predictions are joined by id: whatever it is, also where the cell would say nothing or no in another column."""
    table, out = tmp_path / "runs.csv", tmp_path / "predictions.csv"
    names, long = ["x", "-", "n/a", " a b ", "\u00e9"], "y" * 200_000
    with table.open("w", newline="", encoding="latin-1") as file:
        writer = csv.DictWriter(file, [" ID", *list(RUN)[1:], "remark"])
        writer.writeheader()
        for name in names:
            columns = {key: value for key, value in RUN.items() if key != "id"}
            writer.writerow({" ID": name, **columns, "remark": long})
    assert main(["published", "--table", str(table), "--predictions", str(out)]) == 0
    with out.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == names and all(row["step_seconds"] for row in found)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacks, binary, good = tmp_path / "lacks.csv", tmp_path / "binary.csv", tmp_path / "good.csv"
    good.write_text(",".join(RUN) + "\n")
    lacks.write_text("id,layers\na,1\n")
    binary.write_bytes(b"id\n\0\xff\xfe")
    for table, out, rule in (
        (tmp_path / "no.csv", None, "--table needs a readable file"),
        (lacks, None, "lacks hidden, seq_len, gpu, gpus, global_batch"),
        (binary, None, "has bytes that no text has"),
        (good, good, "--predictions must be another file than --table"),
        (good, tmp_path, "it is a directory: name another"),
        (good, tmp_path / "no" / "o.csv", "no is no directory: name another"),
    ):
        said = ["--predictions", str(out)] if out else []
        assert main(["published", "--table", str(table), *said]) == 2
        error = capsys.readouterr().err
        assert rule in error and error.count("\n") == 1
