"""Rung: pure. Statistics of interleaved samples on given numbers, the order of rounds, and what a red check prevents.

No time is asserted anywhere: clocks are replaced by numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import run
from benchmarks.harness import registry
from benchmarks.harness.registry import Benchmark
from benchmarks.harness.timing import PASSED, Comparison, Spread, compare, interleave, paired_ratios, rotation


def test_spread_is_linear_between_neighbours() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == Spread(3.5, 2.0, 5.0, 6)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    spread = Spread.of([1.0, 2.0])
    assert (spread.p20, spread.median, spread.p80) == pytest.approx((1.2, 1.5, 1.8))


def test_one_interrupted_call_moves_no_median() -> None:
    assert Spread.of([1.0, 1.0, 1.0, 1.0, 100.0]).median == 1.0


def test_ratios_are_paired_by_round() -> None:
    """The machine slows down threefold half way; each round's ratio is 2 all the same, and so is the result."""
    slow, fast = [2.0, 2.0, 6.0, 6.0, 6.0], [1.0, 1.0, 3.0, 3.0, 3.0]
    assert paired_ratios(slow, fast) == [2.0] * 5
    found = Comparison(PASSED, {"slow": slow, "fast": fast}).ratio("slow", "fast")
    assert found == Spread(2.0, 2.0, 2.0, 5)


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    samples = {"a": [1.0, 4.0, 9.0], "b": [1.0, 1.0, 30.0]}
    found = Comparison(PASSED, samples).ratio("a", "b")
    assert found is not None and found.median == 1.0


def test_a_missing_sample_is_an_error() -> None:
    with pytest.raises(ValueError):
        paired_ratios([1.0, 2.0], [1.0])


def test_the_first_variant_moves_on_from_round_to_round() -> None:
    assert [rotation("abc", r) for r in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_every_variant_runs_once_a_round_and_warm_up_does_not_count() -> None:
    ran: list[str] = []

    def variant(name: str) -> Callable[[], float]:
        def call() -> float:
            ran.append(name)
            return float(len(ran))

        return call

    samples = interleave({name: variant(name) for name in "ab"}, rounds=3, warmup=1)
    assert "".join(ran) == "ba" + "ab" + "ba" + "ab"
    assert samples == {"a": (3.0, 6.0, 7.0), "b": (4.0, 5.0, 8.0)}


def nothing() -> None: ...


def test_a_green_comparison_has_times_and_ratios() -> None:
    calls = {"one": 0, "two": 0}

    def count(name: str) -> None:
        calls[name] += 1

    comparison = compare({"one": lambda: count("one"), "two": lambda: count("two")}, check=nothing, rounds=4, warmup=2)
    assert comparison.passed and comparison.exit_code == 0 and calls == {"one": 6, "two": 6}
    fields = comparison.fields(baseline="one")
    assert fields["check"] == "passed" and fields["two_num_samples"] == 4
    assert {f"two_speedup_over_one_{which}_ratio" for which in ("median", "p20", "p80")} <= fields.keys()
    assert "one_speedup_over_one_median_ratio" not in fields


def red() -> None:
    raise AssertionError("dw differs\nby 0.5")


def test_after_a_red_check_nothing_is_timed() -> None:
    def never() -> None:
        pytest.fail("a variant ran after a red check")

    comparison = compare({"a": never, "b": never}, check=red, rounds=3)
    assert comparison.exit_code == 1 and comparison.ratio("a", "b") is None and comparison.seconds("a") is None
    assert comparison.fields(baseline="b") == {"check": "failed: dw differs by 0.5"}


def test_a_red_check_of_one_variant_names_it() -> None:
    comparison = compare({"a": nothing, "b": nothing}, check={"a": nothing, "b": red}, rounds=1)
    assert comparison.check == "failed: b: dw differs by 0.5"


def test_other_errors_than_red_checks_are_not_hidden() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compare({"a": nothing}, check=broken, rounds=1)


@dataclass(frozen=True)
class FakeOptions:
    """A benchmark's options."""

    red: bool = False
    """Whether the check fails."""
    out: Path | None = None
    """Where the row goes."""


def fake_main(options: FakeOptions) -> int:
    comparison = compare({"a": nothing, "b": nothing}, check=red if options.red else nothing, rounds=2)
    row = comparison.fields(baseline="b")
    if options.out is not None:
        options.out.write_text(json.dumps(row))
    print(row)
    return comparison.exit_code


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fake_benchmark")
    vars(module).update(main=fake_main, Options=FakeOptions)
    monkeypatch.setitem(__import__("sys").modules, "fake_benchmark", module)
    entry = Benchmark("fake", "for this test", "fake_benchmark:main", "fake_benchmark:Options")
    missing = Benchmark("missing", "its module is not there", "benchmarks.no_such:main", "benchmarks.no_such:Options")
    table = {"fake": entry, "missing": missing}
    monkeypatch.setattr(registry, "BENCHMARKS", table)
    monkeypatch.setattr(run, "BENCHMARKS", table)


@pytest.mark.usefixtures("fake")
def test_a_red_check_ends_the_command_with_1_and_no_ratio(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run.main(["fake"]) == 0
    assert "ratio" in capsys.readouterr().out
    out = tmp_path / "rows.jsonl"
    assert run.main(["fake", "--red", "--out", str(out)]) == 1
    for text in (capsys.readouterr().out, out.read_text()):
        assert "failed: dw differs" in text and "ratio" not in text and "seconds" not in text


@pytest.mark.usefixtures("fake")
def test_a_missing_module_harms_only_its_own_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    assert "missing  its module is not there" in capsys.readouterr().out
    assert run.main(["missing"]) == 2
    assert "benchmarks: error: benchmark missing cannot be loaded" in capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_an_unknown_benchmark_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["fke"]) == 2
    assert capsys.readouterr().err.endswith("got 'fke': use fake\n")
    assert run.main([]) == 2
