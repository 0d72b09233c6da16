"""Every thread of the package is listed here with what it does with a GPU. Costs nothing.

A new thread has the node's first GPU, whichever its rank's is. One that touches CUDA without choosing would begin a
context there, on every rank, and wait for streams of that GPU instead of its own. Threads of autograd, NCCL and gloo
choose for themselves; torch's writer of checkpoints starts none (``thread_count`` is 1).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KINDS = ("Thread", "ThreadPoolExecutor")
ITS_OWN = "chooses its rank's GPU before it touches CUDA"
NONE = "touches no GPU"
NVML = "reads NVML, which needs no context"

THREADS = {
    "checkpoint/saver.py": ITS_OWN,
    "doctor/finding.py": NONE,  # NVML too; the command makes no tensor
    "doctor/meeting.py": NONE,
    "exchange/kept_weights.py": ITS_OWN,
    "launch/notify/notices.py": NONE,
    "launch/notify/sender.py": NONE,
    "launch/slurm/supervisor.py": NONE,
    "rewards/pool.py": NONE,
    "rollout/handover.py": NONE,
    "rollout/node_store.py": NONE,
    "runs/commit.py": NONE,
    "sandbox/service.py": NONE,
    "system/control.py": NONE,
    "system/signals.py": NONE,
    "trackers/sync.py": NONE,
    "training/serving/connection.py": ITS_OWN,
    "training/telemetry/accelerator.py": NVML,
    "training/worker.py": NONE,
}
CHOICES = ("torch.cuda.set_device", "torch.cuda.device")


def called(path: Path) -> Iterator[str]:
    """Yield the names of all functions that a module calls, as they are written there."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def starts_threads(path: Path) -> bool:
    return any(name.rpartition(".")[2] in KINDS for name in called(path))


def test_every_module_that_starts_threads_is_listed(project: Path) -> None:
    package = project / "gspo_hpc"
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if starts_threads(path)}
    assert found == set(THREADS), "say here what the threads of each module do with a GPU"


@pytest.mark.parametrize("module", [name for name, does in THREADS.items() if does == ITS_OWN])
def test_threads_that_touch_a_gpu_choose_it(module: str, project: Path) -> None:
    assert set(CHOICES) & set(called(project / "gspo_hpc" / module))


def test_threads_that_touch_none_are_of_modules_without_tensors(project: Path) -> None:
    using = {
        name
        for name, does in THREADS.items()
        if does == NONE and any(one.startswith("torch.cuda") for one in called(project / "gspo_hpc" / name))
    }
    assert using == set()
