"""Rung: pure. Whatever a foreign file holds, no character that controls a terminal leaves a command.

Each reader of foreign files gets texts with every such character, and its command is run as a user does. That the text
is shown, escaped, proves that it came to the exit.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.live import Live
from rich.table import Table
from support import ROOT

from tpengine.checkpoint.index import Index, write_index
from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.cli import main
from tpengine.config import Config
from tpengine.config.toml import dump_toml
from tpengine.last_words import say
from tpengine.observe.safe_console import SafeConsole
from tpengine.terminal import escaped, raw, terminal_safe, write_text
from tpengine.train import main as train_main

CONTROLS = [chr(i) for i in (*range(32), 127, *range(128, 160), 0x61C, 0x200E, 0x200F)]
CONTROLS += [chr(i) for i in (*range(0x2028, 0x202F), *range(0x2066, 0x206A))]
CONTROLS = [c for c in CONTROLS if c not in "\n\t"]
# Retitles the window, clears the screen, turns the text round; then all there are.
EVIL = "mark\x1b]0;owned\x07\x1b[2J\x9b31m\u202ekram" + "".join(CONTROLS)
SURROGATE = "\udc9b"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "vocab_size": 100,
}
MACHINE = f"format = 1\n{json.dumps(EVIL)} = 1"
# A part of EVIL, as it is shown: a message may cut what is long.
# The last is that of a value of config.json, which is cut to a length.
SHOWN = (r"mark\x1b]0;owned", r"mark\\x1b]0;owned", r"mark\u001b]0;owned", r"mark\\u001b]0;owned", r"mark\x1b]0;o...")


def model(path: Path, header: dict[str, Any] | None = None, **entries: Any) -> list[str]:
    """A model's directory that is imported."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**LLAMA, **entries}))
    content = json.dumps({} if header is None else header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + bytes(8))
    return ["import", str(path), "--out", str(path.parent / "out")]


def tensor(**entries: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entries}


def model_of_several_files(path: Path) -> list[str]:
    argv = model(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": EVIL}}))
    (path / "model.safetensors").unlink()
    return argv


def tokenizer(path: Path) -> list[str]:
    argv = model(path)
    (path / "tokenizer.json").write_text(json.dumps({"version": EVIL}))
    (path / "text.txt").write_text("a text")
    return [
        "data", "--from", str(path / "text.txt"), "--out", str(path / "out.tokens"), "--tokenizer", argv[1]
    ]  # fmt: skip


def datatrove(path: Path) -> list[str]:
    path.mkdir()
    (path / "a.ds").write_bytes(bytes(4))
    (path / "a.ds.index").write_bytes(struct.pack("<Q", 2))
    (path / "a.ds.metadata").write_text(f"{EVIL.replace('|', '')}|7\n2", newline="")
    return ["data", "--check", str(path / "a.ds")]


def a_run(path: Path, text: str | None = None) -> Path:
    path.mkdir()
    (path / "config.toml").write_text(dump_toml(Config()) if text is None else text, errors="surrogateescape")
    return path


def watched(path: Path) -> list[str]:
    run = a_run(path)
    rows = [{"step": 0, "loss": 3.0}, {"step": 0, "event": f"mark[/red]{EVIL}"}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["watch", str(run), "--once"]


def checkpoint(path: Path, verb: str, **state: Any) -> list[str]:
    run = a_run(path)
    directory = checkpoints_of(run).of_step(4)
    directory.mkdir(parents=True)
    write_index(directory, Index(4, {}, {}, state_of(Config(), "", 4) | state))
    if verb == "verify":
        index = json.loads((directory / "index.json").read_text())
        (directory / "index.json").write_text(json.dumps(index | {"index": index["index"] | {"step": EVIL}}))
    return ["checkpoint", verb, str(run)]


def last_words(path: Path) -> list[str]:
    (a_run(path) / "last_words").mkdir()
    words = {"rank": 0, "reason": EVIL, "step": 1, "doing": EVIL, "seconds": 1.0, "waits": {EVIL: [1]}, "gone": []}
    (path / "last_words" / "0.json").write_text(json.dumps({**words, "time": 1.0}))
    return ["diagnose", str(path)]


def profile(path: Path, verb: str) -> list[str]:
    run = a_run(path)
    (run / "metrics.jsonl").touch()
    (run / "profile.json").write_text(json.dumps({"format": "tpengine profile", "version": EVIL}))
    argv = {"diagnose": ["diagnose", str(run)], "schedule": ["schedule", "--profile", str(run / "profile.json")]}
    return argv[verb]


def written(path: Path, text: str, *argv: str) -> list[str]:
    path.write_text(text, errors="surrogateescape", newline="")
    return [word.replace("FILE", str(path)) for word in argv]


CASES: dict[str, Callable[[Path], list[str]]] = {
    "safetensors: a name": lambda path: model(path / "m", {EVIL: tensor(shape=["x"])}),
    "safetensors: a dtype": lambda path: model(path / "m", {"a": tensor(dtype=EVIL)}),
    "safetensors: a name of none": lambda path: model(path / "m", {EVIL: tensor()}),
    "config.json: an architecture": lambda path: model(path / "m", architectures=[EVIL]),
    "config.json: an activation": lambda path: model(path / "m", hidden_act=EVIL),
    "config.json: a size": lambda path: model(path / "m", hidden_size=EVIL),
    "config.json: a quantization": lambda path: model(path / "m", quantization_config={EVIL: EVIL}),
    "config.json: a rope": lambda path: model(path / "m", rope_scaling={"rope_type": EVIL, "factor": 2.0}),
    "index.json: a file": lambda path: model_of_several_files(path / "m"),
    "tokenizer.json": lambda path: tokenizer(path / "m"),
    "datatrove's metadata": lambda path: datatrove(path / "d"),
    "a token file": lambda path: written(path / "t", EVIL + "x" * 99, "data", "--check", "FILE"),
    "TOML: a key": lambda path: written(path / "c.toml", f"{json.dumps(EVIL)} = 1", "schedule", "--model", "FILE"),
    "TOML: a value": lambda path: written(
        path / "c.toml", f"[train]\nsteps = {json.dumps(EVIL)}", "schedule", "--model", "FILE"
    ),
    "TOML: a schedule": lambda path: written(
        path / "c.toml", f"[parallel]\nschedule = {json.dumps(EVIL)}", "schedule", "--model", "FILE"
    ),
    "phases": lambda path: written(
        path / "p.toml", f"[[phase]]\n{json.dumps(EVIL)} = 1", "schedule", "--model", "tiny", "--phases", "FILE"
    ),
    "a schedule": lambda path: written(path / "s.txt", f"rank 0: {EVIL}\n", "schedule", "--schedule", "FILE"),
    "a machine": lambda path: written(path / "m.toml", MACHINE, "schedule", "--model", "tiny", "--machine", "FILE"),
    "metrics.jsonl": lambda path: watched(path / "run"),
    "a run's name": lambda path: [*watched(path / f"mark\x1b]0;owned{SURROGATE}"), "--svg", str(path / "a.svg")][:3],
    "a checkpoint's index": lambda path: checkpoint(path / "run", "verify"),
    "a checkpoint's layout": lambda path: checkpoint(path / "run", "ls", config={"parallel": {"tp": EVIL}}),
    "a checkpoint's held-out loss": lambda path: checkpoint(path / "run", "ls", held_out_loss=EVIL),
    "last words": lambda path: last_words(path / "run"),
    "a profile, diagnosed": lambda path: profile(path / "run", "diagnose"),
    "a profile, drawn": lambda path: profile(path / "run", "schedule"),
    "a path": lambda path: ["generate", str(path / f"mark\x1b]0;owned\n{SURROGATE}")],
    "a path with a run": lambda path: ["diagnose", str(a_run(path / f"mark\x1b]0;owned\r{SURROGATE}"))],
    "an argument": lambda path: ["generate", str(path), EVIL],
    "an option": lambda path: ["schedule", f"--{EVIL.replace(chr(0), '')}"],
}
# What these print has no foreign text: the file is refused, or a number is expected.
SILENT = {"a checkpoint's layout", "a checkpoint's held-out loss", "a checkpoint's index", "a token file"}


def assert_harmless(*texts: str) -> None:
    for text in texts:
        found = sorted({hex(ord(c)) for c in text if c in CONTROLS or 0xD800 <= ord(c) < 0xE000})
        assert found == [], (found, text)


@pytest.mark.parametrize("name", CASES)
def test_no_foreign_text_controls_the_terminal(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(CASES[name](tmp_path))
    out, err = capsys.readouterr()
    assert_harmless(out, err)
    assert code in (0, 1, 2) and (code == 0 or err.count("\n") <= 1), (code, err)
    if name not in SILENT:
        joined = re.sub(r"\s|│", "", out + err)  # a table breaks what is long
        assert any(shown in joined for shown in SHOWN), (out, err)


@pytest.mark.parametrize(
    "argv",
    [
        ["--run-dir", f"/proc/mark\x1b]0;owned{SURROGATE}"],
        [f"--{EVIL}"],
        ["--config", f"mark\x1b]0;owned{SURROGATE}"],
        ["--data.mixture", "FILE"],
    ],
)
def test_training_says_no_foreign_text(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mixture.toml").write_text(f"[{json.dumps(EVIL)}]\npath = 'x'")
    argv = [word.replace("FILE", str(tmp_path / "mixture.toml")) for word in argv]
    with pytest.raises(SystemExit) as end:
        train_main([*argv, "--device", "cpu"])
    out, err = capsys.readouterr()
    assert_harmless(out, err)
    assert end.value.code == 2 and any(shown in err for shown in SHOWN), err


def test_torchrun_gets_a_harmless_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL, {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    said = json.loads((tmp_path / "error.json").read_text())["message"]
    assert_harmless(said["message"], said["extraInfo"]["py_callstack"], capsys.readouterr().err)


def test_what_is_no_control_stays() -> None:
    text = "Ünïcode, emoji \N{GRINNING FACE}, \t tab\nnewline \\x1b"
    assert escaped(text) == text
    assert escaped("\r\x1b\x9b\u202e\ud800") == r"\r\x1b\x9b\u202e\ud800"
    assert_harmless(escaped(EVIL))
    assert escaped(escaped(EVIL)) == escaped(EVIL)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "wanted"), [(Terminal, "a\\x1b[2J\n"), (io.StringIO, "a\x1b[2J\n")])
def test_generated_text_is_shown_to_a_terminal_and_as_it_is_to_a_file(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], wanted: str
) -> None:
    monkeypatch.setattr(sys, "stdout", stream())
    with terminal_safe():
        write_text("a\x1b[2J\n")
        below = raw(sys.stdout)
    assert isinstance(below, io.StringIO) and below.getvalue() == wanted


def test_streams_are_as_before_and_what_an_encoding_lacks_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    below = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", below)
    with terminal_safe(), terminal_safe():
        print("ü\x1b", SURROGATE, flush=True)
    assert sys.stdout is below
    assert below.buffer.getvalue() == b"\\xfc\\x1b \\udc9b\n"  # type: ignore[attr-defined]


def test_a_console_has_its_own_sequences_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    below = Terminal()
    monkeypatch.setattr(sys, "stdout", below)
    with terminal_safe():
        console = SafeConsole(force_terminal=True, color_system="standard", width=200, legacy_windows=False)
        table = Table(title=EVIL)
        table.add_column(EVIL)
        table.add_row(f"[/red]{EVIL}", style="red")
        with Live(table, console=console, auto_refresh=False) as live:
            console.print(EVIL)
            live.update(table, refresh=True)
    text = below.getvalue()
    # rich itself drops bells and returns.
    assert "\x1b[31m" in text and "mark\\x1b]0;owned" in text and "[/red]mark" in text
    assert_harmless(re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", text))
    assert not re.search("\x1b\\][^\n]*owned|\x1b\\[2J(?!\n)owned|\x9b|\u202e", text)


# Who writes past the streams: constants, and what a worker sends to its parent.
PAST = {("tpengine/last_words.py", "os.write"), ("tpengine/observe/watch.py", "os.write")}
PAST |= {("tpengine/observe/watch.py", "raw"), ("tpengine/commands/weights.py", "raw")}
PAST |= {("tpengine/terminal.py", "raw"), ("tpengine/observe/safe_console.py", "raw")}
PAST |= {("tpengine/data/workers.py", "sys.stdout.buffer"), ("tpengine/observe/safe_console.py", "Console")}


def exits(tree: ast.Module) -> Iterator[str]:
    """What of a source writes past the streams."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.write", "raw", "Console", "console.Console"):
            yield ast.unparse(node.func)
        if isinstance(node, ast.ClassDef):
            yield from (base for base in map(ast.unparse, node.bases) if base == "Console")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            *("sys.stdout.buffer", "sys.stderr.buffer", "sys.__stdout__", "sys.__stderr__"),
        ):
            yield ast.unparse(node)


@pytest.mark.slow
def test_nobody_else_writes_past_the_streams() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / "tpengine").rglob("*.py")
        for name in exits(ast.parse(path.read_text()))
    }
    assert found == PAST


def test_a_file_name_that_is_not_utf8_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(os.fsdecode(bytes(tmp_path) + b"/\xff\x1b[2J"))
    assert main(["checkpoint", "ls", str(directory)]) == 2
    assert r"\udcff\x1b[2J has no config.toml" in capsys.readouterr().err
