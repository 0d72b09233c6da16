"""Weights of server mode, from a process that trains to one that generates: every bit arrives, and is kept.

Both ends are the package's own (:mod:`gspo_hpc.exchange`), with a bare process in the place of an engine, as in `ipc`.
On one GPU and on a CPU they talk by gloo, since NCCL takes a GPU for each process; on two GPUs by NCCL. Then the engine
is filled again with what was kept.
"""

from __future__ import annotations

import datetime
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gspo_hpc.engine.transfer import WeightSender
from gspo_hpc.exchange.kept_weights import KeptWeights
from gspo_hpc.exchange.weight_broadcast import SentMemory, WeightBroadcast
from gspo_hpc.ops.weight_parts import Memory, Part, stream_of
from gspo_hpc.system.text import MIB

from .. import measure
from ..environment import Environment
from ..rows import Recorder
from . import ipc

LIMIT = datetime.timedelta(seconds=60)


def run(env: Environment, record: Recorder) -> None:
    """Receive tensors round after round, keeping them in every second one, and fill an engine again."""
    backend = "nccl" if env.cuda and torch.cuda.device_count() > 1 else "gloo"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(dir=env.work) as folder:
        store = Path(folder) / "store"
        trainer = context.Process(target=send, args=(env, store, backend))
        engine = context.Process(target=ipc.receive, args=(theirs, env.platform))
        trainer.start()
        engine.start()
        theirs.close()
        _receive(env, record, WeightBroadcast(dist.FileStore(str(store), 2), 1, 2, backend, LIMIT), ipc.Reader(ours))
        ours.send(None)
        for process in (trainer, engine):
            process.join(30)
        record.check(
            "both processes end",
            f"exit codes {trainer.exitcode} and {engine.exitcode}",
            "0 and 0",
            (trainer.exitcode == engine.exitcode == 0),
        )
    if backend == "gloo":
        what = "NCCL between the roles"
        record.skip(what, "each needs a GPU of its own") if env.cuda else record.no_meaning(what)


def _receive(env: Environment, record: Recorder, broadcast: WeightBroadcast, reader: ipc.Reader) -> None:
    tensors, kept = ipc.tensors(env), KeptWeights()
    sender = WeightSender(env.platform, 1, env.sizes.bucket_bytes)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    wrong, sizes = 0, []
    for number in range(env.sizes.rounds + env.sizes.rounds % 2):  # the last one is kept
        for tensor in tensors.values():
            tensor.neg_()
        keeps = number % 2 == 1
        kept.begin()
        began = time.perf_counter()

        def stream(memory: Memory, keeps: bool = keeps) -> Iterable[Sequence[Part]]:
            return broadcast.stream(memory, kept if keeps else None)

        sender.send(stream, reader)
        seconds[keeps].append(time.perf_counter() - began)
        wrong += reader.found != ipc.digests(tensors)
        measure.synchronize(env)
        sizes.append(measure.memory_used(env))
        print(f"round {number}: {seconds[keeps][-1]:.3f} s, {sizes[-1] / MIB:.1f} MiB taken", flush=True)
    reader.found = {}
    sender.send(kept.stream, reader)
    again = reader.found == ipc.digests(tensors)
    sender.close()
    record.check(f"{len(sizes)} syncs", f"{wrong} with other bits", "0 with other bits", wrong == 0)
    record.check("an engine that is filled again", "the same bits" if again else "other bits", "the same bits", again)
    if len(sizes) > ipc.WARM_UP:
        growth = (max(sizes[ipc.WARM_UP :]) - sizes[ipc.WARM_UP - 1]) / MIB
        record.at_most(f"growth of memory after sync {ipc.WARM_UP}", growth, measure.FLAT / MIB, " MiB")
    plain, with_copy = (statistics.median(seconds[keeps][1:] or seconds[keeps]) for keeps in (False, True))
    size = sum(tensor.nbytes for tensor in tensors.values())
    record.figure(
        "a sync without a copy, and with one", f"{plain:.3f} s and {with_copy:.3f} s for {size / MIB:.0f} MiB"
    )


def send(env: Environment, store: Path, backend: str) -> None:
    """Send as many rounds as the other end receives, as the first rank that trains does."""
    if backend == "nccl":
        torch.cuda.set_device(1)
    device = torch.device(env.platform, torch.cuda.current_device()) if env.cuda else torch.device("cpu")
    broadcast = WeightBroadcast(dist.FileStore(str(store), 2), 0, 2, backend, LIMIT)
    memory = SentMemory(device, env.sizes.bucket_bytes, broadcast)
    tensors = {name: tensor.to(device) for name, tensor in ipc.tensors(env).items()}
    for _ in range(env.sizes.rounds + env.sizes.rounds % 2):
        for tensor in tensors.values():
            tensor.neg_()
        broadcast.send(stream_of(tensors.items())(memory), memory)
    measure.synchronize(env)
