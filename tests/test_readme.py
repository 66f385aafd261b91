"""Rung: gloo ranks. What the READMEs show runs as shown; their files, functions, flags and figures exist.

The complete scripts that they link are run by tests/tpengine/examples, the kernels' own page by
tests/kernels/test_worked_example.py.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import re
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support import ROOT
from support.ranks.rank_pool import RankPool
from support.readmes import READMES, commands_in, snippets_in, the_command

from tpengine.cli import main
from tpengine.config import Config

TOP = ROOT / "README.md"
CATALOGUE = (ROOT / "kernels" / "README.md").read_text()
ENGINE = ROOT / "tpengine"
KERNELS = ROOT / "kernels" / "tpkernels"
every_readme = pytest.mark.parametrize(
    "path", READMES, ids=lambda path: str((path.parent if path.name == "README.md" else path).relative_to(ROOT))
)


@every_readme
def test_a_readme_is_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= (180 if path == TOP else 150)
    # A table's row cannot be wrapped; at the top even they are short.
    long = [line for line in lines if len(line) > 120 and (path == TOP or not line.startswith("|"))]
    assert not long, long


@every_readme
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    headings = {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in text.splitlines()}
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("#"):
            assert link[1:] in headings, link
        elif not link.startswith("https://"):
            assert (path.parent / link).exists(), link


def names_in(path: Path) -> set[str]:
    """Every function, class and method of a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@every_readme
def test_files_and_functions_that_are_named_exist(path: Path) -> None:
    """`file.py`, `folder/` and `file.py: Class.method`, relative to the README, the checkout or a package."""
    text = " ".join(path.read_text().split())
    for name, functions in re.findall(r"`([\w./]+(?:\.py|/))(?:: ([\w., ]+))?`", text):
        found = [root / name for root in (path.parent, ROOT, ENGINE, KERNELS) if (root / name).exists()]
        assert found or name in ("checkpoints/",), name
        for function in filter(None, functions.split(", ")):
            assert function in names_in(found[0]), f"{name}: {function}"


def steps_of(title: str) -> list[str]:
    """The numbered steps of a way, each as one line."""
    text = (ENGINE / "README.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return [re.sub(r"\n +", " ", step) for step in re.findall(r"^\d+\. .*(?:\n +.*)*", text, re.MULTILINE)]


def sources_of(path: Path) -> dict[str, str]:
    """The source of every function, and of every method as Class.method, without layout."""
    text, found = path.read_text(), {}
    for node in ast.parse(text).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                name = f"{node.name}.{inner.name}" if isinstance(node, ast.ClassDef) else inner.name
                found[name] = "".join((ast.get_source_segment(text, inner) or "").split())
    return found


def test_the_way_of_a_micro_batch_has_thirteen_hops_and_each_is_in_the_sources() -> None:
    """A hop leaves a file. Each function of a step calls the next one; the last makes the call that stands there."""
    steps, files = steps_of("The way of a micro-batch"), set[str]()
    assert len(steps) - 1 == 13
    for number, step in enumerate(steps, 1):
        told = re.match(rf"{number}\. `([\w/]+\.py): ([\w., ]+)`: `([^`]+)`", step)
        assert told, step
        file, names, call = told[1], told[2].split(", "), told[3]
        files.add(file)
        (path,) = [root / file for root in (ENGINE, KERNELS) if (root / file).exists()]
        sources = sources_of(path)
        for name, following in itertools.pairwise(names):
            # A Function's forward is called by `apply`.
            called = following.removesuffix(".forward") if following.startswith("_") else following.split(".")[-1]
            assert called in sources[name], step
        assert "".join(call.split()) in sources[names[-1]], step
    # The tokens' file is one more.
    assert len(files) + 1 == 14


def test_the_way_of_a_gradient_is_ten_lines() -> None:
    steps = steps_of("The way of a gradient")
    assert len(steps) == 10
    for number, step in enumerate(steps, 1):
        assert re.match(rf"{number}\. .*`[\w/]+\.py: [\w.]+`", step), step


def test_every_room_and_every_file_is_named() -> None:
    """The top README names each room; a room's README, or its package's docstring, names each of its files."""
    top = TOP.read_text()
    rooms = [path.parent for path in ENGINE.glob("*/__init__.py")]
    for room in rooms:
        assert f"`{room.name}/`" in top, room
    rooms += [path.parent for path in KERNELS.glob("*/__init__.py")]
    for room in rooms:
        text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        if (room / "README.md").exists():
            text += (room / "README.md").read_text()
        if room.parent == KERNELS:
            text += CATALOGUE
        for entry in room.iterdir():
            if entry.name.startswith("__") or entry.suffix not in ("", ".py"):
                continue
            name = f"{entry.name}/" if entry.is_dir() else entry.name
            # A script of tpengine/examples is listed by its name as a module.
            assert name in text or f"- {entry.stem}:" in text, f"say in {room} what {name} is for"


@every_readme
def test_flags_exist(path: Path) -> None:
    sections = {field.name: getattr(Config(), field.name) for field in dataclasses.fields(Config)}
    for section, flag in re.findall(r"--(model|parallel|train|data|optim)\.([\w-]+)", path.read_text()):
        assert hasattr(sections[section], flag.replace("-", "_")), f"--{section}.{flag}"


def run_snippet(source: str, directory: str) -> None:
    """Run a snippet on this rank; what it writes lands in the directory."""
    text = re.sub(r'"(tokens\.bin|chat\.tokens)"', lambda name: repr(f"{directory}/{name[1]}"), source)
    exec(compile(text, "<README>", "exec"), {"__name__": "snippet"})


@every_readme
def test_snippets_run(ranks: RankPool, tmp_path: Path, path: Path) -> None:
    for num_ranks, source in snippets_in(path.read_text()):
        ranks.run(run_snippet, num_ranks, source, str(tmp_path))


def test_the_two_commands_stand_in_the_readme() -> None:
    commands = commands_in(TOP.read_text())
    assert "pip install -c .ci/constraints.txt -e . && tpengine train --nproc 4" in commands
    assert "pip install -c .ci/constraints.txt -e '.[test]' && pytest" in commands


def test_the_schedule_shown_is_the_schedule_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ENGINE / "plan" / "README.md").read_text()
    (command,) = re.findall(r"^    \$ tpengine (schedule .*)", text, re.MULTILINE)
    assert main(command.split()) == 0
    assert textwrap.indent(capsys.readouterr().out, "    ") in text


def test_the_picture_shown_is_the_picture_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"!\[[^]]*\]\((tpengine/.*\.svg)\)", TOP.read_text())
    drawn = tmp_path / "zbv.svg"
    for path in (TOP, ENGINE / "plan" / "README.md"):
        (command,) = [line for line in commands_in(path.read_text()) if line.endswith("--draw zbv.svg")]
        assert main([*command.split()[1:-1], str(drawn)]) == 0
        capsys.readouterr()
        assert drawn.read_text() == (ROOT / shown).read_text(), f"draw {shown} again, as {path} says"


def test_the_plan_of_a_run_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (TOP, ENGINE / "plan" / "README.md"):
        command = the_command(path, "tpengine schedule --model")
        assert command.endswith("--draw plan.svg")
        assert main([*command.split()[1:-1], str(tmp_path / "plan.svg")]) == 0
        assert "modelled, not measured: tp 2, pp 4, dp 1" in capsys.readouterr().out
        assert "modelled for h200" in (tmp_path / "plan.svg").read_text()


def test_the_schedule_of_a_users_own_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ENGINE / "plan" / "README.md"
    (lines,) = re.findall(r"^    # mine\.txt.*\n((?:    rank .*\n)+)", path.read_text(), re.MULTILINE)
    (tmp_path / "mine.txt").write_text(textwrap.dedent(lines))
    command = the_command(path, "tpengine schedule --schedule ./mine.txt")
    assert main(command.replace("./mine.txt", str(tmp_path / "mine.txt")).split()[1:]) == 0
    assert "its weight half" in capsys.readouterr().out


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]


# Line of the table -> its row in the file it names, and the fields behind its figures, in order, with their factor.
_STEP = {"tpengine_median_seconds": 1, "tpengine_speedup_over_torch_median_ratio": 1, "torch_median_seconds": 1}
_FUSED = {
    "fused_median_seconds": 1e3,
    "fused_over_matmul_median_ratio": 1,
    "serial_median_seconds": 1e3,
    "serial_over_matmul_median_ratio": 1,
}
_BENCH, _TINY, _TORCH = {"tokens_per_step": 8192}, {"tokens_per_step": 4096}, {"against": "torch"}
RESULTS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "training step, tp 2, 26 M parameters": ({"layout": "tp2", **_BENCH, **_TORCH}, _STEP),
    "the same, tp 2 x pp 2": ({"layout": "tp2pp2", **_BENCH, **_TORCH}, _STEP),
    "the same, pp 2": ({"layout": "pp2", **_TORCH}, _STEP),
    "the same, dp 2": ({"layout": "dp2", **_TORCH}, _STEP),
    "training step, tp 2, 0.9 M parameters": ({"layout": "tp2", **_TINY, **_TORCH}, _STEP),
    "the same, tp 2, exact mode": (
        {"dtype": "float32"},
        {
            "exact_median_seconds": 1,
            "tpengine_speedup_over_exact_median_ratio": 1,
            "tpengine_median_seconds": 1,
        },
    ),
    "gather and matmul, fused": ({"case": "overlap/all_gather_matmul/forward"}, _FUSED),
    "matmul and reduce-scatter, fused": ({"case": "overlap/matmul_reduce_scatter/forward"}, _FUSED),
    "zbv, forward and backward": (
        {"case": "pipeline/zbv", "cpu": "AMD EPYC (family 25, model 17)"},
        {"engine_median_seconds": 1, "engine_speedup_over_torch_median_ratio": 1, "torch_median_seconds": 1},
    ),
    "zbv, memory of all ranks": (
        {"case": "pipeline/zbv", "cpu": "AMD EPYC (family 25, model 17)"},
        {"engine_memory_sum_bytes": 1e-9, "torch_memory_sum_bytes": 1e-9},
    ),
    "reduce-scatter of 2 MB between processes": (
        {"case": "exchange/reduce_scatter/2097152"},
        {"memory_median_seconds": 1e3, "memory_speedup_over_gloo_median_ratio": 1, "gloo_median_seconds": 1e3},
    ),
    "the first command, start to sample": (
        {"tp_comm": "fused"},
        {"wall_seconds": 1, "tokens_per_second_median": 1},
    ),
}


def test_the_results_are_those_of_their_rows() -> None:
    table = TOP.read_text().split("## Results")[1].split("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    assert lines[0] == ["what", "ours", "the rival", "machine", "file"]
    assert {line[0] for line in lines[1:]} == RESULTS.keys() and len(lines) <= 13
    for what, ours, rival, _, file in lines[1:]:
        chosen, fields = RESULTS[what]
        (row,) = [row for row in rows_of(file) if chosen.items() <= row.items()]
        assert row["cpu"].startswith("AMD EPYC") and row["cores"] == 2
        figures = [figure.replace(",", "") for figure in re.findall(r"\d[\d,]*(?:\.\d+)?", f"{ours} {rival}")]
        digits = [len(figure.partition(".")[2]) for figure in figures]
        exact = [factor * row[name] for name, factor in fields.items()]
        assert figures == [f"{value:.{n}f}" for value, n in zip(exact, digits, strict=True)], what


def test_the_figures_of_the_catalogue_are_those_of_their_rows() -> None:
    operators, exchanges = (
        {row["case"]: row for row in rows_of(f"{name}.jsonl")} for name in ("kernels_cpu", "overlap")
    )
    shown = re.findall(r"(\d\.\d\d): `(\w+)/(\w+)`", CATALOGUE)
    for figure, op, direction in shown:
        row = operators[f"kernels/{op}/llama3_8b/seq_512/{direction}"]
        assert figure == f"{row['speedup_over_best_rival_median_ratio']:.2f}", (op, direction)
    fused = re.findall(r"(\d\.\d\d) times the matmul's time, apart (\d\.\d\d): `(overlap/\w+/\w+)`", CATALOGUE)
    for hidden, apart, case in fused:
        row = exchanges[case]
        assert hidden == f"{row['fused_over_matmul_median_ratio']:.2f}", case
        assert apart == f"{row['serial_over_matmul_median_ratio']:.2f}", case
    assert len(shown) > 10 and len(fused) == 2
    operator_rows = re.findall(r"^\| `.*", CATALOGUE.split("## Tools")[0], re.MULTILINE)
    assert len(operator_rows) > 15
    for line in operator_rows:
        assert re.search(r"(?:: `[\w/]+`|not measured yet) \|$", line), f"neither a row nor none: {line}"


def test_the_pictures_and_the_files_of_the_catalogue_exist() -> None:
    for path in READMES:
        for name in re.findall(r"!\[[^]]*\]\((\S+)\)", path.read_text()):
            assert ElementTree.parse(path.parent / name).getroot().tag.endswith("svg")
    named = set(re.findall(r"(?<![\w./])\w[\w/]*\.py", CATALOGUE))
    assert {f"fused/{path.name}" for path in (KERNELS / "fused").glob("[a-z]*.py")} <= named
    for name in named:
        assert any((root / name).exists() for root in (KERNELS, ENGINE / "examples", ROOT)), name


def test_the_catalogue_names_every_public_operator() -> None:
    import tpkernels

    # Twice: a submodule of the same name would take the operator's place once it is imported.
    for _ in range(2):
        for name in dir(tpkernels):
            assert callable(getattr(tpkernels, name)), name
    missing = [name for name in dir(tpkernels) if name[0].islower() and f"`{name}`" not in CATALOGUE]
    assert not missing, missing
