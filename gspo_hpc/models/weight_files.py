"""The files with the weights of a Hugging Face folder, a limit of their format, and which tensors are trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

SINGLE = "model.safetensors"  # all weights, where they fit into one file
INDEX = "model.safetensors.index.json"  # the names of several files, by tensor
MAX_HEADER = 100 << 20  # bytes of the header of a file: the limit of the safetensors library

_SCALES = "_scale_inv"  # behind the name of a tensor in block FP8: one number for each block
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PREDICTION = re.compile(
    r"(?:^|\.)mtp[._]"
)  # mtp.layers.0 (Qwen), model.mtp_layers.0 (MiMo), model.mtp_block.0 (Ernie)


def paths(folder: Path) -> list[Path]:
    """Return the files that hold the weights; others lie beside them, such as Mistral's consolidated.safetensors.

    Raises ValueError where there are none, or the index cannot be read.
    """
    index = folder / INDEX
    if index.exists():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is not readable: {type(error).__name__}: {error}") from error
    if not (folder / SINGLE).exists():
        raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}: save the model with save_pretrained")
    return [folder / SINGLE]


def is_trained(name: str, num_layers: int | None) -> bool:
    """Return True for a tensor that the trainer trains and sends to engines.

    Not trained are layers that predict several tokens, which follow the `num_layers` of the model or are called mtp,
    the scales of FP8 blocks, whose weights are trained in 16 bits, and rotary frequencies, which are computed.
    """
    if name.endswith((_SCALES, "rotary_emb.inv_freq")) or _PREDICTION.search(name):
        return False
    layer = _LAYER.search(name)
    return layer is None or num_layers is None or int(layer[1]) < num_layers
