"""Texts of parquet files: the library pyarrow reads them, the extra `parquet`. It is imported when there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROWS_AT_ONCE = 1024


def parquet_texts(path: Path, field: str, first: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the texts of a column, and which share of the rows has been read with each.

    Args:
        path: the file.
        field: the column.
        first: row to begin with; the row groups before it are not read.

    Raises:
        ValueError: the library is not installed; no parquet file; no such column, or one of another type; a row without
            a text.
    """
    try:
        import pyarrow  # type: ignore[import-not-found, unused-ignore]
        from pyarrow import parquet  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"a parquet file needs the library pyarrow: it is not installed, for {path}: pip install "
            "'tpengine[parquet]'"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow
            kind = columns.field(field).type if field in columns.names else None
            if kind is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                has = f"has {', '.join(map(repr, columns.names[:5]))}" if kind is None else f"has {kind} there"
                raise ValueError(
                    f"a parquet file must have a column of text {field!r}: {path} {has}: name the column with --field"
                )
            row = 0
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if row + size <= first:
                    row += size
                    continue
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[field]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        if row <= first:
                            continue
                        if text is None:
                            raise ValueError(
                                f"a row of a parquet file must have a text in {field!r}: {path}, row {row} has none: "
                                "leave it out, or name the column with --field"
                            )
                        yield text, row / max(1, file.metadata.num_rows)
    except pyarrow.ArrowException as error:
        raise ValueError(f"a parquet file must be whole: {path}: {str(error)[:120]!r}: copy it again") from None
