"""Read the files in which W&B and SwanLab keep records: LevelDB's log format behind a header of seven bytes.

The format: https://github.com/google/leveldb/blob/main/doc/log_format.md. Neither library offers a reader of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_BLOCK = 32768  # a record is cut into chunks, none of which crosses the border of a block
_HEADER = 7  # of the file, and of each chunk: checksum (4 bytes), length (2), kind (1)
_WHOLE, _FIRST, _LAST = 1, 2, 4  # kinds of chunks


def read(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in their order, up to one that a kill cut off."""
    with open(path, "rb") as file:
        file.seek(_HEADER)
        record = b""
        while True:
            left = _BLOCK - file.tell() % _BLOCK
            if left < _HEADER:
                file.seek(left, 1)
            head = file.read(_HEADER)
            length, kind = int.from_bytes(head[4:6], "little"), head[6] if len(head) == _HEADER else 0
            body = file.read(length)
            if kind == 0 or len(body) < length:
                return
            record = body if kind in (_WHOLE, _FIRST) else record + body
            if kind in (_WHOLE, _LAST):
                yield record
