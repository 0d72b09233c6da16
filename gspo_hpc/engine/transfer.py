"""The trainer's end of a weight update: what a stream of parts must hold, and how it reaches an engine's workers.

Every rank on an engine's GPUs puts the parts into memory of its own (:mod:`gspo_hpc.engine.weight_buffers`), which the
worker on the same GPU maps: two halves, of which one is filled while the worker reads the other. The first of these
ranks, the engine's owner, tells the engine of each half; the others only keep in step with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from gspo_hpc.engine.weight_buffers import Address, CudaBuffer, HostBuffer, WeightBuffer
from gspo_hpc.models import weight_files
from gspo_hpc.ops.weight_parts import ALIGNMENT, Part, Stream

BACKEND = "gspo_hpc"  # the name under which the plugin registers with vLLM

Shapes = Mapping[str, tuple[int, ...]]


def checkpoint_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a Hugging Face folder that is trained, from the headers of its files.

    Raises ValueError if there are no such files, or one of them is damaged.
    """
    settings = json.loads((model_path / "config.json").read_text("utf-8"))
    text = settings.get("text_config")
    num_layers = (text if isinstance(text, dict) else settings).get("num_hidden_layers")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files.paths(model_path):
        try:
            shapes |= {name: entry.shape for name, entry in weight_files.read_header(file).items()}
        except FileNotFoundError:
            raise ValueError(f"{model_path}: {file.name} is missing, and the index names it") from None
        except ValueError as error:
            raise ValueError(f"{model_path}: {error}") from None
    return {name: shape for name, shape in shapes.items() if weight_files.is_trained(name, num_layers)}


class StreamCheck:
    """A check that a stream is this model's: every tensor once, in its shape.

    With `tied` the output layer is the embedding, so the stream and `shapes` may have ``lm_head.weight`` or not.
    """

    def __init__(self, shapes: Shapes, tied: bool) -> None:
        self._shapes, self._optional = shapes, {"lm_head.weight"} if tied else set()
        self._seen: set[str] = set()

    def add(self, part: Part) -> None:
        """Raise ValueError for an unknown, repeated or misshapen tensor."""
        shape = part.shape[1:] if part.experts else part.shape
        for name in part.names():
            needed = self._shapes.get(name)
            if needed is None and name not in self._optional:
                raise ValueError(f"the model has no weight {name!r}")
            if needed is not None and shape != needed:
                raise ValueError(f"weight {name!r} has shape {list(shape)}, but the model needs {list(needed)}")
            if name in self._seen:
                raise ValueError(f"weight {name!r} was sent twice")
            self._seen.add(name)

    def finish(self) -> None:
        """Raise ValueError if some tensors are missing."""
        missing = sorted(self._shapes.keys() - self._seen - self._optional)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(f"weights were not sent: {', '.join(missing[:3])}{more}")


class Peers(Protocol):
    """The ranks on the GPUs of one engine, its owner first."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all, in order. Collective."""

    def wait(self) -> None:
        """Return when all have come here. Collective."""


class EngineEndpoint(Protocol):
    """The engine, as the owner of it sees it; an exception of any call ends the update for it."""

    def begin(self) -> None:
        """Have the engine expect all weights."""

    def check(self, part: Part) -> None:
        """Take note of a part."""

    def post(self, bucket: dict[str, Any]) -> None:
        """Have the workers load a bucket, and return at once."""

    def wait_loaded(self) -> None:
        """Wait until the workers have loaded the last bucket that was posted."""

    def finish(self) -> None:
        """Wait until the engine computes with what it was sent."""

    def kill(self) -> None:
        """End all of the engine's processes after an error, before memory that they map is freed."""


class WeightSender:
    """This rank's part in weight updates, with memory that is kept from one to the next."""

    def __init__(self, platform: str, workers: int, bucket_bytes: int, peers: Peers | None = None) -> None:
        """`workers` is the engine's number of workers; `peers` are the ranks on their GPUs, if there are several."""
        gpu = platform == "cuda" and (workers == 1 or peers is not None)
        self._buffer: WeightBuffer = CudaBuffer() if gpu else HostBuffer()
        self._bucket_bytes, self._peers = bucket_bytes, peers

    def send(self, stream: Stream, receiver: EngineEndpoint | None = None) -> None:
        """Pass the whole stream on, also where `receiver` fails on the way; raise its error then.

        `receiver` is None where another rank owns the engine, or it is dead. The ranks on an engine's GPUs make the
        same calls in the same order, whatever happens to the engine: producing the stream is a collective of all ranks.
        """
        transfer = _Transfer(self._buffer, self._bucket_bytes, self._peers, receiver)
        transfer.run(stream)
        if transfer.error is not None:
            raise transfer.error

    def close(self) -> None:
        """Free all memory."""
        self._buffer.close()


class _Transfer:
    """One weight update: memory for a stream, in two halves; a half that is full is passed on."""

    def __init__(self, buffer: WeightBuffer, half: int, peers: Peers | None, receiver: EngineEndpoint | None) -> None:
        self.error: Exception | None = None  # the first that `receiver` raised
        self._buffer, self._peers, self._receiver = buffer, peers, receiver
        self._half = -(-half // ALIGNMENT) * ALIGNMENT
        self._bytes: torch.Tensor | None = None
        self._addresses: list[Address] = []  # of all peers, for the workers
        self._begin = self._used = 0  # of the half that is being filled, in bytes
        self._entries: list[dict[str, Any]] = []

    def run(self, stream: Stream) -> None:
        """Take the stream to its end."""
        self._tell("begin")
        self._fill(stream)
        self._pass_on(unmap=True, last=True)
        self._release()
        self._tell("finish")

    def _fill(self, stream: Stream) -> None:
        """Take all parts; on return, nothing here views the memory any more."""
        for parts in stream(self):
            for part in parts:
                self._tell("check", part)
                self._entries.append(self._entry(part))
                del part
            del parts  # else they would keep this memory, if it has to be freed for larger parts

    def reserve(self, largest: int) -> None:
        """See Memory. Both halves are taken at once, and more if need be."""
        size = -(-largest // ALIGNMENT) * ALIGNMENT
        if size:
            assert self._bytes is None, "parts are there"
            self._bytes, self._addresses = self._buffer.reserve(max(size, 2 * self._half)), []

    def allocate(self, size: int) -> torch.Tensor:
        """See Memory: `size` bytes of the half that is being filled, which is passed on before if they do not fit."""
        asked, size = size, -(-size // ALIGNMENT) * ALIGNMENT
        large = size > self._half
        if self._bytes is not None and self._bytes.numel() < size:
            self._pass_on(unmap=True)
            self._release()
        elif self._used and (large or self._used + size > self._half):
            self._pass_on()
        if large:  # both halves, and more if need be: nothing may be read meanwhile
            self._tell("wait_loaded")
            self._wait()
            self._begin = 0
        if self._bytes is None:
            self.reserve(size)
        assert self._bytes is not None
        begin = self._begin + self._used
        self._used += size
        return self._bytes[begin : begin + asked]

    def _release(self) -> None:
        """Free the memory, whose last bucket told workers to unmap it; they have if the engine answered to that."""
        self._tell("wait_loaded")
        states = [b"dead" if self._receiver is None or self.error is not None else b"unmapped"]
        if self._peers is not None:
            states = self._peers.gather(states[0])
        self._bytes = None
        self._buffer.release_unused(unmapped=states[0] == b"unmapped")

    def _pass_on(self, *, unmap: bool = False, last: bool = False) -> None:
        """Have workers load the filled half once they have loaded the other, which is filled next.

        With `unmap` they let go of GPU memory then, before they answer.
        """
        if self._bytes is None:
            return  # the stream was empty
        address = self._buffer.address()  # waits until everything is written
        if not self._addresses:
            every = [json.dumps(address).encode()]
            self._addresses = [json.loads(one) for one in (self._peers.gather(every[0]) if self._peers else every)]
        self._tell("wait_loaded")
        self._wait()  # all have written, and may write into the other half
        self._tell("post", {"memory": self._addresses, "parts": self._entries, "unmap": unmap, "last": last})
        if self._used > self._half:  # it took the other half, too
            self._tell("wait_loaded")
            self._wait()
        self._begin = self._half - self._begin if self._used <= self._half else 0
        self._used, self._entries = 0, []

    def _entry(self, part: Part) -> dict[str, Any]:
        """Return what a worker needs to see a part in the memory; see plugin.UpdateInfo."""
        assert self._bytes is not None
        return {
            "name": part.name,
            "experts": list(part.experts),
            "dtype": str(part.tensor.dtype).removeprefix("torch."),
            "shape": list(part.shape),
            "offset": part.tensor.data_ptr() - self._bytes.data_ptr(),
            "size": list(part.tensor.shape),
            "stride": list(part.tensor.stride()),
        }

    def _tell(self, call: str, *arguments: Any) -> None:
        """Make a call of the receiver, unless there is none or one before has failed."""
        if self._receiver is not None and self.error is None:
            try:
                getattr(self._receiver, call)(*arguments)
            except Exception as error:
                self.error = _without_frames(error)
                self._receiver.kill()

    def _wait(self) -> None:
        if self._peers is not None:
            self._peers.wait()


def _without_frames(error: Exception) -> Exception:
    """Return the error without tracebacks: their frames would keep the memory of the update, which a restart needs."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error
