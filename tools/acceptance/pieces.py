"""Cut a wheel into pieces, for machines that take only so much at once: ``python -m tools.acceptance.pieces WHEEL``.

The pieces are zip files. Unpacked into one folder on PYTHONPATH, in any order, they are the installed package:
``for piece in *.zip; do python3 -m zipfile -e "$piece" FOLDER; done``.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc.system.text import MIB


def cut(wheel: Path, out: Path, limit: int, without: Sequence[str] = ()) -> list[Path]:
    """Write the pieces of a wheel, each of at most `limit` bytes, and return them; `without`: patterns of files.

    Raises ValueError for a file that alone is larger.
    """
    with zipfile.ZipFile(wheel) as source:
        kept = [one for one in source.infolist() if not any(fnmatch.fnmatch(one.filename, p) for p in without)]
        pieces = _distribute(kept, limit)
        out.mkdir(parents=True, exist_ok=True)
        made = []
        for number, files in enumerate(pieces, 1):
            path = out / f"{wheel.stem}.{number}-of-{len(pieces)}.zip"
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as piece:
                for one in files:
                    piece.writestr(one, source.read(one), zipfile.ZIP_DEFLATED)
            made.append(path)
    return made


def _distribute(files: Sequence[zipfile.ZipInfo], limit: int) -> list[list[zipfile.ZipInfo]]:
    """Return files by piece: the largest first, each into the first piece that has room for it."""
    pieces: list[list[zipfile.ZipInfo]] = []
    left: list[int] = []
    for one in sorted(files, key=lambda one: -one.compress_size):
        size = one.compress_size + 2 * len(one.filename.encode()) + 256  # with its headers
        if size > limit:
            raise ValueError(
                f"{one.filename} has {size / MIB:.1f} MiB, and a piece {limit / MIB:.1f}: leave it out with --without"
            )
        index = next((index for index, room in enumerate(left) if size <= room), len(pieces))
        if index == len(pieces):
            pieces.append([])
            left.append(limit)
        pieces[index].append(one)
        left[index] -= size
    return pieces


def main(argv: Sequence[str] | None = None) -> int:
    """Cut one wheel, and print its pieces with their sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pieces (default: this one)")
    parser.add_argument("--mib", type=float, default=60.0, help="size of a piece, at most (default: %(default)g)")
    parser.add_argument("--without", nargs="+", default=(), metavar="PATTERN", help="files that are left out")
    args = parser.parse_args(argv)
    try:
        made = cut(args.wheel, args.out, int(args.mib * MIB), args.without)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"pieces: {args.wheel}: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(f"{path.stat().st_size / MIB:6.1f} MiB  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
