"""The trainer's end of a weight update: pack tensors into a bounded buffer that the engine's workers can read.

There are two ways with the same steps: :class:`SharedMemory` goes through host memory into our own backend
(:mod:`gspo_hpc.engine.plugin`), :class:`CudaIpc` through GPU memory into vLLM's ``ipc`` backend. Beside what the
caller's stream holds, each holds its buffer only: slots of `bucket_bytes`, or of the largest tensor if that is larger.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from gspo_hpc.engine import compat

BACKEND = "gspo_hpc"  # the name under which the plugin registers with vLLM
_KEPT_BYTES = 512 << 20  # kept between updates: getting cleared pages from the kernel takes longer than the copy
_ALIGNMENT = 64  # bytes
_MAX_HEADER = 100 << 20  # bytes: the limit of the safetensors format itself

Shapes = Mapping[str, tuple[int, ...]]


def checkpoint_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in a Hugging Face folder of safetensors files, from their headers alone.

    Raises ValueError if there are no such files, or one of them is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with file.open("rb") as stream:
            try:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > _MAX_HEADER:
                    raise ValueError(f"its header has {length} bytes")
                header = json.loads(stream.read(length))
                shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
            except (struct.error, ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
    if not shapes:
        raise ValueError(f"{model_path} has no *.safetensors files: save the model with save_pretrained")
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}


def checked(
    tensors: Iterable[tuple[str, torch.Tensor]], shapes: Shapes, tied: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass the stream on, and check it against `shapes`.

    Raises ValueError at the first unknown, repeated or misshapen tensor, and at the end if some are missing. With
    `tied` the output layer is the embedding, so the stream and `shapes` may have ``lm_head.weight`` or not.
    """
    optional = {"lm_head.weight"} if tied else set()
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in shapes and name not in optional:
            raise ValueError(f"the model has no weight {name!r}")
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"weight {name!r} has shape {list(tensor.shape)}, but the model needs {list(shapes[name])}"
            )
        if name in seen:
            raise ValueError(f"weight {name!r} was sent twice")
        seen.add(name)
        yield name, tensor
    missing = sorted(shapes.keys() - seen - optional)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"weights were not sent: {', '.join(missing[:3])}{more}")


class Staging(Protocol):
    """A buffer into which buckets of tensors are packed."""

    backend: str  # vLLM's name for the receiving side
    slots: int  # 2: one bucket can be packed while the workers read the one before

    def init_info(self) -> dict[str, Any]:
        """Return what the workers are sent once, when the engine starts."""

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` still fits into the bucket; an empty bucket takes any tensor."""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the bucket."""

    def take(self) -> dict[str, Any]:
        """Return what the workers are sent for this bucket, and begin the next bucket in the next slot."""

    def rest(self) -> None:
        """Free what is not needed between two updates."""

    def close(self) -> None:
        """Free everything."""


class SharedMemory:
    """Two slots in an anonymous file (memfd), which ends with the last process that has it mapped.

    It is not bound by the size of /dev/shm, and only this user's processes can read it. `largest` is the size of the
    largest tensor to come, in bytes. It serves models on any device: workers copy from host memory, as from a
    checkpoint file.
    """

    backend = BACKEND
    slots = 2

    def __init__(self, largest: int, bucket_bytes: int) -> None:
        page = mmap.PAGESIZE
        self._slot_bytes = -(-max(largest, bucket_bytes) // page) * page
        self._budget = bucket_bytes
        self._size = 2 * self._slot_bytes
        self._descriptor = os.memfd_create("gspo_hpc-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, self._size)
        self._map = mmap.mmap(self._descriptor, self._size)
        self._slot = 0
        self._begin()

    def init_info(self) -> dict[str, Any]:
        """Return path and size of the buffer, for :class:`gspo_hpc.engine.plugin.InitInfo`."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._descriptor}", "size": self._size}

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` still fits into the bucket."""
        return self._used == 0 or self._used + tensor.nbytes <= self._budget

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the bucket."""
        assert self._used + tensor.nbytes <= self._slot_bytes, "larger than announced"
        offset = self._slot * self._slot_bytes + self._used
        place = torch.frombuffer(memoryview(self._map), dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        place.view(tensor.shape).copy_(tensor.detach())
        self._info["names"].append(name)
        self._info["dtypes"].append(str(tensor.dtype).removeprefix("torch."))
        self._info["shapes"].append(list(tensor.shape))
        self._info["offsets"].append(offset)
        self._used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def take(self) -> dict[str, Any]:
        """Return the bucket as the fields of :class:`gspo_hpc.engine.plugin.UpdateInfo`."""
        info = self._info
        self._slot = 1 - self._slot
        self._begin()
        return info

    def rest(self) -> None:
        """Return the memory of a large buffer to the system; the mappings of both sides stay valid."""
        if self._size > _KEPT_BYTES:
            os.ftruncate(self._descriptor, 0)
            os.ftruncate(self._descriptor, self._size)
        self._begin()

    def close(self) -> None:
        """Unmap the buffer."""
        self._map.close()
        os.close(self._descriptor)

    def _begin(self) -> None:
        self._used = 0
        self._info: dict[str, list[Any]] = {"names": [], "dtypes": [], "shapes": [], "offsets": []}


class CudaIpc:
    """One slot in GPU memory that the worker on the same GPU maps, for vLLM's ``ipc`` backend in its packed form.

    It is written against the sources of vLLM 0.22 and 0.32 and has not been run on a GPU yet. Handles are tuples with
    Python types in them, which vLLM carries to an engine's processes only if VLLM_ALLOW_INSECURE_SERIALIZATION is set.
    vLLM's senders are not used: they gather handles over the trainer's default process group, in which ranks without
    an engine do not take part. In vLLM 0.22, ``ipc`` imports Ray. Raises ImportError where that is missing.
    """

    backend = "ipc"
    slots = 1

    def __init__(self, bucket_bytes: int) -> None:
        self._packed_at_init = compat.ipc_is_packed_at_init()
        # Read by vLLM at every call, on both sides; only this process and its own children talk to one another.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        self._bytes = bucket_bytes
        self._buffer: torch.Tensor | None = None
        self._handle: dict[str, Any] = {}
        self._begin()

    def init_info(self) -> dict[str, Any]:
        """Return that tensors come packed; vLLM 0.22 wants to know that with every bucket instead."""
        return {"packed": True} if self._packed_at_init else {}

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` still fits into the bucket."""
        return self._used == 0 or self._used + tensor.nbytes <= self._bytes

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the bucket, without gaps, as vLLM reads it."""
        if self._buffer is None or tensor.nbytes > self._bytes:
            self._bytes = max(self._bytes, tensor.nbytes)
            self._export()
        assert self._buffer is not None and self._used + tensor.nbytes <= self._bytes
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._buffer[self._used : self._used + flat.numel()].copy_(flat)
        self._info["names"].append(name)
        self._info["dtype_names"].append(str(tensor.dtype).removeprefix("torch."))
        self._info["shapes"].append(list(tensor.shape))
        self._info["tensor_sizes"].append(flat.numel())
        self._used += flat.numel()

    def take(self) -> dict[str, Any]:
        """Return the bucket as the fields of vLLM's IPCWeightTransferUpdateInfo."""
        torch.cuda.current_stream().synchronize()
        info: dict[str, Any] = self._info | {"ipc_handles": self._handle}
        if not self._packed_at_init:
            info["packed"] = True
        self._begin()
        return info

    def rest(self) -> None:
        """Free the buffer. Each update exports a new one, because workers release an export when an update ends."""
        if self._buffer is not None:
            self._buffer = None
            torch.cuda.ipc_collect()
        self._begin()

    close = rest

    def _export(self) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        device = torch.cuda.current_device()
        self._buffer = torch.empty(self._bytes, dtype=torch.uint8, device="cuda")
        _, handle = reduce_tensor(self._buffer)
        self._handle = {str(torch.cuda.get_device_properties(device).uuid): handle}

    def _begin(self) -> None:
        self._used = 0
        self._info: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": [], "tensor_sizes": []}


def make_staging(platform: str, tensor_parallel_size: int, largest: int, bucket_bytes: int) -> Staging:
    """Return a buffer in GPU memory where the engine's one worker shares the trainer's GPU and vLLM can map it.

    Everywhere else it is in host memory. `largest` and `bucket_bytes` are in bytes.
    """
    if platform == "cuda" and tensor_parallel_size == 1:
        try:
            return CudaIpc(bucket_bytes)
        except ImportError as error:  # vLLM's module imports Ray in some versions
            print(
                f"weights are sent through host memory, because vLLM's ipc backend cannot be imported ({error})",
                flush=True,
            )
    return SharedMemory(largest, bucket_bytes)
