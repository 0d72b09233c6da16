"""The files with the weights of a Hugging Face folder, what their headers say, and which tensors are trained."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from gspo_hpc.system.text import MALFORMED, parse_json

SINGLE = "model.safetensors"  # all weights, where they fit into one file
INDEX = "model.safetensors.index.json"  # the names of several files, by tensor
_MAX_HEADER = 100 << 20  # bytes of the header of a file: the limit of the safetensors library

_WIDTHS = {
    **{"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16},
    **{"I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
}  # bits of an element
_SCALES = "_scale_inv"  # behind the name of a tensor in block FP8: one number for each block
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PREDICTION = re.compile(
    r"(?:^|\.)mtp[._]"
)  # mtp.layers.0 (Qwen), model.mtp_layers.0 (MiMo), model.mtp_block.0 (Ernie)


class TensorEntry(NamedTuple):
    """A tensor in the header of a safetensors file; its bytes are counted from the end of the header."""

    dtype: str  # as the format names it: BF16, F8_E4M3
    shape: tuple[int, ...]
    begin: int
    end: int


def paths(folder: Path) -> list[Path]:
    """Return the files that hold the weights; others lie beside them, such as Mistral's consolidated.safetensors.

    Raises ValueError where there are none, or the index cannot be read.
    """
    index = folder / INDEX
    if index.exists():
        try:
            return [folder / name for name in sorted(set(parse_json(index.read_text("utf-8"))["weight_map"].values()))]
        except (OSError, *MALFORMED) as error:
            raise ValueError(f"{index} is not readable: {type(error).__name__}: {error}") from error
    if not (folder / SINGLE).exists():
        raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}: save the model with save_pretrained")
    return [folder / SINGLE]


def size(folder: Path) -> int:
    """Return the bytes of all files that hold the weights. Raises ValueError as :func:`paths` does."""
    return sum(path.stat().st_size for path in paths(folder))


def most_elements(folder: Path) -> int:
    """Return the elements of the largest tensor. Raises ValueError as :func:`paths` and :func:`read_header` do."""
    entries = (entry for path in paths(folder) for entry in read_header(path).values())
    return max((math.prod(entry.shape) for entry in entries), default=0)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return what the header of a safetensors file says of each tensor.

    Raises ValueError if the file's length does not match its header, or a tensor's size does not match its shape.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(_MAX_HEADER, size - 8):
            raise ValueError(
                f"{path.name}: this is not a safetensors file, or it is cut off in its header ({size:,} bytes)"
            )
        try:
            raw: dict[str, Any] = parse_json(file.read(length))
            found = {name: _entry(one) for name, one in raw.items() if name != "__metadata__"}
        except MALFORMED as error:
            raise ValueError(f"{path.name}: the header is not readable: {type(error).__name__}: {error}") from None
    wanted = 8 + length + max((one.end for one in found.values()), default=0)
    if size != wanted:
        what = "is cut off" if size < wanted else "is longer than its header says"
        raise ValueError(f"{path.name}: the file {what}: it has {size:,} bytes, not {wanted:,}")
    end = 0
    for name, one in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if one.begin != end:
            raise ValueError(
                f"{path.name}: tensor {name} begins at byte {one.begin:,}, and the one before ends at {end:,}"
            )
        end = one.end
        num_bytes, width = one.end - one.begin, _WIDTHS.get(one.dtype)
        fits = width is None or num_bytes * 8 == math.prod(one.shape) * width
        if num_bytes < 0 or min(one.shape, default=0) < 0 or not fits:
            raise ValueError(f"{path.name}: tensor {name} has {num_bytes:,} bytes, which does not match its shape")
    return found


def _entry(raw: Any) -> TensorEntry:
    begin, end = raw["data_offsets"]
    return TensorEntry(str(raw["dtype"]), tuple(int(size) for size in raw["shape"]), int(begin), int(end))


def is_trained(name: str, num_layers: int | None) -> bool:
    """Return True for a tensor that the trainer trains and sends to engines.

    Not trained are layers that predict several tokens, which follow the `num_layers` of the model or are called mtp,
    the scales of FP8 blocks, whose weights are trained in 16 bits, and rotary frequencies, which are computed.
    """
    if name.endswith((_SCALES, "rotary_emb.inv_freq")) or _PREDICTION.search(name):
        return False
    layer = _LAYER.search(name)
    return layer is None or num_layers is None or int(layer[1]) < num_layers
