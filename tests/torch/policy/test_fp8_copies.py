"""Tensors that Transformer Engine keeps between micro-batches are dropped: 8-bit weights, stand-ins for gradients.

Costs the import of Megatron and two passes of the tiny model (20 s). Catches copies of one or two bytes a weight that
stay beside the engine, which neither an offload nor the plan's phases of engines know, and tensors as large as weights
that stay beside the logits of the next micro-batch, or beside the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, os, sys
from types import SimpleNamespace
import numpy as np
import torch
from gspo_hpc.algorithms import objective
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.packing import Sample
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.models import architecture
from gspo_hpc.ops.batch import build
from gspo_hpc.policy import schedule
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start

folder, made = sys.argv[1], []
config = from_dict({"cluster": {"platform": "cpu"}, "model": {"path": folder}})
policy = Policy(architecture.read(folder), config, start(config))
policy.load(folder)
policy.make_optimizer()


def forward(module, arguments):  # as in the sources of Transformer Engine: take what is kept, or quantize
    if module._fp8_workspaces.get("weight") is None:
        made.append(module)
        module._fp8_workspaces["weight"] = module.weight.detach().to(torch.float8_e4m3fn)


# As in the sources, too: what autograd gets for a weight whose gradient is in its buffer already.
unused, filled, beside = {}, [], []
sys.modules["transformer_engine.pytorch.module.base"] = SimpleNamespace(_dummy_wgrads=unused)


def backward(module, *gradients):
    unused[tuple(module.weight.shape)] = torch.empty_like(module.weight)
    filled.append(module)


def head(*arguments, real=schedule.head, **named):
    beside.append(len(unused))
    return real(*arguments, **named)


schedule.head = head
weights = ((m, getattr(m, "weight", None)) for m in policy.chunks[0].decoder.modules())
layers = [module for module, weight in weights if weight is not None and weight.ndim == 2]
for layer in layers:
    layer._fp8_workspaces = {}
    layer.register_forward_pre_hook(forward)
    layer.register_full_backward_hook(backward)
tokens = np.arange(3, 20, dtype=np.int32)
one = Completion(tokens, np.full(len(tokens), -1.0, np.float32), "", "stop", 0, advantage=1.0)
groups = {0: Group(0, Prompt(0, np.array([1, 2], np.int32), "", {}), (one,))}
batches = [build(groups, [Sample(0, 0, 2, len(tokens))], share_prompts=False) for _ in range(2)]
left = []
for run in (
    lambda: schedule.response_logprobs(policy, batches, 1.0, name="old_logprobs"),
    lambda: schedule.train_step(policy, batches, objective.resolve(config.algorithm), 2.0, 1.0),
):
    run()
    left.append([sum(len(layer._fp8_workspaces) for layer in layers), len(unused)])
print(json.dumps([len(layers), len(made), len(filled), left, beside]), flush=True)
os._exit(0)
"""


def test_no_copy_outlives_its_pass_nor_any_gradient_its_micro_batch(tiny_folder: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tiny_folder / "model")]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    layers, made, filled, left, beside = json.loads(done.stdout.splitlines()[-1])
    assert layers > 0 and made == 2 * layers, "a copy is made once a pass, and serves all its micro-batches"
    assert filled == 2 * layers, "the passes without gradient have none"
    assert left == [[0, 0]] * 2, f"{left} copies, and tensors without a meaning, outlive the passes"
    assert beside == [0] * 4, f"{beside} tensors without a meaning lie beside the logits of each micro-batch"
