"""Gradients of 16 bits: Megatron makes fp32 copies of them for the optimizer, which must leave with the trainer.

Costs, four times, the import of Megatron and two steps of the tiny model (a minute). Catches memory that the plan does
not know: four bytes for each parameter of a rank (or of its share), kept from one step to the next one; and an Adam of
torch that does not use its fused kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
import numpy as np
from gspo_hpc.algorithms import objective
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.packing import Sample
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.models import architecture
from gspo_hpc.ops.batch import build
from gspo_hpc.planning.estimates import parameters
from gspo_hpc.policy import schedule
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start

folder, wide, shared = sys.argv[1], sys.argv[2] == "fp32", sys.argv[3] == "shared"
config = from_dict(
    {
        "cluster": {"platform": "cpu"},
        "model": {"path": folder, "dtype": "bfloat16"},
        "optimizer": {"grad_reduce_in_fp32": wide, "distributed": shared},
    }
)
policy = Policy(architecture.read(folder), config, start(config))
policy.load(folder)
policy.make_optimizer()
tokens = np.arange(3, 20, dtype=np.int32)
one = Completion(tokens, np.full(len(tokens), -1.0, np.float32), "", "stop", 0, advantage=1.0)
groups = {0: Group(0, Prompt(0, np.array([1, 2], np.int32), "", {}), (one,))}
batch = build(groups, [Sample(0, 0, 2, len(tokens))], share_prompts=False)
held, step = [], policy.optimizer.step_with_ready_grads
policy.optimizer.step_with_ready_grads = lambda: (held.append(policy.held()), step())
result = schedule.train_step(policy, [batch], objective.resolve(config.algorithm), 1.0, 1.0)
masters = [p for c in policy.optimizer.chained_optimizers for g in c.optimizer.param_groups for p in g["params"]]


def left():
    policy.offload(["weights", "gradients", "optimizer"])
    return sum(p.grad.untyped_storage().nbytes() for p in masters if p.grad is not None)


after_step = left()
policy.restore_for_update()
for wrapped in policy.wrapped:
    for buffer in wrapped.buffers:
        buffer.grad_data.fill_(float("inf"))
_, skipped = schedule._apply(policy)
planned = parameters.state(policy.arch, config, 0)
kernels = {g.get("fused") for c in policy.optimizer.chained_optimizers for g in c.optimizer.param_groups}
assert kernels == {True}, "torch's Adam would make a tensor of the size of all weights for each of its operations"
print(json.dumps([result.skipped, skipped, after_step, left(), held[0]["gradients"], planned]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("gradients", ["fp32", "16 bits"])
@pytest.mark.parametrize("optimizer", ["whole", "shared"])
def test_no_gradient_stays_where_the_trainer_has_left(gradients: str, optimizer: str, tiny_folder: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tiny_folder / "model"), gradients, optimizer]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    skipped, again, *left, held, planned = json.loads(done.stdout.splitlines()[-1])
    assert not skipped and again, "the second step was to be skipped"
    assert left == [0, 0], f"{left} bytes of gradients stay beside the engine, after a step and after none"
    _, buffers, _, copies = planned
    assert (copies == 2 * buffers) == (gradients == "16 bits") and held == pytest.approx(buffers + copies, rel=0.02)
