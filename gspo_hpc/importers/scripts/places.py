"""Find the files that a script names: beside it, or from the root of the repository in which it lies."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from pathlib import Path

from gspo_hpc.importers.scripts.scope import is_unset

# What a path may begin with that stands for a folder around the script.
_HERE = re.compile(r"^(\$\(pwd\)|\$\{?PWD\}?|\$\{?SLURM_SUBMIT_DIR\}?|\$\(git\.\.\.\))/")
_TOPS = (".git", "LICENSE", "LICENSE.txt", "LICENSE.md", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")
_LARGEST = 1 << 20  # bytes


def plain_path(name: str) -> str:
    """Return a path as the files that a script writes are known by."""
    return os.path.normpath(_HERE.sub("", name))


def written_text(name: str, written: Mapping[str, str | None]) -> str | None:
    """Return the text of a file that a script has written, None if it has not. Raises ValueError if it is not known."""
    path = plain_path(name)
    if path in written and written[path] is None:
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
    path = find_file(name, script)
    return None if path is None else path.read_text(encoding="utf-8")


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
