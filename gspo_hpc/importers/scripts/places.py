"""Find the files that a script names: in the folder of its commands, beside it, or at the root of its repository."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from gspo_hpc.importers.scripts.scope import Scope, Unknown, Value, is_unset

# What a path may begin with that stands for a folder around the script.
_HERE = re.compile(r"^(\$\(pwd\)|\$\{?PWD\}?|\$\{?SLURM_SUBMIT_DIR\}?|\$\(git\.\.\.\))/")
_TOPS = (".git", "LICENSE", "LICENSE.txt", "LICENSE.md", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")
_LARGEST = 1 << 20  # bytes
# Among the values of a scope, as names that no variable can have: the folder of commands, and that in which sbatch was
# called, if it is not the one in which the script was started.
FOLDER, SUBMITTED = "folder of commands", "folder of submission"
_PRESENT = re.compile(r"(?:\$\(pwd\)|\$\{?PWD\}?)(?:/|$)")
_WITHIN = re.compile(r"\$\(pwd\)|\$(?:PWD\b|\{PWD\})")
_SUBMIT_DIR = re.compile(r"\$\{?SLURM_SUBMIT_DIR\b\}?(?:/|$)")
_READ = (".yaml", ".yml", ".py")
_OF_CD = ("-L", "-P", "-e", "-@", "--")


class Files(dict[str, str | None]):
    """Texts of the files that a script has written, None for one that is changed, as commands in one folder name them.

    Also what is to be told if one of these commands reads a file.
    """

    def __init__(
        self,
        texts: Mapping[str, str | None] | Iterable[tuple[str, str | None]] = (),
        script: Path | None = None,
        folder: Value = "",
        touched: Mapping[str, str] | None = None,
        told: dict[str, None] | None = None,
    ) -> None:
        super().__init__(texts)
        self.script = script
        self.folder = folder  # of the commands
        self.touched = touched or {}  # file, or pattern of names -> the command that may change it
        self.told: dict[str, None] = {} if told is None else told  # sentences on files that have been read

    def note(self, name: str, path: Path) -> None:
        """Note what makes it doubtful that a file which is read is the one that a command names.

        Raises ValueError if a condition that is not known decides the folder, and several have a file of the name.
        """
        if self.script is None or os.path.isabs(name):
            return
        refuse_several(self.script, self.folder, name)
        if not isinstance(self.folder, str):
            assert isinstance(self.folder, Unknown)
            self.told[f"{name} is read as it lies beside the script: the folder of the commands {self.folder.why}"] = (
                None
            )
        elif self.folder not in ("", ".") and not _lies_in(self.script, self.folder, _HERE.sub("", name), path):
            why = f"cd {self.folder} leads to a folder that is not at hand, or has no such file"
            self.told[f"{name} is read as it lies beside the script: {why}"] = None
        plain = plain_path(name)
        for one in [one for one in self.touched if plain not in self and (one == plain or fnmatch(plain, one))]:
            self.told[f"{name} is read as it lies here: {self.touched[one]} may change it"] = None


def _lies_in(script: Path, folder: str, name: str, path: Path) -> bool:
    """Tell whether a file lies where commands in a folder look for it."""
    roots = [Path()] if os.path.isabs(folder) else [*around(script.parent), Path()]
    places = (os.path.abspath(root / folder / name) for root in roots)
    return os.path.abspath(path) in places


def refuse_several(script: Path, folder: Value | None, name: str) -> None:
    """Raise ValueError if a condition that is not known decides the folder, and several have a file of the name."""
    if isinstance(folder, Unknown) and folder.might and not os.path.isabs(name):
        perhaps = [script, *(within(script, one) for one in folder.might)]
        found = {path.resolve() for one in perhaps if (path := find_file(name, one)) is not None}
        if len(found) > 1:
            why = f"the folder of the commands {folder.why}"
            raise ValueError(f"{name} may be any of {len(found)} files: {why}: write cd without the condition")


def plain_path(name: str) -> str:
    """Return a path as the files that a script writes are known by."""
    return os.path.normpath(_HERE.sub("", name))


def is_pattern(path: str) -> bool:
    """Tell whether the name of a file that a script changes is a pattern: which files have it is not known."""
    return "*" in path or "?" in path


def written_text(name: str, written: Mapping[str, str | None]) -> str | None:
    """Return the text of a file that a script has written, None if it has not. Raises ValueError if it is not known."""
    path = plain_path(name)
    patterns = (one for one, text in written.items() if text is None and is_pattern(one))
    if written.get(path, "") is None or (path not in written and any(fnmatch(path, one) for one in patterns)):
        raise ValueError(
            f"{name} is changed by the script in a way that is not followed: put its final text beside the script, and "
            "take out the commands that write it"
        )
    return written.get(path)


def text_at(name: str, script: Path | None, written: Mapping[str, str | None]) -> str | None:
    """Return the text of a file that a script has written, or that is at hand; None if it is neither.

    Raises ValueError for one that the script changes in a way that is not known, and OSError or UnicodeError for one
    that cannot be read as text.
    """
    if (text := written_text(name, written)) is not None:
        return text
    path = found_for(name, script, written)
    return None if path is None else path.read_text(encoding="utf-8")


def found_for(name: str, script: Path | None, written: Mapping[str, str | None]) -> Path | None:
    """Return the file of this name, None if it is not at hand; what is doubtful of it is noted in `written`.

    Raises ValueError if it may be one of several.
    """
    path = find_file(name, script)
    if path is not None and isinstance(written, Files):
        written.note(name, path)
    return path


def find_file(name: str, script: Path | None) -> Path | None:
    """Return the file of this name, None if it is not at hand. `script`: the file that names it."""
    name = _HERE.sub("", name)
    if is_unset(name) or not name or "\0" in name:
        return None
    folders = [] if script is None else around(script.parent)
    for place in [Path(name)] if Path(name).is_absolute() else [*(root / name for root in folders), Path(name)]:
        try:
            if place.is_file() and place.stat().st_size <= _LARGEST:
                return place
        except OSError:
            continue
    return None


def within(script: Path, folder: str) -> Path:
    """Return a file beside which to look for those that commands in a folder name: the script itself if it has none."""
    roots = [Path(folder)] if os.path.isabs(folder) else [root / folder for root in [*around(script.parent), Path()]]
    return next((root / script.name for root in roots if folder and root.is_dir()), script)


def beside(script: Path, values: Mapping[str, Value], name: str) -> Path:
    """Return the file beside which a name is looked for where commands run.

    Raises ValueError if a condition that is not known decides their folder, and several have a file of the name.
    """
    refuse_several(script, values.get(FOLDER), name)
    return within(script, folder_of(values, name))


def written_out(words: Sequence[str], values: Mapping[str, Value], script: Path | None) -> Iterator[str]:
    """Yield the words of a command, with the paths of files in $SLURM_SUBMIT_DIR if it runs in another folder."""
    submitted = folder_of(values, "$SLURM_SUBMIT_DIR")
    apart = script is not None and submitted != folder_of(values)
    for word in words:
        option, equals, name = word.rpartition("=")
        file = script if apart and _SUBMIT_DIR.match(name) and name.endswith(_READ) else None
        found = find_file(name, within(file, submitted)) if file else None
        yield f"{option}{equals}{found}" if found else word


def around(folder: Path) -> list[Path]:
    """Return a folder and those above it, up to the root of its repository; only the folder if it lies in none.

    An archive of a repository has no .git, but what stands at the top of one.
    """
    above = [folder.absolute(), *folder.absolute().parents]
    tops = [number for top in _TOPS for number, place in enumerate(above) if (place / top).exists()]
    root = tops[0] if tops else 0
    return [folder, *above[1 : root + 1]]


def there(name: str, script: str) -> bool | None:
    """Tell whether a file is there, None for one whose path does not begin with the script's own folder.

    Any other path is one of the machine or the folder in which the script runs, and not of those where it is converted.
    """
    folder = os.path.dirname(script)
    if not folder or is_unset(name) or not os.path.normpath(name).startswith(os.path.join(folder, "")):
        return None
    return os.path.isfile(name)


def enter(scope: Scope, name: str, rest: Sequence[str]) -> None:
    """Follow cd or one of its like; relative to a folder that is not known, only an absolute one is known again."""
    words = [word for word in rest if word not in _OF_CD]
    searched = scope.values.get("CDPATH", "") != "" and len(words) == 1 and not words[0].startswith((".", "/"))
    for key in [key for key, value in scope.values.items() if isinstance(value, str) and _WITHIN.search(value)]:
        if key.isidentifier():  # it would name the folder of now
            scope.values[key] = Unknown("has the folder in which commands ran before cd, which is not followed")
    scope.values |= moved(scope.values, words[0] if len(words) == 1 and name != "popd" else "-")
    if searched and name != "popd":
        scope.values[FOLDER] = Unknown(f"({name} {words[0]}) depends on CDPATH, which is not followed")
    scope.values.pop("PWD", None)
    scope.values.pop("OLDPWD", None)


def moved(values: Mapping[str, Value], *folders: str) -> dict[str, Value]:
    """Return the folders among the values of a scope, after these have been entered one by one."""
    found = {name: values[name] for name in (FOLDER, SUBMITTED) if name in values}
    for to in folders:
        before = found.get(FOLDER, "")
        if match := _SUBMIT_DIR.match(to):
            before = found.get(SUBMITTED, "")
        to = to[match.end() :] if (match := match or _PRESENT.match(to)) else to
        if is_unset(to) or is_pattern(to) or to.startswith(("-", "+", "~")):
            found[FOLDER] = Unknown(f"(cd {to}) is not known before the script runs")
        elif os.path.isabs(to) or isinstance(before, str):
            found[FOLDER] = os.path.normpath(os.path.join(before if isinstance(before, str) else "", to))
        else:
            found[FOLDER] = before
    return found


def folder_of(values: Mapping[str, Value], name: str = "") -> str:
    """Return the folder in which a name is looked for, relative to that in which the script was started.

    It is "" for that one, and if it is not known.
    """
    held = values.get(SUBMITTED if _SUBMIT_DIR.match(name) else FOLDER, "")
    return held if isinstance(held, str) and held != "." else ""
