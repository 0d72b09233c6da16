"""Kinds of data files, and the rows in them: JSONL, CSV, parquet and Arrow, text also compressed.

No numpy, for commands that answer at once; pyarrow is imported for files that need it.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from gspo_hpc.config.constants import WHOLE_FILE_BYTES
from gspo_hpc.system.text import MALFORMED, parse_json

JSONL, PARQUET, CSV, TSV, ARROW = ".jsonl", ".parquet", ".csv", ".tsv", ".arrow"
GZIP, ZSTD = ".gz", ".zst"
# What names of data files end in.
DATA_FILES = (JSONL, PARQUET, CSV, *(kind + end for kind in (JSONL, CSV) for end in (GZIP, ZSTD)), TSV, ARROW)
_SHOWN = (JSONL, PARQUET, CSV)  # of these in a message
_COLUMNAR = (PARQUET, ARROW)
_FIRST, _FIRST_BYTES = 20, 2**20  # lines of a text file that are looked at for its fields, and bytes of each
_LONGEST_CELL = 2**31 - 1  # characters of a cell of CSV; the csv module allows 131,072 by default
_FEATURES = b"huggingface"  # of a schema's metadata, where the library datasets writes types that Arrow lacks
_MEDIA = ("Image", "Audio", "Video")

Rows = Iterator[tuple[str, Any]]  # FILE:LINE or FILE:row N, and the row, or ValueError for what is none


def kind(path: str | Path) -> str | None:
    """Return the kind of a data file by its name, one of JSONL, PARQUET, CSV, TSV and ARROW; None for another file."""
    name = str(path)
    if not name.endswith(DATA_FILES):
        return None
    return Path(name.removesuffix(GZIP).removesuffix(ZSTD)).suffix


def endings() -> str:
    """Return the endings of data files as a message shows them."""
    return f"{' or '.join(_SHOWN)} (or {', '.join(one for one in DATA_FILES if one not in _SHOWN)})"


def needs_pyarrow(path: str | Path) -> bool:
    """Return whether a file of this name is read with pyarrow."""
    return kind(path) in _COLUMNAR or str(path).endswith(ZSTD)


def rows(path: Path, most_bytes: int | None, without: Collection[str] = ()) -> Rows:
    """Yield the rows of a file, at most those that end within so many bytes of its text.

    A columnar file of more bytes yields its first 20 rows, or none if one piece of it may be too large to read; its
    columns `without` are not read. Raises ValueError for a file that is not of its kind, OSError for one that cannot be
    read.
    """
    form = kind(path)
    if form in _COLUMNAR:
        return _columnar(path, most_bytes, without)
    return _jsonl(path, most_bytes) if form == JSONL else _csv(path, most_bytes, "\t" if form == TSV else ",")


def count(path: Path) -> int:
    """Return the number of rows of a file. Raises as :func:`rows` does."""
    form = kind(path)
    if form in _COLUMNAR:
        with _arrow_errors(path):
            return _columnar_count(path)
    with _stream_errors(path), opened(path) as file:
        if form == JSONL:
            return sum(1 for line in file if line.strip())
        return sum(1 for cells in _cells(file, "\t" if form == TSV else ",") if cells) - 1


def fields(path: Path) -> tuple[str, ...] | None:
    """Return the names of a table's columns, or of the fields that any of the first lines has; None if one is no row.

    Raises as :func:`rows` does.
    """
    form = kind(path)
    if form in _COLUMNAR:
        with _arrow_errors(path):
            return tuple(map(str, _schema(path).names))
    with _stream_errors(path), opened(path) as file:
        if form != JSONL:
            return tuple(next((cells for cells in _cells(file, "\t" if form == TSV else ",") if cells), ())) or None
        found: dict[str, None] = {}
        for line in itertools.islice(iter(lambda: file.readline(_FIRST_BYTES), b""), _FIRST):
            if line.strip():
                row = parse_json(line, finite=False)
                if not isinstance(row, dict):
                    return None
                found |= dict.fromkeys(row)
    return tuple(found) or None


def columns(path: Path) -> tuple[str, ...]:
    """Return the columns of a columnar file, those included that are not read; none of another. Raises ValueError."""
    return (fields(path) or ()) if kind(path) in _COLUMNAR else ()


def media(path: Path) -> dict[str, str]:
    """Return the columns of a columnar file that hold images, audio or video by its schema, with what they hold."""
    if kind(path) not in _COLUMNAR:
        return {}
    with _arrow_errors(path):
        schema = _schema(path)
        names = [str(name) for name in schema.names]
        binary = {name: "Image" for place, name in enumerate(names) if _is_file(schema.field(place).type)}
        metadata = schema.metadata or {}
    try:
        told = parse_json(metadata.get(_FEATURES, b"{}"))
    except ValueError as error:
        raise ValueError(f"{path}: its metadata {_FEATURES.decode()!r} cannot be read: {error}") from None
    info = told.get("info") if isinstance(told, dict) else None
    features = info.get("features") if isinstance(info, dict) else None
    kinds = {name: json.dumps(features.get(name)) for name in names} if isinstance(features, dict) else {}
    found = {name: one for name, kind in kinds.items() for one in _MEDIA if f'"_type": "{one}"' in kind}
    return {name: one.lower() for name, one in (binary | found).items()}


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of text for reading, whose bytes are decompressed if its name says that they are compressed."""
    if path.suffix == GZIP:
        with gzip.open(path) as file:
            yield cast(BinaryIO, file)
    elif path.suffix == ZSTD:
        import pyarrow

        with path.open("rb") as raw, pyarrow.CompressedInputStream(raw, "zstd") as stream:
            yield cast(BinaryIO, io.BufferedReader(stream))
    else:
        with path.open("rb") as file:
            yield file


@contextmanager
def _stream_errors(path: Path) -> Iterator[None]:
    """Raise ValueError for a compressed file that is cut off or is none."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be decompressed: {error}") from None
    except OSError as error:
        if path.suffix == ZSTD and error.errno is None:  # what pyarrow raises for other content
            raise ValueError(f"{path}: cannot be decompressed: {error}") from None
        raise


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, *MALFORMED) as error:  # the latter for names and values that Python lacks
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from None


def _jsonl(path: Path, most_bytes: int | None) -> Rows:
    with _stream_errors(path), opened(path) as file:
        for number, line in enumerate(file if most_bytes is None else _lines(file, most_bytes), 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"), finite=False)
            except UnicodeDecodeError as error:
                yield where, ValueError(f"not UTF-8 at byte {error.start + 1} of the line")
            except json.JSONDecodeError as error:
                yield where, ValueError(f"not JSON: {error.msg} at character {error.pos + 1}")
            except ValueError as error:
                yield where, ValueError(f"not JSON that can be read: {error}")


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines that end within so many bytes."""
    left = most_bytes
    while (line := file.readline(left + 1)) and len(line) <= left:
        left -= len(line)
        yield line


def _csv(path: Path, most_bytes: int | None, delimiter: str) -> Rows:
    """Yield the rows of a table whose first line has the names of its columns; every value is text."""
    with _stream_errors(path), opened(path) as file:
        lines = _cells(file, delimiter)
        names: list[str] | None = None
        left = float("inf") if most_bytes is None else most_bytes
        while True:
            where = f"{path}:{lines.line + 1}"
            try:
                cells = next(lines)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                yield where, ValueError(f"not UTF-8: {error.reason}; no line behind it was read")
                return
            except csv.Error as error:
                yield where, ValueError(f"not CSV: {error}; no line behind it was read")
                return
            if not cells:
                continue
            left -= sum(map(len, cells))
            if left < 0:
                return
            if names is None:
                names = _header(path, cells)
            elif len(cells) != len(names):
                yield where, ValueError(f"it has {len(cells)} values for {len(names)} columns; quote those with commas")
            else:
                yield where, dict(zip(names, cells, strict=True))


def _header(path: Path, cells: list[str]) -> list[str]:
    twice = next((name for place, name in enumerate(cells) if name in cells[:place]), None)
    if "" in cells or twice is not None:
        what = "a column without a name" if "" in cells else f"two columns {twice!r}"
        raise ValueError(f"{path}: its first line must name every column once, but has {what}: {', '.join(cells)}")
    return cells


class _cells(Iterator[list[str]]):  # noqa: N801 (used as a function is)
    """Rows of cells of a table, and the number of lines that were read for them."""

    def __init__(self, file: BinaryIO, delimiter: str) -> None:
        csv.field_size_limit(_LONGEST_CELL)
        text = io.TextIOWrapper(cast(Any, file), encoding="utf-8-sig", newline="")
        self._reader = csv.reader(text, delimiter=delimiter, strict=True)

    @property
    def line(self) -> int:
        return self._reader.line_num

    def __next__(self) -> list[str]:
        return next(self._reader)


def _columnar(path: Path, most_bytes: int | None, without: Collection[str]) -> Rows:
    size = path.stat().st_size
    if most_bytes is not None and size > WHOLE_FILE_BYTES:  # one group of its rows may be as large
        return
    few = most_bytes is not None and size > most_bytes
    number = 0
    with _arrow_errors(path):
        for batch in _batches(path, _FIRST if few else 65_536, without):
            for raw in batch.to_pylist():
                number += 1
                yield f"{path}:row {number}", raw
                if few and number == _FIRST:
                    return


def _batches(path: Path, size: int, without: Collection[str]) -> Iterator[Any]:
    """Yield the batches of a columnar file; those of parquet have `size` rows at most."""
    import pyarrow
    import pyarrow.parquet

    if kind(path) == PARQUET:
        with pyarrow.parquet.ParquetFile(path) as file:
            kept = [name for name in file.schema_arrow.names if name not in without] if without else None
            yield from file.iter_batches(size, columns=kept)
        return
    with pyarrow.memory_map(str(path)) as source:
        for batch in _arrow_batches(source):
            yield batch.select([name for name in batch.schema.names if name not in without]) if without else batch


def _arrow_batches(source: Any) -> Iterator[Any]:
    """Yield the batches of a stream, as the library datasets writes it, or of a file of Arrow."""
    import pyarrow

    try:
        stream = pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        table = pyarrow.ipc.open_file(source)
        yield from (table.get_batch(number) for number in range(table.num_record_batches))
        return
    yield from stream


def _columnar_count(path: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    if kind(path) == PARQUET:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    with pyarrow.memory_map(str(path)) as source:
        return sum(int(batch.num_rows) for batch in _arrow_batches(source))


def _schema(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    if kind(path) == PARQUET:
        return pyarrow.parquet.read_schema(path)
    with pyarrow.memory_map(str(path)) as source:
        try:
            return pyarrow.ipc.open_stream(source).schema
        except pyarrow.ArrowInvalid:
            source.seek(0)
            return pyarrow.ipc.open_file(source).schema


def _is_file(of: Any) -> bool:
    """Return whether a type is that of files in a column: bytes and path, or lists of these."""
    import pyarrow.types

    if pyarrow.types.is_list(of) or pyarrow.types.is_large_list(of):
        return _is_file(of.value_type)
    return pyarrow.types.is_struct(of) and {of.field(place).name for place in range(of.num_fields)} == {"bytes", "path"}
