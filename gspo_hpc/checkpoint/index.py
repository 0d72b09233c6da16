"""The index of a checkpoint's shards: which tensors there are, and in which file each piece of them lies.

torch keeps its index as a pickle, and to read a pickle is to run what its author put there. A checkpoint may come from
anybody, so ours is JSON, and every value is checked before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from gspo_hpc.system.text import MALFORMED, parse_json

NAME = "index.json"
VERSION = 2  # of a checkpoint's shards; 1 was torch's pickle
_FILE = re.compile(r"[A-Za-z0-9_]+\.distcp")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True)
class Place:
    """The place of a piece of a tensor: a file of the folder, and bytes in it."""

    relative_path: str
    offset: int
    length: int


def write(shards: Path, tensors: Mapping[str, Any], places: Mapping[MetadataIndex, Place]) -> None:
    """Write the index of the folder `shards`, from torch's metadata of its tensors and the places of their pieces."""
    found = {}
    for key, tensor in tensors.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{key} is no tensor: only tensors are saved"
        pieces = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            begin = [list(chunk.offsets), list(chunk.sizes)]
            pieces.append([*begin, place.relative_path, place.offset, place.length])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        found[key] = {"dtype": dtype, "shape": list(tensor.size), "pieces": pieces}
    (shards / NAME).write_text(json.dumps({"version": VERSION, "tensors": found}), "utf-8")


def read(shards: Path) -> Metadata:
    """Return the index of the folder `shards` as torch's metadata, with each :class:`Place` as its storage data.

    Raises ValueError where it is not one of ours.
    """
    path = shards / NAME
    if not path.is_file():
        older = "; it was written by an earlier version" if (shards / ".metadata").exists() else ""
        raise ValueError(f"{shards} holds no sharded weights: {NAME} is missing{older}")
    try:
        content = parse_json(path.read_text("utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']!r}, and {VERSION} is read")
        metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta())
        for key, tensor in content["tensors"].items():
            _add(metadata, key, tensor)
    except MALFORMED as error:
        raise ValueError(f"{path} is not an index of shards: {type(error).__name__}: {error}") from None
    return metadata


def _add(metadata: Metadata, key: str, tensor: Mapping[str, Any]) -> None:
    chunks = []
    for begin, sizes, file, offset, length in tensor["pieces"]:
        if not _FILE.fullmatch(file):
            raise ValueError(f"{file!r} is no name of a shard")
        chunk = ChunkStorageMetadata(_sizes(begin), _sizes(sizes))
        start, count = _sizes([offset, length])
        metadata.storage_data[MetadataIndex(key, chunk.offsets)] = Place(file, start, count)
        chunks.append(chunk)
    properties = TensorProperties(dtype=_DTYPES[tensor["dtype"]])
    metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, _sizes(tensor["shape"]), chunks)


def _sizes(given: Any) -> torch.Size:
    if not isinstance(given, list) or not all(type(size) is int and 0 <= size < 2**63 for size in given):
        raise ValueError(f"{given!r} is no list of sizes")
    return torch.Size(given)
