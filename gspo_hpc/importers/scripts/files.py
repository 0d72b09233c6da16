"""Tell which files the commands of a shell script write or change, so that none is read as it was before; keep some."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gspo_hpc.importers.scripts import heredocs
from gspo_hpc.importers.scripts.builtins import prefixes
from gspo_hpc.importers.scripts.places import folder_of, plain_path, text_at

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_READ_LATER = re.compile(r"[\w./${}@+-]+\.(?:ya?ml|json|sh|py|toml)\b")
_WRITES = re.compile(r"""write|dump|['"][wa]\+?['"]""")
_IN_PLACE = re.compile(r"-\w*i|--in-?place|--inplace")
_LAST = ("cp", "mv", "install", "ln", "rsync", "envsubst")
_OUTPUT = {"curl": ("-o", "--output"), "wget": ("-O", "--output-document")}


def echoed(words: Sequence[str], redirects: Sequence[tuple[str, str]]) -> tuple[str, bool, str] | None:
    """Return the file that an echo writes, whether it appends, and its text; None for anything else."""
    found = [(sign, name) for sign, name in redirects if sign in (">", ">>", ">|")]
    if words[:1] != ["echo"] or len(found) != 1 or words[1:2] and words[1].startswith("-"):
        return None
    if any("\\" in word for word in words):
        return None
    (sign, name) = found[0]
    return plain_path(name), sign == ">>", " ".join(words[1:]) + "\n"


def changed(words: Sequence[str], redirects: Sequence[tuple[str, str]], code: str) -> Iterator[str]:
    """Yield the files that a command writes or changes. `code`: the here-document that it reads."""
    for sign, name in redirects:
        if ">" in sign and name and not name.startswith("/dev/"):
            yield plain_path(name)
    if not words:
        return
    name, *rest = words
    name = name.rpartition("/")[2]
    plain = [word for word in rest if not word.startswith("-")]
    if (name in ("sed", "perl", "yq") and any(map(_IN_PLACE.match, rest))) or name in (
        "tee",
        "rm",
        "ed",
        "ex",
        "truncate",
    ):
        yield from map(plain_path, plain)
    elif name in _LAST and len(plain) > 1:
        yield plain_path(plain[-1])
    elif name in _OUTPUT:
        yield from (plain_path(after) for word, after in zip(rest, rest[1:], strict=False) if word in _OUTPUT[name])
    elif re.fullmatch(r"python3?(\.\d+)?|perl|ruby|node", name):
        texts = [after for word, after in zip(rest, rest[1:], strict=False) if word in ("-c", "-e")]
        for text in (*texts, *([code] if not plain or "-" in rest else [])):
            if _WRITES.search(text):
                yield from map(plain_path, _READ_LATER.findall(text))


def refuse_placeholder(redirects: Sequence[tuple[str, str]], line: int) -> None:
    """Raise ValueError where a placeholder, <NAME>, makes a shell read NAME and write to the next option."""
    (*_, (first, name), (sign, file)) = [("", ""), *redirects]
    if first == "<" and sign == ">" and file.startswith("-"):
        text = f"<{name}> is a placeholder, and to a shell it takes {file} away: put its value there"
        raise ValueError(f"line {line}: {text}")


def write(
    reader: Reader, statement: Node, words: list[str], redirects: Sequence[tuple[str, str]]
) -> tuple[list[str], str, str]:
    """Keep the file that a command writes; return its words without a here-document, that, and the file."""
    words, document = heredocs.taken_out(words)
    piped = statement.parent is not None and statement.parent.type == "pipeline"
    if document is not None or not piped or statement.prev_named_sibling is None:
        reader.document = document if heredocs.reads(words) else None
    elif not heredocs.reads(words):  # sed, say, which writes another text
        reader.document = None
    code = "" if document is None else document.text
    text: str | None
    if reader.document is not None and (place := heredocs.target(words, redirects)):
        path, adds = place
        with prefixes.not_yet(reader):
            text = heredocs.text_with_values(reader.document, reader.scope)
    elif not piped and (echo := echoed(words, redirects)):
        path, adds, text = echo
    else:
        return words, code, ""
    before = _text_before(reader, path) if adds else ""
    known = reader.certain and text is not None and before is not None
    reader.written[_kept_as(reader, path)] = f"{before}{text}" if known else None
    return words, code, path


def lose(reader: Reader, names: Iterable[str], text: str | None = None) -> None:
    """Note files that are changed in a way that is not followed, or have this text from now on."""
    for name in names:
        reader.written[_kept_as(reader, name)] = text


def written(reader: Reader, folder: str | None = None) -> dict[str, str | None]:
    """Return the files that the script has written, by the names that they have for commands in a folder.

    `folder` is that of the present commands where it is not given. A path from the root names a file, too.
    """
    here = folder_of(reader.scope.values) if folder is None else folder
    found = dict[str, str | None]()
    for path, text in reader.written.items():
        whole = os.path.join(_top(reader), path)
        alike = os.path.isabs(here) == os.path.isabs(path)
        found |= {whole: text, os.path.relpath(path, here or ".") if alike or not here else path: text}
        if os.path.isabs(here):
            found[os.path.relpath(whole, here)] = text
    return found


def _kept_as(reader: Reader, name: str) -> str:
    """Return the path of a file that commands name, from the folder in which the script is started."""
    path = os.path.normpath(os.path.join(folder_of(reader.scope.values), name))
    below = os.path.join(_top(reader), "")
    return path.removeprefix(below) if os.path.isabs(path) else path


def _top(reader: Reader) -> str:
    return str(reader.file.parent.absolute()) if reader.file else "/"


def _text_before(reader: Reader, path: str) -> str | None:
    """Return what a file has that is added to: nothing if it is not there, None where that is not known."""
    try:
        return text_at(path, reader.beside(path), written(reader)) or ""
    except (OSError, ValueError):
        return None
