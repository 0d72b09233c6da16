"""Unpack some files of a wheel, and read no more of it than these.

``python tools/lib/wheel_parts.py vllm==0.22.0 FOLDER 'vllm/*.py'`` asks pip where the wheel is, reads
the members whose names match one of the patterns, checks each against the wheel's RECORD and writes them below FOLDER.
A wheel of several hundred megabytes is mostly compiled code: its Python files are a few. Where the server cannot send
parts of a file, the whole wheel is read.
"""

from __future__ import annotations

import argparse
import base64
import csv
import fnmatch
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

BLOCK = 1 << 20  # bytes in one request: members that are wanted lie close to each other


class Remote(io.RawIOBase):
    """A file behind a URL, of which only the blocks that are read are fetched."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._blocks: dict[int, bytes] = {}
        self._position = 0
        self.fetched = 0  # bytes
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self.size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to another position."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next `size` bytes, or all that follow."""
        end = self.size if size is None or size < 0 else min(self.size, self._position + size)
        first, last = self._position // BLOCK, max(self._position, end - 1) // BLOCK
        data = b"".join(self._block(index) for index in range(first, last + 1))
        start = self._position - first * BLOCK
        data = data[start : start + max(0, end - self._position)]
        self._position += len(data)
        return data

    def _block(self, index: int) -> bytes:
        if index not in self._blocks:
            start = index * BLOCK
            if start >= self.size:
                return b""
            part = {"Range": f"bytes={start}-{min(self.size, start + BLOCK) - 1}"}
            with urllib.request.urlopen(urllib.request.Request(self._url, headers=part), timeout=60) as answer:
                data = answer.read()
                if answer.status != 206:  # the server sends whole files
                    self._blocks = {i: data[i * BLOCK : (i + 1) * BLOCK] for i in range(-(-len(data) // BLOCK))}
                else:
                    self._blocks[index] = data
                self.fetched += len(data)
        return self._blocks[index]


def find(requirement: str, python: str) -> str:
    """Return the URL that pip would take the wheel of `requirement` from, for this version of Python on Linux."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--no-deps", "--ignore-installed", "--ignore-requires-python"]
        options += ["--only-binary", ":all:", "--python-version", python, "--target", folder, "--report", str(report)]
        command = [sys.executable, "-P", "-m", "pip", "install", "-q", *options]
        subprocess.run([*command, requirement], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        (found,) = json.loads(report.read_text())["install"]
    return str(found["download_info"]["url"])


def unpack(wheel: zipfile.ZipFile, folder: Path, patterns: list[str]) -> int:
    """Write the members that match one of `patterns` below `folder`; return their number.

    Raises ValueError for a member that is not what the wheel's RECORD says.
    """
    (record,) = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
    digests = {row[0]: row[1] for row in csv.reader(wheel.read(record).decode().splitlines())}
    wanted = [m for m in wheel.infolist() if any(fnmatch.fnmatch(m.filename, pattern) for pattern in patterns)]
    for member in sorted(wanted, key=lambda m: m.header_offset):
        data = wheel.read(member)
        kind, _, digest = digests[member.filename].partition("=")
        if kind and base64.urlsafe_b64encode(hashlib.new(kind, data).digest()).rstrip(b"=").decode() != digest:
            raise ValueError(f"{member.filename} is not what the wheel's RECORD says")
        target = folder / member.filename
        if not target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{member.filename} would be written outside of {folder}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return len(wanted)


def main() -> None:
    """Unpack into a new folder, which gets its name when it is complete."""
    parser = argparse.ArgumentParser(description="Unpack some files of a wheel.")
    parser.add_argument("requirement", help="for example vllm==0.22.0")
    parser.add_argument("folder", type=Path, help="where the files go; nothing is done if it is there")
    parser.add_argument("patterns", nargs="+", help="names of the files, with * and ?")
    parser.add_argument("--python", default="3.12", help="the version of Python that the wheel is for (default: 3.12)")
    options = parser.parse_args()
    if options.folder.exists():
        return
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    remote = Remote(find(options.requirement, options.python))
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as beside:
        with zipfile.ZipFile(remote) as wheel:
            count = unpack(wheel, Path(beside, "files"), options.patterns)
        Path(beside, "files").rename(options.folder)
    print(f"{options.requirement}: {count} files, {remote.fetched >> 20} of {remote.size >> 20} MiB read", flush=True)


if __name__ == "__main__":
    main()
