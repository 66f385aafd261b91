"""The two files of a run: its rows, and an archive of all the rest. No torch.

A GPU that is lent may give few files back, and what lies in the folder when the command is ended is all that there is.
So the rest lies in a folder of its own while the command runs, and is packed whenever a case has ended.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.tables.rows import ROWS
from tpengine.files import write_beside

ARCHIVE = "rest.zip"
LOG, REPORT = "log.txt", "report.txt"


@dataclass(frozen=True)
class Folder:
    """Where a run writes.

    Attributes:
        out: what is kept: rows and archive.
        work: all else, until it is packed.
    """

    out: Path
    work: Path

    @property
    def rows(self) -> Path:
        """Return the file of rows."""
        return self.out / ROWS

    @property
    def log(self) -> Path:
        """Return the file of everything that cases printed."""
        return self.work / LOG

    def pack(self) -> None:
        """Write the archive anew."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(self.work.rglob("*")):
                if path.is_file():
                    archive.write(path, path.relative_to(self.work))
        write_beside(self.out / ARCHIVE, packed.getvalue())


@contextlib.contextmanager
def opened(out: Path) -> Iterator[Folder]:
    """Open a folder, with what its archive has of an earlier start; pack it again at the end."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tpengine-gpu-") as work:
        folder = Folder(out, Path(work))
        if (out / ARCHIVE).exists():
            with zipfile.ZipFile(out / ARCHIVE) as archive:
                archive.extractall(folder.work)
        try:
            yield folder
        finally:
            folder.pack()
