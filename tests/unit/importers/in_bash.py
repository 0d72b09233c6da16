"""Run a script in bash, and follow it: what `swift` is given, in the one and by the other."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from gspo_hpc.importers.scripts.shell import follow

Given = list[tuple[str, ...]]


def given_to_swift(script: str, folder: Path, files: Mapping[str, str]) -> tuple[Given, Given]:
    """Return the arguments of each call of `swift` as convert reads them, and as bash passes them.

    `files` are programs and scripts beside the script.
    """
    swift = f'#!/bin/sh\nprintf "%s\\0" "$@" >> {folder}/told\nprintf "\\001\\0" >> {folder}/told\n'
    for name, text in {**files, "swift": swift}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    subprocess.run(
        ["bash", "-c", script], capture_output=True, timeout=20, check=False, cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
    )  # fmt: skip
    told = [tuple(part.split("\0")[:-1]) for part in (folder / "told").read_text().split("\1\0")[:-1]]
    read = [one.words[1:] for one in follow(script, folder, "run.sh").commands if one.words[0] == "swift"]
    return read, told
