"""A save that is killed at every call that changes the disk, one after the other; started by test_saves.py with srun.

    python -m tests.slurm.killed_saves RUN_DIR FOLDER

Begins with the newest checkpoint of the run, as a start of it would, and saves the next one; the k-th process is killed
with SIGKILL at its k-th write (half of the bytes are written), fsync, rename, mkdir, open for writing or removal. After
each kill the newest checkpoint must be whole, and the next process must load from it what was saved into it.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gspo_hpc.checkpoint import sharded
from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.config import loader
from gspo_hpc.models import architecture
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start
from gspo_hpc.runs import commit
from gspo_hpc.system.direct_io import BLOCK

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
LAYOUT = ("cluster.nodes=1", "cluster.gpus_per_node=1", "rollout.engines_per_node=1")
CALLS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate")


class Trap:
    """Kills this process at its `last`-th call that changes the disk."""

    def __init__(self, last: int) -> None:
        self.last, self.seen, self.lock = last, 0, threading.Lock()
        self.calls: Counter[str] = Counter()

    def step(self, name: str, half: Callable[[], Any] = lambda: None) -> None:
        """One such call is about to be made; `half` is what a kill in the middle of it leaves."""
        with self.lock:
            self.seen += 1
            self.calls[name] += 1
            if self.seen == self.last:
                half()
                os.kill(os.getpid(), signal.SIGKILL)

    def set(self) -> None:
        """From here on; a write is one of the system, not one into a file's buffer."""
        trap, write, opened = self, os.write, io.open

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                content = memoryview(data).cast("B")
                trap.step("write", lambda: write(self.fileno(), content[: len(content) // 2]))
                return super().write(content)

        def unbuffered(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return opened(file, mode, *arguments, **named)
            trap.step("open")
            raw = Raw(file, mode.replace("b", "").replace("t", ""))
            buffered = io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

        def os_write(descriptor: int, data: Any) -> int:
            half = len(data) // 2 // BLOCK * BLOCK or len(data) // 2  # of what goes past the page cache, whole blocks
            trap.step("write", lambda: write(descriptor, memoryview(data)[:half]))
            return write(descriptor, data)

        def watched(name: str) -> Callable[..., Any]:
            original = getattr(os, name)

            def call(*arguments: Any, **named: Any) -> Any:
                if name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR):
                    trap.step(name)
                return original(*arguments, **named)

            return call

        for name in CALLS:
            setattr(os, name, watched(name))
        os.write = os_write
        io.open = builtins.open = unbuffered  # type: ignore[assignment]


def digest(policy: Policy) -> str:
    """Of all weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(policy.chunks[0].state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            total.update(name.encode() + tensor.detach().numpy().tobytes())
    return total.hexdigest()


def save_once(run_dir: Path, root: Path, last: int) -> None:
    """Load the newest checkpoint, check it, change the weights, and save the next one, with the trap set."""
    os.environ.update(ALONE)
    config = loader.load(run_dir / "config.yaml", LAYOUT)
    policy = Policy(architecture.read(str(config.model.path)), config, start(config))
    policy.make_optimizer()
    commit.clean_staging(root)
    newest, remarks = commit.newest_whole(root)
    assert newest is not None and not remarks, remarks
    sharded.load(policy, newest)
    expected = commit.read_extra(newest).get("digest")  # the run's own has none
    assert expected in (None, digest(policy)), "not what was saved"
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1e-3
    saved, step = digest(policy), int(newest.name) + 1
    saver = Saver(policy)
    trap = Trap(last)
    trap.set()
    staging = commit.begin(root, step)

    def done(known: Mapping[str, commit.Entry]) -> None:
        commit.commit(staging, step, {"digest": saved}, known)
        commit.retain(root, 1)

    saver.save(staging, done)
    saver.wait()
    print(f"killed at each of {trap.seen} calls: {dict(trap.calls)}", flush=True)


def main() -> int:
    """0 if there was a whole checkpoint after each kill."""
    run_dir, folder = Path(sys.argv[1]), Path(sys.argv[2])
    root = folder / "checkpoints"
    newest, _ = commit.newest_whole(run_dir / "checkpoints")
    assert newest is not None
    shutil.copytree(newest, root / newest.name)
    for last in range(1, 10_000):
        if (pid := os.fork()) == 0:  # nothing has been started so far that a fork would lose
            try:
                save_once(run_dir, root, last)
            except BaseException as error:
                print(f"call {last}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != -signal.SIGKILL:
            return code
        newest, remarks = commit.newest_whole(root)
        assert newest is not None and not remarks, f"after a kill at call {last}: {remarks}"
    return 1


if __name__ == "__main__":
    sys.exit(main())
