"""Look at a data file as far as a plan needs it: its number of rows, and the fields of the first ones.

No numpy, for commands that answer at once.
"""

from __future__ import annotations

import glob
from collections.abc import Collection
from pathlib import Path

from gspo_hpc.data.files import folders, formats

# Usual names of the fields with the prompt and with the answer, the likeliest first.
PROMPT_FIELDS = ("prompt", "question", "problem", "query", "instruction", "input", "messages")
ANSWER_FIELDS = ("answer", "solution", "ground_truth", "target", "label", "output", "response")
PROMPT, MESSAGES = "prompt", "messages"  # data.prompt_key by default, and what else is taken for it then


def files(path: str | Path) -> list[Path]:
    """Return the files that a path of data names, in the order of their names: one, or those of a pattern or folder.

    A path without * and ? is its own file, whether it is there or not; a pattern that nothing matches has none, nor has
    a folder without files of the split.
    """
    try:
        return found_files(path)
    except (OSError, ValueError):
        return []


def found_files(path: str | Path) -> list[Path]:
    """Return what :func:`files` returns. Raises ValueError with the reason for a folder that has none of the split."""
    text = str(path)
    if (part := folders.named(text)) is not None:
        return folders.files(part)
    if not any(mark in text for mark in "*?") or Path(text).is_file():
        return [Path(text)]
    return sorted(Path(name) for name in glob.glob(text) if Path(name).is_file())


def is_there(path: str | Path) -> bool:
    """Return whether there is a file of data, one that a pattern matches, or a folder, whatever is in it."""
    return folders.named(path) is not None or any(file.exists() for file in files(path))


def wrong_name(path: str | Path) -> str | None:
    """Return what is wrong with the name of a data file, whether it is there or not; None if nothing is."""
    if folders.named(path) is not None or formats.kind(path) is not None:
        return None
    return f"{path}: the name of a data file must end in {formats.endings()}, and no folder of a dataset has this name"


def prompt_field(names: Collection[str], prompt_key: str) -> str | None:
    """Return which of a row's fields is its prompt: data.prompt_key, or messages where its default is not there."""
    if prompt_key in names:
        return prompt_key
    return MESSAGES if prompt_key == PROMPT and MESSAGES in names else None


def count_rows(path: str | Path | None, most_bytes: float = float("inf")) -> int | None:
    """Return the rows of data files; None if one is missing, of another kind, or a larger file of text.

    Blank lines are no rows. A columnar file says how many it has, if pyarrow is installed.
    """
    counts = [_count_rows(file, most_bytes) for file in files(path or "")]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _count_rows(file: Path, most_bytes: float) -> int | None:
    kind = formats.kind(file)
    try:
        if kind is None or not file.is_file():
            return None
        if kind not in (formats.PARQUET, formats.ARROW) and file.stat().st_size > most_bytes:
            return None
        return formats.count(file)
    except (OSError, ValueError, ModuleNotFoundError):  # the check of the data says so
        return None


def fields(path: str | Path) -> tuple[str, ...] | None:
    """Return the fields that any of the first rows of a data file has, in their order.

    None where that cannot be said: the file is missing, empty or of another kind, or one of these rows is no object.
    """
    file = next(iter(files(path)), Path(path))
    try:
        return formats.fields(file) if formats.kind(file) is not None and file.is_file() else None
    except (OSError, ValueError, RecursionError, ModuleNotFoundError):  # a run says what is wrong with it
        return None
