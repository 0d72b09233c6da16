"""Look at a data file as far as a plan needs it: its number of rows, and the fields of the first ones.

No numpy, for commands that answer at once.
"""

from __future__ import annotations

import glob
import itertools
import json
import re
from pathlib import Path

JSONL, PARQUET = DATA_FILES = (".jsonl", ".parquet")  # suffixes of files with prompts
# Usual names of the fields with the prompt and with the answer, the likeliest first.
PROMPT_FIELDS = ("prompt", "question", "problem", "query", "instruction", "input", "messages")
ANSWER_FIELDS = ("answer", "solution", "ground_truth", "target", "label", "output", "response")
_DATASET = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # OWNER/NAME
_FIRST, _FIRST_BYTES = 20, 2**20  # lines of a JSONL file that are looked at, and bytes of each


def files(path: str | Path) -> list[Path]:
    """Return the files that a path of data names, in the order of their names: one, or those that match a pattern.

    A path without * and ? is its own file, whether it is there or not; a pattern that nothing matches has none.
    """
    text = str(path)
    if not any(mark in text for mark in "*?") or Path(text).is_file():
        return [Path(text)]
    return sorted(Path(name) for name in glob.glob(text) if Path(name).is_file())


def wrong_name(path: str | Path) -> str | None:
    """Return what is wrong with the name of a data file, whether it is there or not; None if nothing is."""
    if Path(path).suffix in DATA_FILES:
        return None
    wrong = f"{path}: the name of a data file must end in {' or '.join(DATA_FILES)}"
    if _DATASET.fullmatch(str(path)) and not Path(path).suffix[1:].isalpha() and not Path(path).exists():
        return f"{wrong}; if it is a data set on the hub, name its file, too, as {path}:FILE"
    return wrong


def count_rows(path: str | Path | None, most_bytes: float = float("inf")) -> int | None:
    """Return the rows of JSONL or parquet files; None if one is missing, of another kind, or a larger JSONL file.

    Blank lines of JSONL are no rows. A parquet file says how many it has, if pyarrow is installed.
    """
    counts = [_count_rows(file, most_bytes) for file in files(path or "")]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _count_rows(file: Path, most_bytes: float) -> int | None:
    if not file.is_file():
        return None
    if file.suffix == PARQUET:
        return _parquet_rows(file)
    if file.suffix != JSONL or file.stat().st_size > most_bytes:
        return None
    try:
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError:  # the check of the data says so
        return None


def fields(path: str | Path) -> tuple[str, ...] | None:
    """Return the fields that any of the first rows of a data file has, in their order.

    None where that cannot be said: the file is missing, empty or of another kind, or one of these rows is no object.
    """
    file = next(iter(files(path)), Path(path))
    try:
        if not file.is_file():
            return None
        if file.suffix == PARQUET:
            return _parquet_fields(file)
        return _jsonl_fields(file) if file.suffix == JSONL else None
    except (OSError, ValueError, RecursionError):  # a run says what is wrong with it
        return None


def _jsonl_fields(file: Path) -> tuple[str, ...] | None:
    found: dict[str, None] = {}
    with file.open("rb") as lines:
        for line in itertools.islice(iter(lambda: lines.readline(_FIRST_BYTES), b""), _FIRST):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    return None
                found |= dict.fromkeys(row)
    return tuple(found) or None


def _parquet_fields(file: Path) -> tuple[str, ...] | None:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        return None
    return tuple(map(str, pyarrow.parquet.read_schema(file).names))


def _parquet_rows(file: Path) -> int | None:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        return None
    try:
        return int(pyarrow.parquet.read_metadata(file).num_rows)
    except (OSError, ValueError):  # what it raises for files that are not parquet, too
        return None
