"""The files with the weights of a Hugging Face folder: their names, and a limit of their format."""

from __future__ import annotations

SINGLE = "model.safetensors"  # all weights, where they fit into one file
INDEX = "model.safetensors.index.json"  # the names of several files, by tensor
MAX_HEADER = 100 << 20  # bytes of the header of a file: the limit of the safetensors library
