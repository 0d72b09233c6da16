"""Who waits for whom while weights that many ranks share travel to an engine: what is gathered, posted and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gspo_hpc.engine import weight_buffers
from gspo_hpc.engine.transfer import WeightSender
from gspo_hpc.ops.hf_folder import Folder
from gspo_hpc.ops.weight_parts import Memory, Part
from gspo_hpc.policy import weight_stream
from gspo_hpc.policy.policy import Policy


class Receiver:
    """An engine of one worker that loads a bucket only when its owner waits for it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.found: dict[str, torch.Tensor] = {}
        self._bucket: dict[str, Any] | None = None

    def post(self, bucket: dict[str, Any]) -> None:
        """Take note of a bucket."""
        assert self._bucket is None
        self.events.append("post")
        self._bucket = bucket

    def wait_loaded(self) -> None:
        """Load the bucket, if there is one."""
        if self._bucket is None:
            return
        self.events.append("loaded")
        memory = weight_buffers.map_buffer(self._bucket["memory"][0])
        for part in self._bucket["parts"]:
            tensor = weight_buffers.view(memory, part).clone()
            for name, one in Part(part["name"], tensor.shape, tensor, tuple(part["experts"])).tensors():
                assert self.found.setdefault(name, one) is one, name
        self._bucket = None

    def begin(self) -> None:
        """Do nothing."""

    def check(self, part: Part) -> None:
        """Do nothing."""

    finish = kill = begin


class Noted(weight_buffers.HostBuffer):
    """Memory that notes how much of it was asked for, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def reserve(self, size: int) -> torch.Tensor:
        """See WeightBuffer."""
        self.asked.append(size)
        return super().reserve(size)


def run(made: Policy, half: int) -> dict[str, np.ndarray]:
    """Return what happened on this rank, one after the other, and which of the folder's tensors arrived differently.

    Every rank has an engine, and memory of two halves of so many bytes. "gathered" is followed by a number of experts.
    """
    receiver, sender, memory = Receiver(), WeightSender("cpu", 1, half), Noted()
    sender._buffer = memory

    def stream(memory: Memory) -> Iterator[Sequence[Part]]:
        for parts in weight_stream.stream(made.chunks, made.arch, memory, half // 4, half):
            receiver.events.append(f"gathered {max(len(part.experts) for part in parts)}")
            yield parts

    sender.send(stream, receiver)
    sender.close()
    source = Folder(str(made.config.model.path))
    different = {name for name in source.names() & receiver.found.keys()}
    different = {name for name in different if not torch.equal(receiver.found[name], source.read(name))}
    different |= source.names() ^ receiver.found.keys()
    return {
        "events": np.array(receiver.events),
        "asked": np.array(memory.asked),
        "different": np.array(sorted(different)),
    }
