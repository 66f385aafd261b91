"""The files that go with weights: tokenizer, chat template, settings of generation; copied as they came. No torch.

One thing is changed: transformers 5 may write TokenizersBackend as the tokenizer's class, a name that version 4 refuses
to load. PreTrainedTokenizerFast is the same class under the name that both know.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
