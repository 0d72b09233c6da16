"""Weights into a bare child process, round after round: every bit arrives, and memory stays flat.

The trainer's end is the package's own (:mod:`gspo_hpc.engine.transfer`); the other end is a process without vLLM that
maps what a bucket names, as vLLM's worker does. On GPUs the memory is shared by CUDA IPC, or through
host memory where one process serves an engine with tensor parallelism; on a CPU it is host memory.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from gspo_hpc.engine.transfer import WeightSender
from gspo_hpc.engine.weight_buffers import map_buffer, view
from gspo_hpc.ops.weight_parts import Part, stream_of
from gspo_hpc.system.text import MIB

from .. import measure
from ..environment import Environment
from ..rows import Recorder

WARM_UP = 3  # rounds, after which memory has to stay the same


def run(env: Environment, record: Recorder) -> None:
    """Send tensors through every kind of memory that this platform uses."""
    made = tensors(env)
    ways = {"host memory": 2, "CUDA IPC": 1} if env.cuda else {"host memory": 1}
    for name, workers in ways.items():
        sender = WeightSender(env.platform, workers, env.sizes.bucket_bytes)
        try:
            _rounds(env, record, name, sender, made)
        finally:
            sender.close()
    if not env.cuda:
        record.no_meaning("CUDA IPC")


def tensors(env: Environment) -> dict[str, torch.Tensor]:
    """Return tensors of several types and shapes, together three buckets and a bit."""
    generator = torch.Generator().manual_seed(0)
    columns = 1024
    rows = env.sizes.bucket_bytes // (2 * columns)
    shapes = {"half": (rows // 2, columns), "whole": (rows, columns), "odd": (7, 3), "third": (rows // 3, columns)}
    made = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    made["wide"] = torch.randn((rows // 2, columns), generator=generator)
    made["scalar"] = torch.randn((1,), generator=generator)
    return {name: tensor.to(env.device) for name, tensor in made.items()}


def _rounds(
    env: Environment, record: Recorder, what: str, sender: WeightSender, tensors: dict[str, torch.Tensor]
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs, env.platform))
    child.start()
    theirs.close()
    assert child.pid is not None
    wrong, sizes, seconds = 0, [], 0.0
    for number in range(env.sizes.rounds):
        for tensor in tensors.values():
            tensor.neg_()  # other bits in every round
        expected = digests(tensors)
        began = time.perf_counter()
        reader = Reader(ours)
        sender.send(stream_of(tensors.items()), reader)
        seconds = time.perf_counter() - began
        wrong += reader.found != expected
        measure.synchronize(env)
        sizes.append(measure.memory_used(env, [child.pid]))
        print(f"round {number}: {seconds:.3f} s, {sizes[-1] / MIB:.1f} MiB taken", flush=True)
    ours.send(None)
    child.join(30)
    count = env.sizes.rounds
    record.check(f"{what}: {count} rounds", f"{wrong} with other bits", "0 with other bits", wrong == 0)
    growth = (max(sizes[WARM_UP:]) - sizes[WARM_UP - 1]) / MIB
    record.at_most(f"{what}: growth of memory after round {WARM_UP}", growth, measure.FLAT / MIB, " MiB")
    size = sum(tensor.nbytes for tensor in tensors.values())
    figure = f"{size / seconds / 1e9:.2f} GB/s"
    record.figure(f"{what}: speed of the last round, with checksums at the other end", figure)


class Reader:
    """The child in the place of an engine (see transfer.Receiver): what it has found, by name."""

    def __init__(self, connection: Connection) -> None:
        self.found: dict[str, int] = {}
        self._connection, self._reading = connection, False

    def begin(self) -> None:
        """Do nothing."""

    def check(self, part: Part) -> None:
        """Do nothing: all is compared in the end."""

    def post(self, bucket: dict[str, Any]) -> None:
        """Hand a bucket to the child."""
        self._connection.send(bucket)
        self._reading = True

    def wait_loaded(self) -> None:
        """Take the checksums of the last bucket."""
        if self._reading:
            self.found |= self._connection.recv()
            self._reading = False

    def finish(self) -> None:
        """Do nothing: the child lets go of the memory after the last bucket."""

    def kill(self) -> None:
        """Do nothing: the child ends with the part that has failed."""


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return a checksum of each tensor."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> int:
    return int(torch.hash_tensor(tensor).item())


def receive(connection: Connection, platform: str) -> None:
    """Answer each bucket with the checksums of its tensors, as the worker of an engine would read them."""
    if platform == "cuda":
        torch.cuda.set_device(0)
    memory, known = None, None
    while (bucket := connection.recv()) is not None:
        if bucket["memory"][0] != known:
            memory, known = None, bucket["memory"][0]
            memory = map_buffer(known)
        assert memory is not None
        found = {part["name"]: _digest(view(memory, part)) for part in bucket["parts"]}
        if platform == "cuda":
            torch.cuda.synchronize()
            if bucket["unmap"]:
                memory = known = None
                torch.cuda.ipc_collect()
        connection.send(found)
