"""Reading a TOML file that a user names: its values, or one line that says what is wrong. No torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_toml(path: str | Path, option: str) -> dict[str, Any]:
    """Return the values of a TOML file.

    Args: path: of the file. option: which names it, for messages.

    Raises:
        ValueError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{option} needs a TOML file in UTF-8: {path}: some bytes are not: check the path") from None
    except OSError as error:
        raise ValueError(f"{option} needs a readable file: {path}: {error.strerror}: check the path") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{option} needs valid TOML: {path}: {error}: correct the file") from None
    except (ValueError, RecursionError) as error:
        # A path with a zero byte; an integer of thousands of digits; brackets within thousands of brackets.
        raise ValueError(f"{option} needs a TOML file of a run: {str(path)!r}: {error}: correct it") from None
