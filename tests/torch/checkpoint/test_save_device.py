"""The thread of a save works on the GPU of its rank, and torch's writer copies nothing on another GPU's stream.

A counterpart of ``torch.cuda`` notes which device each thread uses; the rest is the real saver, the real thread and
torch's real writer. Catches a thread that begins CUDA on the node's first GPU, which every rank would do there, and a
copy that another device's stream is waited for: bytes would be written before they have arrived. Takes 15 seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import contextlib, json, os, sys, threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from gspo_hpc.checkpoint import compat, saver
from megatron.core.dist_checkpointing.mapping import ShardedTensor

present, used = threading.local(), []


class Stream:
    device_type = "cuda"

    def __init__(self):
        self.device = torch.cuda.current_device()

    def synchronize(self):
        note("synchronize", self.device)

    def wait_stream(self, other):
        note("wait_stream", self.device)


def note(what, device):
    used.append((threading.current_thread().name.partition("_")[0], what, device))


def set_device(device):
    present.device = getattr(device, "index", device)
    note("set_device", present.device)


def current_stream(device=None):
    note("current_stream", torch.cuda.current_device())
    return Stream()


cuda = torch.cuda
cuda.is_available, cuda.device_count = lambda: True, lambda: 8
cuda.current_device = lambda: getattr(present, "device", 0)
cuda.set_device, cuda.current_stream = set_device, current_stream
cuda.synchronize = lambda device=None: note("synchronize", cuda.current_device())
cuda.stream = lambda stream: contextlib.nullcontext()

folder, background = Path(sys.argv[1]), sys.argv[2] == "background"
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
cuda.set_device(3)


def prepare(policy, staging, group, *more, **options):
    shards, written = staging / "megatron", {}
    shards.mkdir()
    state = {str(n): ShardedTensor.from_rank_offsets(f"w{n}", torch.full((300, 1000), n + 1.0)) for n in range(5)}
    write_shards = compat.prepare(state, shards, group, written)

    def write():
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - nice)
        write_shards()
        return written

    return write


saver.sharded.prepare = prepare
nice = max(12, os.getpriority(os.PRIO_PROCESS, 0))  # as a job may be started, which must not take priority back
os.setpriority(os.PRIO_PROCESS, 0, nice)
priorities = []
ranks = SimpleNamespace(rank=0, timeout=timedelta(seconds=60), device=torch.device("cuda", 3))
one = saver.Saver(SimpleNamespace(ranks=ranks), background=background)
known = {}
one.save(folder, known.update)
one.wait()
print(json.dumps([[note[1:] for note in used if note[0] == "save"], sorted(known), priorities]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("mode", ["background", "waiting"])
def test_a_save_uses_the_gpu_of_its_rank_alone(mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), mode]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    used, files, priorities = json.loads(done.stdout.splitlines()[-1])
    assert files, "nothing was written"
    assert used == [["set_device", 3]]
    # Only other threads like it wait for one in the background; a save that the loop waits for is not slow.
    assert (priorities[0] > 0) == (mode == "background") and priorities[0] >= 0
