"""Write a picture to a file: the name's ending decides the format; the file appears whole, by a rename."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tpengine import files
from tpengine.simulate.draw.html import draw_html
from tpengine.simulate.draw.picture import Picture
from tpengine.simulate.draw.png import check_png, render_png
from tpengine.simulate.draw.svg import draw_svg

_FORMS: Mapping[str, Callable[[Sequence[Picture]], bytes]] = MappingProxyType(
    {
        ".svg": lambda pictures: draw_svg(pictures).encode(),
        ".html": lambda pictures: draw_html(pictures).encode(),
        ".png": lambda pictures: render_png(draw_svg(pictures)),
    }
)


def check_picture_file(path: Path) -> None:
    """Refuse, before any work, what `draw_to_file` would refuse after it.

    Raises: ValueError: another ending, a directory that does not exist, or no renderer for a .png.
    """
    _check_form(path)
    check_file(path)
    if path.suffix == ".png":
        check_png()


def check_file(path: Path) -> None:
    """Refuse, before any work, what `write_beside` would refuse after it.

    Raises: ValueError: the file cannot be written; one line with path and reason.
    """
    check_place(path)
    with _refused(path):
        files.try_to_write(path)


def picture_bytes(path: Path, pictures: Sequence[Picture]) -> bytes:
    """Return the content of a picture file, in the format of its name's ending.

    Raises: ValueError: an ending other than .svg, .html, .png, or as `draw_svg` and `render_png`.
    """
    _check_form(path)
    return _FORMS[path.suffix](pictures)


def draw_to_file(path: Path, pictures: Sequence[Picture]) -> None:
    """Draw timelines below each other to a file; a reader sees the whole old file or the whole new one.

    Raises: ValueError: as `picture_bytes`, or the file cannot be written.
    """
    write_beside(path, picture_bytes(path, pictures))


def write_beside(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that readers never see a part of it.

    Raises: ValueError: it cannot be written; one line with path and reason.
    """
    check_place(path)
    with _refused(path):
        files.write_beside(path, content)


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Refuse in one line, as of the file itself, whatever fails beside it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"a file must be writable: {path}: {error.strerror}: choose another file") from None


def _check_form(path: Path) -> None:
    if path.suffix not in _FORMS:
        endings = ", ".join(_FORMS)
        raise ValueError(f"a picture's name must end in one of {endings}: got {path}: use {path.stem or 'out'}.svg")


def check_place(path: Path) -> None:
    """Refuse a file where none can be.

    Raises: ValueError: its directory does not exist, or it is a directory or device itself.
    """
    if not path.resolve().parent.is_dir():
        raise ValueError(f"a file must lie in a directory that exists: got {path}: make {path.parent} first")
    if path.exists() and not path.is_file():
        raise ValueError(
            f"a file can only replace a regular file: {path} is a directory or device: choose another name"
        )
