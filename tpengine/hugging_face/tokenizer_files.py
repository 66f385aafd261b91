"""The files that go with weights, copied as they came, and what a run keeps of the directory it began from. No torch.

Tokenizer, chat template and settings of generation are copied. One thing is changed: transformers 5 may write
TokenizersBackend as the tokenizer's class, a name that version 4 refuses to load. PreTrainedTokenizerFast is the same
class under the name that both know.

A run keeps in its directory what it needs to give its source back in the same form: config.json, these files, and the
names and dtypes of the tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tpengine.files import written_beside
from tpengine.hugging_face.directory import CONFIG, ModelDirectory
from tpengine.tokenizer import TOKENIZER, TextTokenizer

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Chat templates besides the first.
_TEMPLATES = "additional_chat_templates"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_CLASS_OF_5, _CLASS_OF_BOTH = "TokenizersBackend", "PreTrainedTokenizerFast"
TENSORS = "source_tensors.json"


def copy_companions(source: Path, directory: Path) -> tuple[str, ...]:
    """Copy what goes with a model's weights.

    Args:
        source: a model's directory.
        directory: where to.

    Returns:
        The names of the files that were there.

    Raises:
        ValueError: tokenizer_config.json is not a JSON object.
        OSError: a file cannot be read or written.
    """
    names = [name for name in COMPANIONS if (source / name).is_file()]
    names += sorted(f"{_TEMPLATES}/{path.name}" for path in (source / _TEMPLATES).glob("*.jinja"))
    for name in names:
        target = directory / name
        target.parent.mkdir(exist_ok=True)
        if name == _TOKENIZER_CONFIG:
            target.write_bytes(_known_to_both(source / name))
        else:
            shutil.copyfile(source / name, target)
    return tuple(names)


def _known_to_both(path: Path) -> bytes:
    """Return the file's bytes, altered only if version 4 could not load the class that it names."""
    content = path.read_bytes()
    try:
        values = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} must be valid JSON: {path}: {str(error)[:120]!r}: copy it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must be an object: {path}: got {type(values).__name__}: copy it again")
    if values.get("tokenizer_class") != _CLASS_OF_5:
        return content
    values["tokenizer_class"] = _CLASS_OF_BOTH
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


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
