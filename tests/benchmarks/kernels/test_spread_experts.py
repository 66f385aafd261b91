"""The benchmark of the experts' exchange: its layers repeat their bits, also without the exchange. Rung: gloo ranks."""

import json
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.kernels.spread_experts import Options, main


@pytest.mark.slow
def test_a_skewed_layer_is_measured_beside_an_even_one(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"

    assert main(Options(tokens=64, experts=8, top_k=2, hidden=32, ffn=16, rounds=1, out=out)) == 0

    even, skewed = (json.loads(line) for line in out.read_text().splitlines())
    assert even["check"] == skewed["check"] == "passed"
    assert 1.0 <= even["hottest_rank_ratio"] < skewed["hottest_rank_ratio"] <= 2.0
    assert skewed["products_median_seconds"] > 0 and skewed["over_bound_median_ratio"] > 0


def test_ranks_that_do_not_divide_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks 3, tokens 2048, experts 64: use the defaults"):
        main(Options(ranks=3))


@pytest.mark.parametrize("benchmark", ["moe", "moe_exchange"])
def test_more_experts_of_a_token_than_there_are_are_refused(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([benchmark, "--experts", "4"]) == 2
    assert "top-k 8, experts 4: use --top-k 4" in capsys.readouterr().err
