"""Rows of a data file: read, and checked one by one, before a run starts.

No numpy, for commands that answer at once. :mod:`gspo_hpc.data.prompts` makes prompts of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.config.schema import Data
from gspo_hpc.data.counting import found_files, prompt_field, wrong_name
from gspo_hpc.data.files import formats
from gspo_hpc.data.sources import selection
from gspo_hpc.data.sources.parts import Part
from gspo_hpc.system.progress import mark

FIRST_BYTES = 2**20  # of the rows that are looked at where not all are
SHOWN = 10  # malformed rows that an error lists
ROLES = ("system", "user", "assistant")
Messages = list[dict[str, str]]

_MEDIA = re.compile(r"(image|video|audio)s?", re.IGNORECASE)  # columns with files of other kinds than text
_FILE = re.compile(r".*\.(?:png|jpe?g|webp|gif|bmp|tiff?|mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg)", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One checked row of a data file."""

    index: int  # place among the rows of the file, from 0; with several sources among those of all that are used
    where: str  # FILE:LINE of a file of text, FILE:row N of another; counted from 1
    prompt: str | Messages
    fields: dict[str, Any]  # all other fields

    @property
    def text(self) -> str:
        """The prompt without a chat template: of a list of messages the last."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def whole(self) -> str:
        """The prompt without a chat template: of a list of messages all."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(one["content"] for one in self.prompt)


def load_rows(path: str | Path, data: Data) -> list[Row]:
    """Return all rows of a file of data, or of all files that a pattern or a folder has. Blank lines are no rows.

    A prompt is text, or a list of chat messages {role, content} that ends with the user's. Raises ValueError with
    every malformed row (the first ten by file and line), or if the file is missing, empty or of another kind.
    """
    return _checked(Part("data.train", str(path)), data, None)


def first_rows(path: str | Path, data: Data) -> list[Row]:
    """Return the rows at the beginning of the data: all of them where the files have up to FIRST_BYTES.

    They are checked as by :func:`load_rows`. There may be none, if the first one is longer than that, or if it is in a
    parquet file too large to look into.
    """
    return first_of(Part("data.train", str(path)), data)


def first_of(part: Part, data: Data) -> list[Row]:
    """Return the rows at the beginning of what a key names, as :func:`first_rows`, which its source uses."""
    return _checked(part, data, FIRST_BYTES)


def load_parts(parts: Iterable[Part], data: Data, seed: int) -> list[Row]:
    """Return the rows of all parts, one after the other, that are used of them; their indices are those of this list.

    Raises ValueError as :func:`load_rows`, and where a source has none left, or fewer than its #N.
    """
    found: list[Row] = []
    known: set[bytes] = set()
    for part in parts:
        rows = _checked(part, data, None)
        read = len(rows)
        if data.deduplicate:
            first = selection.without_repeats((row.whole for row in rows), known)
            rows = [row for row, is_first in zip(rows, first, strict=True) if is_first]
        if part.source is not None:
            if not rows:
                raise ValueError(f"{part.path}: data.deduplicate leaves none of its {read} rows")
            try:
                rows = selection.drawn(rows, part.limit, seed, part.source.name)
            except ValueError as mistake:
                raise ValueError(f"{part.path}: {mistake}") from None
        if part.source is not None or data.deduplicate:
            rows = [replace(row, index=len(found) + place) for place, row in enumerate(rows)]
        found += rows
    return found


class Lacking(NamedTuple):
    """A row that lacks fields, and how many rows lack these, itself included."""

    row: Row
    missing: frozenset[str]
    alike: int


def known_fields(row: Row) -> frozenset[str]:
    """Return the fields of a row that have a value: null, as a column of a table has it, is none."""
    return frozenset(name for name, value in row.fields.items() if value is not None)


def lacking(rows: Sequence[Row], wanted: Collection[str]) -> list[Lacking]:
    """Return rows that lack some of the wanted fields, as few as show every field that any row lacks."""
    all_wanted = frozenset(wanted)
    kinds: dict[frozenset[str], Row] = {}
    counts: dict[frozenset[str], int] = {}
    for row in rows:
        if missing := all_wanted - known_fields(row):
            kinds.setdefault(missing, row)
            counts[missing] = counts.get(missing, 0) + 1
    found, seen = list[Lacking](), set[str]()
    # Those that lack one field first: which of several a function needs would not be known.
    for missing in sorted(kinds, key=len):
        if not missing <= seen:
            seen |= missing
            found.append(Lacking(kinds[missing], missing, sum(n for other, n in counts.items() if missing <= other)))
    return found


def _checked(part: Part, data: Data, most_bytes: int | None) -> list[Row]:
    path, source = part.path, part.source
    parts = found_files(path)
    for file in parts:
        if (wrong := wrong_name(file)) is not None:
            raise ValueError(wrong)
        if file.is_dir():
            raise ValueError(f"{file} is a folder: give a file, or a pattern such as {file}/*{formats.JSONL}")
        if file.exists() and not file.is_file():
            raise ValueError(f"{file} is not a regular file, which can be read several times")
    if not parts:
        raise ValueError(f"{path}: no file matches")
    dropped = selection.dropped(source)
    chosen = None if source is None else selection.Selection(source)
    if chosen is not None:
        chosen.note(name for file in parts if file.is_file() for name in formats.columns(file))
    rows: list[Row] = []
    faults: list[str] = []
    count = 0
    try:
        _refuse_media(parts, dropped)
        whole = most_bytes is None or sum(file.stat().st_size for file in parts) <= most_bytes
        for where, raw in _read(parts, None if whole else most_bytes, dropped):
            count += 1
            mark()
            try:
                if isinstance(raw, ValueError):
                    raise raw
                if chosen is not None and isinstance(raw, dict) and (raw := chosen.of(raw)) is None:
                    continue
                if chosen is None:
                    _refuse_name_of_set(raw, data)
                rows.append(_row(len(rows), where, raw, data))
            except ValueError as fault:
                faults.append(f"{where}: {fault}")
    except OSError as error:
        raise ValueError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None
    if source is not None and chosen is not None and whole and (mistakes := chosen.mistakes()):
        raise ValueError(listed(f"{path}: source {source.name} names what no row has", mistakes))
    if faults:
        seen = f"{count}" if whole else f"the first {count}"
        raise ValueError(listed(f"{path}: {len(faults)} of {seen} rows cannot be used", faults))
    if not rows and whole and not count:
        raise ValueError(f"{path} has no rows; it needs at least one, with {data.prompt_key!r} in it")
    if source is not None and source.characters is not None:
        low, high = source.characters
        rows = [row for row in rows if low <= len(row.whole) <= high]
    if whole and part.limit is not None and 0 < len(rows) < part.limit:
        raise ValueError(f"{path}: {selection.too_few(part.limit, len(rows))}")
    if not rows and whole:
        raise ValueError(f"{path}: filter and characters leave none of its {count} rows")
    return rows


def _refuse_name_of_set(raw: Any, data: Data) -> None:
    """Raise ValueError for a row that would be taken for one of an evaluation set."""
    name = raw.get(selection.FIELD) if isinstance(raw, dict) else None
    if any(one.name == name for one in data.eval_sets):
        raise ValueError(
            f"its field {selection.FIELD!r} is {name!r}, as a set in data.eval_sets is called, to which it does not "
            "belong: give the set another name"
        )


def _refuse_media(parts: Iterable[Path], dropped: Collection[str]) -> None:
    """Raise ValueError for columns that hold images, audio or video, as the schema of a file says."""
    for file in parts:
        held = {name: what for name, what in formats.media(file).items() if name not in dropped}
        if held:
            told = ", ".join(f"{name!r} ({what})" for name, what in held.items())
            raise ValueError(f"{file} has columns that are no text: {told}. {_without([*held])}")


def _without(names: list[str]) -> str:
    out = ", ".join(f"{name}: null" for name in names)
    return f"Models are trained on text alone: use other data, or leave them out with data.sources[].columns={{{out}}}"


def _row(index: int, where: str, raw: Any, data: Data) -> Row:
    if _kind(raw) != "an object":
        raise ValueError(f"a row must be an object with {data.prompt_key!r} in it, not {_kind(raw)}")
    key = prompt_field(raw, data.prompt_key)
    if key is None:
        raise ValueError(
            f"it has no {data.prompt_key!r} (data.prompt_key); it has: {', '.join(map(str, raw)) or 'nothing'}"
        )
    fields = {name: value for name, value in raw.items() if name != key}
    if held := [name for name, value in fields.items() if _is_media(name, value)]:
        raise ValueError(f"the column {held[0]!r} holds no text. {_without(held)}")
    try:
        json.dumps(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its fields must be values that JSON can hold: {error}") from None
    prompt = raw[key]
    if isinstance(prompt, str):
        given = {"system_prompt": data.system_prompt, "chat_template_kwargs": data.chat_template_kwargs or None}
        for name in (name for name, value in given.items() if value is not None and not data.chat_template):
            raise ValueError(f"data.{name} needs a chat template for text prompts, but data.chat_template=false")
        return Row(index, where, _text(prompt, "the prompt"), fields)
    if _kind(prompt) != "a list":
        raise ValueError(f"the prompt is {_kind(prompt)}: it must be text or a list of chat messages")
    if not prompt:
        raise ValueError("the prompt is empty")
    messages = [_message(number, message) for number, message in enumerate(prompt, 1)]
    if any(message["role"] == "system" for message in messages[1:]):
        raise ValueError("only the first message can be a system message")
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last message has the role {messages[-1]['role']!r}: it must have the role 'user'")
    return Row(index, where, messages, fields)


def _is_media(name: str, value: Any) -> bool:
    """Return whether a value is a file that is no text, or names some: bytes, or such a column with something in it."""
    if isinstance(value, bytes):
        return True
    if not _MEDIA.fullmatch(name) or not value:
        return False
    return isinstance(value, list | dict) or (isinstance(value, str) and _FILE.fullmatch(value) is not None)


def _message(number: int, message: Any) -> dict[str, str]:
    given = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else None
    if given is None or set(given) != {"role", "content"}:
        what = f"has {', '.join(map(str, given)) or 'nothing'}" if given is not None else f"is {_kind(message)}"
        raise ValueError(f"message {number} {what}: it must have role and content, and nothing else")
    if given["role"] not in ROLES:
        raise ValueError(f"message {number} has the role {given['role']!r}: it must be one of {', '.join(ROLES)}")
    if isinstance(given["content"], list) and (held := _media_parts(given["content"])):
        raise ValueError(f"message {number} holds {held}: models are trained on text alone")
    if _kind(given["content"]) != "text":
        raise ValueError(f"the content of message {number} is {_kind(given['content'])}: it must be text")
    return {"role": given["role"], "content": _text(given["content"], f"message {number}")}


def _media_parts(content: list[Any]) -> str:
    """Return the types of the parts of a message that are no text: {type: image, ...}."""
    types = {str(one.get("type")) for one in content if isinstance(one, dict)} - {"text"}
    return " and ".join(sorted(types))


def _text(text: str, what: str) -> str:
    if not text.strip():
        raise ValueError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} contains half of a character (a lone surrogate)") from None
    return text


def _read(parts: Iterable[Path], most_bytes: int | None, without: Collection[str]) -> formats.Rows:
    left = most_bytes
    for part in parts:
        yield from formats.rows(part, left, without)
        if left is not None:
            left -= part.stat().st_size
            if left <= 0:
                return


def listed(headline: str, faults: list[str]) -> str:
    """Return a headline and the first faults under it, with the number of the others."""
    more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    return "\n  ".join([headline, *faults[:SHOWN], *more])


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text", "bool": "true or false"}
    names |= {"int": "a number", "float": "a number"}
    return names.get(type(value).__name__, type(value).__name__)
