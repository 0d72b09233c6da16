"""Tell which files the commands of a shell script write or change, so that none is read as it was before; keep some."""

from __future__ import annotations

import fnmatch
import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from gspo_hpc.importers.scripts import heredocs
from gspo_hpc.importers.scripts.builtins import prefixes
from gspo_hpc.importers.scripts.places import FOLDER, Files, find_file, folder_of, is_pattern, plain_path, text_at
from gspo_hpc.importers.scripts.scope import Value, is_unset

if TYPE_CHECKING:
    from tree_sitter import Node

    from gspo_hpc.importers.scripts.shell import Reader

_T = TypeVar("_T")
_READ_LATER = re.compile(r"[\w./${}@+-]+\.(?:ya?ml|json|sh|py|toml)\b")
_WRITES = re.compile(r"""write|dump|['"][wa]\+?['"]""")
_IN_PLACE = re.compile(r"-\w*i|--in-?place|--inplace")
_EDITORS = ("sed", "perl", "yq")
_SCRIPT = re.compile(r"-[A-Za-z]*e|--expression")  # of an editor: what it does stands behind
_LAUNCHERS = "srun mpirun sudo nice timeout stdbuf setsid taskset ionice chrt numactl doas".split()
_LAST = ("cp", "mv", "install", "ln", "rsync", "envsubst")
_OUTPUT = {"curl": ("-o", "--output"), "wget": ("-O", "--output-document"), "patch": ("-o", "--output")}
CHANGERS = frozenset((*_EDITORS, *_LAST, "dd", "patch", "rm", "tee", "truncate"))  # programs that change files
_MADE = re.compile(r"\$\(mktemp[^()]*\)")
_PATCHED = re.compile(r"(?m)^\+\+\+ (?:b/)?([^\s]+)")
# What git does to the files of a folder, which it may change all of.
_OF_GIT = "am apply checkout cherry-pick merge pull rebase reset restore revert stash switch".split()
# Programs that read a file that is given to them, or start what reads it.
_READERS = set(
    "[ [[ accelerate awk cat chmod chown cmp cut deepspeed diff du echo egrep export fgrep file git grep head hf "
    "huggingface-cli less ls md5sum megatron more mkdir printf ray realpath rm sha256sum source . stat swift tail tar "
    "test torchrun touch trl vllm wandb wc which zip".split()
)


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
    """Yield the files that a command writes or changes, or patterns of their names.

    `code`: the here-document that it reads.
    """
    for sign, name in redirects:
        if ">" in sign and name and not name.startswith("/dev/"):
            yield plain_path(name)
    words = _behind_launcher(words)
    if not words:
        return
    name, *rest = words
    name = name.rpartition("/")[2]
    plain = [word for word in rest if not word.startswith("-")]
    if name in _EDITORS and any(map(_IN_PLACE.match, rest)):
        yield from map(_pattern, _operands(rest))
    elif name in ("tee", "rm", "ed", "ex", "truncate"):
        yield from map(plain_path, plain)
    elif name == "dd":
        yield from (plain_path(word[3:]) for word in rest if word.startswith("of="))
    elif name == "patch" and plain:
        yield plain_path(plain[0])
    elif name in ("find", "xargs"):
        yield from _of_found(name, rest)
    elif name in _LAST:
        yield from _copied(rest, plain)
    elif name in _OUTPUT:
        yield from (plain_path(after) for word, after in zip(rest, rest[1:], strict=False) if word in _OUTPUT[name])
    elif re.fullmatch(r"python3?(\.\d+)?|perl|ruby|node", name):
        texts = [after for word, after in zip(rest, rest[1:], strict=False) if word in ("-c", "-e")]
        for text in (*texts, *([code] if not plain or "-" in rest else [])):
            if _WRITES.search(text):
                yield from map(plain_path, _READ_LATER.findall(text))


def touch(reader: Reader, words: Sequence[str], redirects: Sequence[tuple[str, str]]) -> None:
    """Note the files that a command is given and may change, and is not known to: of those that are read it is told."""
    name, *rest = [word.rpartition("/")[2] if not at else word for at, word in enumerate(words)] or [""]
    inputs = [file for sign, file in redirects if sign == "<"]
    verb = next((word for word in rest if not word.startswith("-")), "")
    if name == "git" and verb in _OF_GIT:
        given = [plain_path(word) for word in rest[rest.index(verb) + 1 :] if _READ_LATER.fullmatch(word)]
        sources = [word for word in rest if word.endswith((".patch", ".diff"))]
        found = _patched(reader, sources) or ["*"] if verb in ("am", "apply") else given or ["*"]
    elif name == "patch":
        sources = [word.partition("=")[2] or word for word in (*rest, *inputs) if word.endswith((".patch", ".diff"))]
        found = _patched(reader, sources) or ["*"]
    elif (
        name in _READERS
        or name in CHANGERS
        or any(word.endswith(".sh") and find_file(word, reader.beside(word)) for word in words)
    ):
        return
    else:
        found = [value for word in rest if _READ_LATER.fullmatch(value := word.rpartition("=")[2])]
    shown = " ".join(words)
    for file in found:
        if not is_unset(file):
            what = f"{shown if len(shown) < 60 else f'{shown[:57]}...'} ({reader.scope.place})"
            reader.touched.setdefault(_kept_as(reader, file), what)


def _patched(reader: Reader, names: Sequence[str]) -> list[str]:
    """Return the files that patches change, as far as these are at hand."""
    found = list[str]()
    for name in names:
        try:
            found += map(plain_path, _PATCHED.findall(text_at(name, reader.beside(name), {}) or ""))
        except (ValueError, OSError):
            return []
    return found


def _behind_launcher(words: Sequence[str]) -> Sequence[str]:
    """Return the words of an editor that a launcher starts, and those of any other command as they are."""
    if not words or words[0].rpartition("/")[2] not in _LAUNCHERS:
        return words
    names = [word.rpartition("/")[2] for word in words]
    return next((words[at:] for at, name in enumerate(names) if name in _EDITORS or name in _LAST), words)


def _operands(rest: Sequence[str]) -> list[str]:
    """Return the files among the words of an editor: all but its options, and what it does to them."""
    scripts = [at + 1 for at, word in enumerate(rest) if _SCRIPT.fullmatch(word)]
    plain = [word for at, word in enumerate(rest) if word[:1] != "-" and at not in scripts]
    return plain if scripts or any(word.startswith("--expression=") for word in rest) else plain[1:]


def _pattern(word: str) -> str:
    """Return the pattern of the names that a word of a command may be: any text in the place of what is not known."""
    found = re.fullmatch(r"\$\(echo (.*)\)", word)
    if word.startswith("$(mktemp..."):
        return plain_path(word)
    return re.sub(r"\$(?:\w+|\{[^}]*\}|\([^)]*\))", "*", plain_path(found[1] if found else word))


def _of_found(name: str, rest: Sequence[str]) -> Iterator[str]:
    """Yield patterns of the files that find or xargs has an editor change."""
    at = next((at for at, word in enumerate(rest) if word.rpartition("/")[2] in _EDITORS), None)
    if at is None or not any(map(_IN_PLACE.match, rest[at:])):
        return
    names = [after for word, after in zip(rest, rest[1:], strict=False) if word in ("-name", "-iname")]
    for one in names if name == "find" and names else ("*",):
        yield from (_pattern(one), f"*/{_pattern(one)}")


def _copied(rest: Sequence[str], plain: Sequence[str]) -> Iterator[str]:
    """Yield the files that a copy writes: its last word, or files of the same names in that folder."""
    given = [after for word, after in zip(rest, rest[1:], strict=False) if word in ("-t", "--target-directory")]
    given += [word.partition("=")[2] for word in rest if word.startswith("--target-directory=")]
    if not given and len(plain) < 2:
        return
    to, sources = (given[0], [word for word in plain if word != given[0]]) if given else (plain[-1], plain[:-1])
    yield plain_path(to)
    for source in sources:
        name = "*" if source.endswith("/.") else _pattern(source).rpartition("/")[2]
        yield os.path.normpath(os.path.join(plain_path(to), name))


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
        named = words and re.fullmatch(r"python3?(\.\d+)?", words[0].rpartition("/")[2])
        if named and "GRPOConfig" in code and reader.recording:
            text = "python reads a GRPOConfig from a here-document: put that into a file of its own, and convert it"
            reader.not_read.append(f"{reader.scope.place}: {text}")
        return words, code, ""
    before = _text_before(reader, path) if adds else ""
    known = reader.certain and text is not None and before is not None
    reader.written[_kept_as(reader, path)] = f"{before}{text}" if known else None
    return words, code, path


def lose(reader: Reader, names: Iterable[str], text: str | None = None) -> None:
    """Note files that are changed in a way that is not followed, or have this text from now on."""
    for name in names:
        path = _kept_as(reader, name)
        if is_pattern(path):
            reader.written |= dict.fromkeys(fnmatch.filter(reader.written, path), None)
        reader.written[path] = text


def written(reader: Reader, values: Mapping[str, Value] | None = None) -> Files:
    """Return the files that the script has written, by the names that they have for commands in a folder.

    `values`: those with the folder of these commands, if these are not the present ones, of which what is to be told of
    files is told for the whole script. A path from the root names a file, too.
    """
    held = reader.scope.values if values is None else values
    texts = dict(_named(reader, reader.written, folder_of(held)))
    touched = dict(_named(reader, reader.touched, folder_of(held)))
    return Files(texts, reader.file, held.get(FOLDER, ""), touched, reader.told if values is None else None)


def _named(reader: Reader, given: Mapping[str, _T], here: str) -> Iterator[tuple[str, _T]]:
    """Yield what is known of files, with each of the names that they have for commands in a folder."""
    for path, what in given.items():
        if path.startswith("$(mktemp"):
            yield path, what
            continue
        alike = os.path.isabs(here) == os.path.isabs(path)
        yield os.path.relpath(path, here) if here and alike else path, what
        if reader.file:
            yield (whole := os.path.join(_top(reader), path)), what
            if os.path.isabs(here):
                yield os.path.relpath(whole, here), what


def temporary(reader: Reader, text: str, line: int) -> str:
    """Return the value of a variable, in which the names that mktemp makes are another one for each call."""
    if "$(mktemp" not in text:
        return text
    reader.scope.temporary[line] = count = reader.scope.temporary.get(line, 0) + 1
    return _MADE.sub(f"$(mktemp...{line}{f'.{count}' if count > 1 else ''})", text)


def _kept_as(reader: Reader, name: str) -> str:
    """Return the path of a file that commands name, from the folder in which the script is started."""
    if name.startswith("$(mktemp"):
        return os.path.normpath(name)
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
