"""Memory of this rank that a worker of vLLM maps: on the host through a file without a name, on a GPU through CUDA IPC.

Both are told to workers in one form, an *address*: plain values, of which :func:`map_buffer` makes a tensor of the same
bytes. Nothing that travels has to be unpickled.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from typing import Any, Protocol

import torch

from gspo_hpc.engine import compat

Address = dict[str, Any]  # plain values
_KEPT_BYTES = 512 << 20  # kept between updates: getting cleared pages from the kernel takes longer than the copy


class WeightBuffer(Protocol):
    """Bytes that one worker can read."""

    def reserve(self, size: int) -> torch.Tensor:
        """Return all bytes, at least `size`; before it grows, :meth:`release_unused` is called."""

    def address(self) -> Address:
        """Return where a worker finds these bytes, after all writes have ended."""

    def release_unused(self, *, unmapped: bool) -> None:
        """Free what is not needed between two updates.

        `unmapped`: the worker has said that it unmapped the memory; else it is dead, or was never told of it.
        """

    def close(self) -> None:
        """Free everything."""


class HostBuffer:
    """An anonymous file (memfd), which ends with the last process that has it mapped.

    It is not bound by the size of /dev/shm, and only this user's processes can read it. It serves models on any device:
    workers copy from host memory, as from a checkpoint file.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("gspo_hpc-weights", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._token = secrets.token_hex(8)  # the next file may get this one's path
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> torch.Tensor:
        """See WeightBuffer. What was there stays, for it is the same file."""
        if self._bytes.numel() < size:
            size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._descriptor, size)
            self._bytes = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        return self._bytes

    def address(self) -> Address:
        """See WeightBuffer."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return {"path": path, "size": self._bytes.numel(), "token": self._token}

    def release_unused(self, *, unmapped: bool) -> None:
        """Return the memory of a large file to the system; the mappings of both sides stay valid."""
        if (size := self._bytes.numel()) > _KEPT_BYTES:
            os.ftruncate(self._descriptor, 0)
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Unmap the file, once no tensor in it is left."""
        self._bytes = self._bytes.new_empty(0)
        self._close()


class CudaBuffer:
    """GPU memory that exists during an update only: workers on the same GPU map it, and unmap it when the update ends.

    Every export is counted: torch frees memory once the worker reports that it has unmapped it. An export is mapped
    once and unmapped once, which keeps that count right in every version of vLLM; if the worker died before it said so,
    this side corrects the count.
    """

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None
        self._exported: Address | None = None

    def reserve(self, size: int) -> torch.Tensor:
        """See WeightBuffer."""
        if self._bytes is None or self._bytes.numel() < size:
            assert self._exported is None, "whether the worker has unmapped it is not known here"
            self._bytes = None
            with compat.ordinary_segments():
                self._bytes = torch.empty(size, dtype=torch.uint8, device="cuda")
        return self._bytes

    def address(self) -> Address:
        """See WeightBuffer."""
        assert self._bytes is not None
        torch.cuda.current_stream().synchronize()
        if self._exported is None:
            self._exported = compat.export_memory(self._bytes)
        return self._exported

    def release_unused(self, *, unmapped: bool) -> None:
        """See WeightBuffer."""
        exported, self._exported, self._bytes = self._exported, None, None
        if exported is not None:
            if not unmapped:
                compat.release_ipc_counter(bytes.fromhex(exported["counter"]), exported["counter_offset"])
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # the engine, a process of its own, repacks weights in this memory

    def close(self) -> None:
        """See WeightBuffer."""
        self.release_unused(unmapped=False)


def map_buffer(address: Address) -> torch.Tensor:
    """Return the bytes at an address of another process. Raises PermissionError if they belong to another user."""
    return _file(address) if "path" in address else compat.map_export(address)


def view(memory: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
    """Return a part as one tensor of its shape: a view of the memory, or a copy where its elements lie apart."""
    flat = memory[part["offset"] :]
    dtype = getattr(torch, part["dtype"])
    flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return flat.as_strided(part["size"], part["stride"]).reshape(part["shape"])


def _file(address: dict[str, Any]) -> torch.Tensor:
    """Map the file of a rank. Raises PermissionError if it belongs to another user."""
    descriptor = os.open(address["path"], os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_size < address["size"]:
            raise PermissionError(f"{address['path']} belongs to another user, or is smaller than its sender says")
        return torch.frombuffer(mmap.mmap(descriptor, address["size"]), dtype=torch.uint8)
    finally:
        os.close(descriptor)
