"""Split a wheel into parts, for machines that take only so much at once.

``python -m tools.acceptance.split_wheel WHEEL`` writes them.

The parts are zip files. Unpacked into one folder on PYTHONPATH, in any order, they are the installed package:
``for part in *.zip; do python3 -m zipfile -e "$part" FOLDER; done``.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc.system.text import MIB


def split(wheel: Path, out: Path, limit: int, without: Sequence[str] = ()) -> list[Path]:
    """Write the parts of a wheel, each of at most `limit` bytes, and return them; `without`: patterns of files.

    Raises ValueError for a file that alone is larger.
    """
    with zipfile.ZipFile(wheel) as source:
        kept = [one for one in source.infolist() if not any(fnmatch.fnmatch(one.filename, p) for p in without)]
        parts = _distribute(kept, limit)
        out.mkdir(parents=True, exist_ok=True)
        made = []
        for number, files in enumerate(parts, 1):
            path = out / f"{wheel.stem}.{number}-of-{len(parts)}.zip"
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as part:
                for one in files:
                    part.writestr(one, source.read(one), zipfile.ZIP_DEFLATED)
            made.append(path)
    return made


def _distribute(files: Sequence[zipfile.ZipInfo], limit: int) -> list[list[zipfile.ZipInfo]]:
    """Return files by part: the largest first, each into the first part that has room for it."""
    parts: list[list[zipfile.ZipInfo]] = []
    left: list[int] = []
    for one in sorted(files, key=lambda one: -one.compress_size):
        size = one.compress_size + 2 * len(one.filename.encode()) + 256  # with its headers
        if size > limit:
            raise ValueError(
                f"{one.filename} has {size / MIB:.1f} MiB, and a part {limit / MIB:.1f}: leave it out with --without"
            )
        index = next((index for index, room in enumerate(left) if size <= room), len(parts))
        if index == len(parts):
            parts.append([])
            left.append(limit)
        parts[index].append(one)
        left[index] -= size
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    """Split one wheel, and print its parts with their sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the parts (default: this one)")
    parser.add_argument("--mib", type=float, default=60.0, help="size of a part, at most (default: %(default)g)")
    parser.add_argument("--without", nargs="+", default=(), metavar="PATTERN", help="files that are left out")
    args = parser.parse_args(argv)
    try:
        made = split(args.wheel, args.out, int(args.mib * MIB), args.without)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"split_wheel: {args.wheel}: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(f"{path.stat().st_size / MIB:6.1f} MiB  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
