"""A load reads a checkpoint into the tensors that are there, also those that Megatron saves in parts (SwiGLU).

Costs the import of Megatron, a save and a load of a small model, for each kind of optimizer (a minute). Catches a
second copy of weights or optimizer that a load makes on the GPU and keeps until its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.make_random_model import make_random_model

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
from gspo_hpc.checkpoint import compat, sharded
from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start
from tests.storages import Storages

folder, work, kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
config = from_dict(
    {
        "cluster": {"platform": "cpu"},
        "model": {"path": folder, "dtype": "bfloat16"},
        "optimizer": {"distributed": kind == "shared"},
    }
)
policy = Policy(architecture.read(folder), config, start(config))
policy.load(folder)
policy.make_optimizer()
Saver(policy, background=False).save(work, lambda known: None, lambda: {})


def values():
    return [tensor.detach().clone() for tensor in (*policy.parameters(), *policy._optimizer_state())]


before = values()
for tensor in [*policy.parameters(), *policy._optimizer_state()]:
    tensor.data.zero_()


state = [*policy.parameters(), *policy._optimizer_state()]
gradients = [buffer.grad_data for wrapped in policy.wrapped for buffer in wrapped.buffers]
with Storages(there=[*state, *gradients]) as storages:
    sharded.load(policy, work)
same = all(map(torch.equal, before, values()))
largest = max(t.numel() * 4 for t in policy.parameters())
owned = 3 * 4 * sum(t.numel() for t in policy.parameters()) if kind == "shared" else 0  # in host memory, always
size = sum(t.numel() * t.element_size() for t in state)
print(json.dumps([same, storages.peak - owned, largest, size]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, most of whose weights are gate and up projections."""
    sizes = {"hidden": 64, "layers": 8, "intermediate": 512, "vocab": 128}
    return make_random_model(tmp_path_factory.mktemp("model") / "m", **sizes)


@pytest.mark.parametrize("optimizer", ["whole", "shared"])
def test_a_load_keeps_no_second_copy(optimizer: str, model: Path, tmp_path: Path) -> None:
    """Beside what a rank has, at most what is read at a time, a tensor, and its copy on the way."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(model), str(tmp_path), optimizer]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    same, peak, largest, state = json.loads(done.stdout.splitlines()[-1])
    assert same, "other values were loaded than were saved"
    assert 0 < peak <= 2 * largest < state / 8, (peak, largest, state)
