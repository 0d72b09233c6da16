"""Read and write a Hugging Face folder: safetensors files one tensor at a time, tokenizer and configuration.

The safetensors library saves only dictionaries that are whole in memory, so files are written here, as the format's
specification says (github.com/huggingface/safetensors): eight bytes with the length of the header, the header (JSON:
dtype, shape and offsets of every tensor), then the tensors.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gspo_hpc.models.weight_files import INDEX, SINGLE
from gspo_hpc.system.text import GIB, parse_json, shortened

MAX_FILE_BYTES = 2 * GIB  # limit of a safetensors file
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Shapes = Sequence[tuple[str, tuple[int, ...]]]  # names and shapes of all tensors, in their order


class Folder:
    """The safetensors files of a Hugging Face folder, whose tensors are read by name.

    Raises ValueError where the folder has no such files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = self.path / INDEX
        if index.exists():
            files: dict[str, str] = parse_json(index.read_text("utf-8"))["weight_map"]
        elif (self.path / SINGLE).exists():
            with _opened(self.path / SINGLE) as opened:
                files = dict.fromkeys(opened.keys(), SINGLE)
        else:
            raise ValueError(f"model.path {path} has no {SINGLE} and no {INDEX}")
        self._files = files

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._files)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as it is stored; ValueError where there is none of that name."""
        if name not in self._files:
            raise ValueError(f"model.path {self.path}: tensor {name} is missing")
        with _opened(self.path / self._files[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file; ValueError of one line for another one."""
    with _opened(path) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dictionary)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file of tensors that are few enough to be in memory together."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; ValueError of one line for another one, and for one that is cut off."""
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or it is cut off: {error}") from None


def write(
    out: Path,
    source: str | Path,
    shapes: Shapes,
    dtype: torch.dtype,
    tensors: Iterator[tuple[str, torch.Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `tensors`, in the order of `shapes`, with the configuration and tokenizer of the folder `source`.

    `out` appears whole or not at all; one that exists and is not empty is refused with ValueError.
    """
    with whole(out) as staging:
        _write_tensors(staging, shapes, dtype, tensors, max_file_bytes)
        for path in sorted(Path(source).iterdir()):
            if path.is_file() and not path.name.startswith("model") and path.suffix not in (".safetensors", ".bin"):
                shutil.copyfile(path, staging / path.name)
        settings = json.loads((staging / "config.json").read_text("utf-8"))
        settings.pop("torch_dtype", None)
        settings.pop("quantization_config", None)  # of weights that were trained, and are written, in `dtype`
        settings["dtype"] = str(dtype).removeprefix("torch.")
        (staging / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` at the end of the block, unless it raises.

    Raises ValueError where `out` exists and is not empty, or cannot be made.
    """
    try:
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} exists and is not empty: give another folder, or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-")
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}; give another folder") from error
    with beside as name:
        staging = Path(name) / out.name
        staging.mkdir()
        yield staging
        if out.exists():
            out.rmdir()
        staging.rename(out)


def tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a folder as transformers loads it, with its chat template; no hub is asked.

    Raises ValueError with the folder where transformers cannot read its files: what it raises itself names none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        files = "tokenizer.json, tokenizer_config.json, chat_template.jinja"
        why = shortened(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ValueError(f"transformers cannot read the tokenizer of {path} ({files}): {why}") from error


def configuration(path: str | Path) -> Any:
    """Return the configuration of a folder as transformers loads it; no hub is asked."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(path), local_files_only=True)


def _write_tensors(
    folder: Path, shapes: Shapes, dtype: torch.dtype, tensors: Iterator[tuple[str, torch.Tensor]], limit: int
) -> None:
    files = _deal(shapes, dtype, limit)
    index: dict[str, str] = {}
    for number, entries in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        index |= dict.fromkeys((name for name, _ in entries), file)
        with (folder / file).open("wb") as stream:
            stream.write(_header(entries, dtype))
            for name, shape in entries:
                given, tensor = next(tensors)
                assert (given, tuple(tensor.shape), tensor.dtype) == (name, shape, dtype), (given, tensor.shape, name)
                stream.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    assert next(tensors, None) is None, "more tensors than were announced"
    if len(files) > 1:
        total = sum(_nbytes(shape, dtype) for _, shape in shapes)
        content = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / INDEX).write_text(content + "\n", "utf-8")


def _deal(shapes: Shapes, dtype: torch.dtype, limit: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return the tensors of each file, in order: as many as fit into `limit` bytes, but at least one."""
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, shape in shapes:
        size = _nbytes(shape, dtype)
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append((name, shape))
        used += size
    return files


def _header(entries: Shapes, dtype: torch.dtype) -> bytes:
    ends = list(itertools.accumulate((_nbytes(shape, dtype) for _, shape in entries), initial=0))
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, shape), place in zip(entries, itertools.pairwise(ends), strict=True):
        content[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": list(place)}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
