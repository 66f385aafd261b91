"""One archive of a run to send back: what its ranks reported, without data, weights, names, paths, secrets. No torch.

Files are named here, one by one: what is not in the list does not go. Of each, texts are cleared of what identifies a
person or a place: paths keep their last part, the names of user and hosts become words, and what looks like a token is
cut out. The list that is printed says what went, and what did not.

The decision a reader will question: samples, token files and checkpoints never go, not even with an option. What a
model says may be what it was trained on.
"""

from __future__ import annotations

import getpass
import gzip
import io
import json
import re
import socket
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tpengine.doctor.facts import known_environment
from tpengine.files import written_beside

# Of a run's directory, with what writes each.
_NAMES = (
    *("config.toml", "metrics.jsonl", "skipped.jsonl", "rollbacks.jsonl", "profile.json", "trace.json"),
    *("last_words/*.json", "metrics.[0-9]*.jsonl"),
)
# A recording of very many ranks: a mail is not for more.
_MOST_BYTES = 64 << 20
# Settings that hold a command, or a name, of the user's.
_PRIVATE = frozenset({"after_checkpoint", "wandb"})
_LEFT_OUT = "left out"
_PATH = re.compile(r"(?<![\w.:/])(?:~|file://)?/(?:[^\s/\"'\\,;:)\]}]+/)+")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'\\]+")
# Addresses of hosts and people, and the numbers by which hardware is known.
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
)
_SECRET = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[a-z]-|AKIA|eyJ)[\w.-]{8,}|\b[0-9a-f]{40}\b")
# A name of one letter, or a number, would clear words that are none.
_LEAST_NAME = 2


def write_archive(out: Path, run_dir: Path, machine: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Write the archive of a run; return a line for each file that went, and for each that did not.

    Args:
        out: the archive, a new .tar.gz.
        run_dir: of the run.
        machine: the file that `tpengine doctor` wrote; its table, of the same name and .json, goes too.
        environ: whose known names go.

    Raises:
        ValueError: no run's directory, another suffix, an archive that is there already, no machine's file.
        OSError: it cannot be written; then nothing is left.
    """
    _check(out, run_dir, machine)
    clear = cleaner(_names_of_hosts(machine), getpass.getuser())
    lines = []
    # No time and no owner: the same content is the same file.
    with (
        written_beside(out) as beside,
        beside.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name, content in _members(run_dir, machine, environ):
            if isinstance(content, str):
                lines.append(f"left out {name}: {content}")
                continue
            cleared = clear(content.decode("utf-8", "replace")).encode()
            _add(archive, name, cleared)
            lines.append(f"packed   {name} {len(cleared)} bytes")
    return lines


def cleaner(hosts: Mapping[str, str], user: str) -> Callable[[str], str]:
    """Return a function that clears a text of paths, addresses, tokens, and names of hosts and of the user.

    Args:
        hosts: what to write for each host's name.
        user: the user's name.
    """
    words = {**hosts, user: "USER"}
    names = [name for name in words if len(name) >= _LEAST_NAME and not name.isdigit() and name != "root"]
    patterns = [_pattern(name) for name in sorted(names, key=len, reverse=True)]
    known = re.compile("|".join(patterns) or r"(?!)")

    def clear(text: str) -> str:
        text = _URL.sub("URL", text)
        text = _PATH.sub("PATH/", text)
        text = _SECRET.sub("SECRET", text)
        text = _ADDRESS.sub("ADDRESS", text)
        return known.sub(lambda found: words[found[0]], text)

    return clear


def _pattern(name: str) -> str:
    """Return what finds a name: a short one, such as n6, only as a word of its own."""
    escaped = re.escape(name)
    return escaped if len(name) > _LEAST_NAME else rf"(?<![\w-]){escaped}(?![\w-])"


def cleared_config(text: str) -> dict[str, Any]:
    """Return the settings of a run without those that hold a command or a name of the user's.

    Raises:
        ValueError: it is no TOML.
    """
    return _without(tomllib.loads(text))


def _without(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {
            key: _LEFT_OUT if key in _PRIVATE and isinstance(of, str) and of else _without(of)
            for key, of in values.items()
        }
    if isinstance(values, list):
        return [_without(of) for of in values]
    return values


def _check(out: Path, run_dir: Path, machine: Path | None) -> None:
    if not (run_dir / "config.toml").is_file():
        raise ValueError(f"--pack must be a run's directory: {run_dir} has no config.toml: name the one of --run-dir")
    if not out.name.endswith(".tar.gz"):
        raise ValueError(f"--out of an archive must end in .tar.gz: got {out}: use report.tar.gz")
    if out.exists():
        raise ValueError(f"--out must be a new file: {out} is there: move it away, or use another name")
    if machine is not None and not machine.is_file():
        raise ValueError(f"--machine must be a file that tpengine doctor wrote: {machine} is not there: run it first")


def _members(run_dir: Path, machine: Path | None, environ: Mapping[str, str]) -> Iterator[tuple[str, bytes | str]]:
    """Yield (name, content) of what goes, and (name, why not) of what does not."""
    found = sorted({path for name in _NAMES for path in run_dir.glob(name)})
    for path in found:
        name = f"run/{path.relative_to(run_dir).as_posix()}"
        yield name, _content(path, _settings if path.name == "config.toml" else None)
    missing = [name for name in _NAMES if "*" not in name and not (run_dir / name).exists()]
    for name in missing:
        yield f"run/{name}", "the run has none"
    if machine is not None:
        table = machine.with_suffix(".json")
        yield "machine.toml", _content(machine)
        yield "machine.json", _content(table) if table.is_file() else "it is not beside the machine's file"
    yield "environment.json", json.dumps(known_environment(environ), indent=1).encode()


def _content(path: Path, of: Callable[[bytes], bytes] | None = None) -> bytes | str:
    if path.is_symlink() or not path.is_file():
        return "it is no file"
    if path.stat().st_size > _MOST_BYTES:
        return f"it has more than {_MOST_BYTES >> 20} MiB"
    content = path.read_bytes()
    try:
        return content if of is None else of(content)
    except ValueError:
        return "it cannot be read"


def _settings(content: bytes) -> bytes:
    import tomli_w

    return tomli_w.dumps(cleared_config(content.decode())).encode()


def _names_of_hosts(machine: Path | None) -> dict[str, str]:
    """Return a word for the name of each host that the table knows, and for this one."""
    names = [socket.gethostname()]
    if machine is not None and (table := machine.with_suffix(".json")).is_file():
        try:
            facts = json.loads(table.read_text())["facts"]
            names += [str(of["name"]) for of in facts]
        except (ValueError, KeyError, TypeError):
            pass
    every = dict.fromkeys(part for name in names for part in (name, name.partition(".")[0]))
    return {name: f"HOST{number}" for number, name in enumerate(every)}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
