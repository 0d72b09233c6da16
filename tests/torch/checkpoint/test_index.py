"""The index of a checkpoint, which somebody else may have written, is refused where a value in it cannot be.

Takes a second. It would catch an offset or a size that reads what lies outside a tensor's piece.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.checkpoint import index

WRONG = (-1, -(2**63), 2**63, 1.0, True, "1", None)
PLACES = {  # of one of our values in the index
    "shape": ("shape", 1),
    "offset of a piece in its tensor": ("pieces", 0, 0, 1),
    "size of a piece": ("pieces", 0, 1, 0),
    "offset in the file": ("pieces", 0, 3),
    "length in the file": ("pieces", 0, 4),
}


def written(folder: Path, change: tuple[Any, ...] = (), value: object = None) -> Path:
    """A folder of shards whose index has one tensor in one piece, with one value changed."""
    tensor: Any = {"dtype": "float32", "shape": [4, 8], "pieces": [[[0, 0], [4, 8], "__0_0.distcp", 16, 128]]}
    if change:
        *path, last = change
        holder = tensor
        for step in path:
            holder = holder[step]
        holder[last] = value
    (folder / index.NAME).write_text(json.dumps({"version": index.VERSION, "tensors": {"w": tensor}}))
    return folder


def test_a_right_one_is_read(tmp_path: Path) -> None:
    found = index.read(written(tmp_path))
    (place,) = found.storage_data.values()
    assert place == index.Place("__0_0.distcp", 16, 128)
    assert index.read(written(tmp_path, PLACES["offset in the file"], 2**63 - 1))


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("where", PLACES)
def test_a_value_that_is_no_size_is_refused(where: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"index.json is not an index of shards: ValueError: .* is no list of sizes$"):
        index.read(written(tmp_path, PLACES[where], value))


@pytest.mark.parametrize("name", ["../x.distcp", "/x.distcp", "x.pt", "", "a\n.distcp", "x.distcp\n"])
def test_a_file_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no name of a shard"):
        index.read(written(tmp_path, ("pieces", 0, 2), name))
