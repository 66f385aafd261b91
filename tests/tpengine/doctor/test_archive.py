"""Rung: pure. What is sent back of a run: the files of a list, without data, weights, paths, names and secrets."""

from __future__ import annotations

import io
import json
import socket
import tarfile
import tomllib
from pathlib import Path

import pytest

from tpengine.cli import main
from tpengine.config.presets import preset_config
from tpengine.config.toml import dump_toml
from tpengine.doctor.archive import cleaner, write_archive

TOKEN = "hf_abcdefghijklmnop"
SECRETS = (
    "alice",
    "/home",
    "/scratch",
    TOKEN,
    "node17",
    "corp.example",
    "private words",
    "rm -rf",
    socket.gethostname(),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's directory that has everything, and secrets in all of it."""
    run = tmp_path / "run"
    (run / "checkpoints" / "10").mkdir(parents=True)
    (run / "last_words").mkdir()
    config = dump_toml(preset_config("tiny")).replace('after_checkpoint = ""', f'after_checkpoint = "rm -rf {TOKEN}"')
    assert TOKEN in config
    (run / "config.toml").write_text(config.replace('run_dir = ""', 'run_dir = "/scratch/alice/runs/x"'))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (run / "samples.jsonl").write_text('{"text": "private words"}\n')
    words = {"rank": 3, "reason": f"no /home/alice/data/corpus.bin on node17: https://corp.example/x?k={TOKEN}"}
    (run / "last_words" / "3.json").write_text(json.dumps(words))
    (run / "trace.json").write_text('{"host": "node17"}')
    (run / "tokens.bin").write_text("private words")
    (run / "checkpoints" / "10" / "weights").write_text("private words")
    (tmp_path / "m.toml").write_text('name = "node17"\n')
    (tmp_path / "m.json").write_text(json.dumps({"facts": [{"name": "node17"}], "findings": []}))
    return run


def members_of(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None and (entry.uname, entry.uid, entry.mtime) == ("", 0, 0)
            found[entry.name] = io.TextIOWrapper(file).read()
        return found


def test_what_is_in_the_list_goes_and_nothing_that_is_private(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "alice")
    out = tmp_path / "report.tar.gz"
    environ = {"NCCL_DEBUG": "INFO", "NCCL_TOPO_FILE": "/home/alice/topo.xml", "HF_TOKEN": TOKEN}
    lines = write_archive(out, run_dir, tmp_path / "m.toml", environ)
    found = members_of(out)
    assert set(found) == {
        *("run/config.toml", "run/metrics.jsonl", "run/last_words/3.json", "run/trace.json"),
        *("machine.toml", "machine.json", "environment.json"),
    }
    everything = "\n".join(found.values())
    assert [secret for secret in SECRETS if secret in everything] == []
    assert found["run/metrics.jsonl"] == '{"step": 1, "loss": 2.5}\n'
    assert json.loads(found["run/last_words/3.json"])["reason"] == "no PATH/corpus.bin on HOST1: URL"
    assert json.loads(found["environment.json"]) == {"NCCL_DEBUG": "INFO", "NCCL_TOPO_FILE": "PATH/topo.xml"}
    settings = tomllib.loads(found["run/config.toml"])
    assert settings["train"]["after_checkpoint"] == "left out" and settings["run_dir"] == "PATH/x"
    # Of all other settings those of the run.
    assert settings["model"] == tomllib.loads((run_dir / "config.toml").read_text())["model"]
    packed = {line.split()[1] for line in lines if line.startswith("packed")}
    assert packed == set(found) and "left out run/profile.json: the run has none" in lines


def test_the_same_run_is_the_same_file(run_dir: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "1.tar.gz", tmp_path / "2.tar.gz"
    for out in (one, two):
        write_archive(out, run_dir, None, {})
    assert one.read_bytes() == two.read_bytes()


def test_numbers_and_words_stay_as_they_are() -> None:
    clear = cleaner({"node17": "HOST0"}, "alice")
    text = '{"tokens/s": 1.5, "name": "w[0RECV_B0]", "b/a": "1/2", "time": 1.7e9}\nf32 [8, 4]: a / b'
    assert clear(text) == text
    assert clear("~/.cache/x and file:///a/b/c") == "PATH/x and URL"
    assert clear("10.0.0.12, a.b@c.org, 12345678-1234-1234-1234-123456789abc") == "ADDRESS, ADDRESS, ADDRESS"
    assert clear('"nccl": "2.27.3", "driver": "570.124.06"') == '"nccl": "2.27.3", "driver": "570.124.06"'
    # Names of two letters are words of their own, or none.
    short = cleaner({"n6": "HOST0", "77": "HOST1"}, "jo")
    assert short('{"name": "n6"} on n6 (ranks), run6, n60, 77, jo, join') == (
        '{"name": "HOST0"} on HOST0 (ranks), run6, n60, 77, USER, join'
    )
    # A short or common name would clear words that are none.
    assert cleaner({"n": "HOST0"}, "root")("root n") == "root n"


MISTAKES = {
    "a run's directory": ["--pack", "NOTHING"],
    "must end in .tar.gz": ["--pack", "RUN", "--out", "x.zip"],
    "must be a new file": ["--pack", "RUN", "--out", "old.tar.gz"],
    "that tpengine doctor wrote": ["--pack", "RUN", "--machine", "none.toml"],
}


@pytest.mark.parametrize("rule", MISTAKES)
def test_a_mistake_is_one_line(
    rule: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.tar.gz").touch()
    given = [str(run_dir) if word == "RUN" else word for word in MISTAKES[rule]]
    assert main(["doctor", *given]) == 2
    said = capsys.readouterr().err
    assert rule in said and said.count("\n") == 1
    assert (tmp_path / "old.tar.gz").read_bytes() == b"" and not (tmp_path / "report.tar.gz").exists()


def test_a_symbolic_link_does_not_go(run_dir: Path, tmp_path: Path) -> None:
    """What it leads to may be anything."""
    (tmp_path / "secret").write_text("private words")
    (run_dir / "profile.json").symlink_to(tmp_path / "secret")
    lines = write_archive(tmp_path / "x.tar.gz", run_dir, None, {})
    assert "left out run/profile.json: it is no file" in lines
    assert "run/profile.json" not in members_of(tmp_path / "x.tar.gz")
