"""What a run keeps of the directory it began from, so that it can be given back in the same form. No torch.

In the run's directory: config.json, the files that go with weights (companions.py), and the names and dtypes of the
tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tpengine.data.tokenizer import TOKENIZER, TextTokenizer
from tpengine.files import written_beside
from tpengine.hugging_face.companions import copy_companions
from tpengine.hugging_face.directory import CONFIG, ModelDirectory

TENSORS = "source_tensors.json"


def keep_source(directory: ModelDirectory, run_dir: Path) -> None:
    """Copy what the directory has besides its weights into a run's directory."""
    copy_companions(directory.path, run_dir)
    shutil.copyfile(directory.path / CONFIG, run_dir / CONFIG)
    dtypes = {name: tensor.dtype for name, tensor in sorted(directory.tensors.items())}
    with written_beside(run_dir / TENSORS) as beside:
        beside.write_text(json.dumps(dtypes, indent=0) + "\n", encoding="utf-8")


def hand_on(run: Path, run_dir: Path) -> None:
    """Copy what a run has kept into the directory of a run that begins from it, which may be the same."""
    if run.resolve() == run_dir.resolve():
        return
    copy_companions(run, run_dir)
    for name in (CONFIG, TENSORS):
        if (run / name).is_file():
            shutil.copyfile(run / name, run_dir / name)


def kept_dtypes(run_dir: Path) -> Mapping[str, str] | None:
    """Return the dtypes of the tensors of the directory that a run began from; None if it began from none.

    Raises:
        ValueError: the file was altered.
    """
    path = run_dir / TENSORS
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict) or not all(isinstance(dtype, str) for dtype in values.values()):
        raise ValueError(f"{TENSORS} must hold names and dtypes: {path} was altered: remove it, and use --dtype")
    return values


def kept_tokenizer(run_dir: Path) -> TextTokenizer | None:
    """Return the tokenizer that went with the weights which a run began from; None if none did.

    Raises:
        ValueError: it cannot be opened, for one because the library is not installed.
    """
    return TextTokenizer(run_dir) if (run_dir / TOKENIZER).is_file() else None
