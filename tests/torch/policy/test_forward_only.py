"""A policy that does not train holds its weights and nothing else, and computes the same (10 s).

It would catch buffers of gradients in `eval` and `export`, which take twice the memory of 16-bit weights: a 30B model
would not fit on one GPU, a pass that differs without Megatron's wrapper, and a setting of norms that reaches no model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
import torch
from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture
from gspo_hpc.policy.layers import RMSNorm, RoundedRMSNorm
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import start
from gspo_hpc.training.agreement.scoring import score

folder = sys.argv[1]
config = from_dict({"cluster": {"platform": "cpu"}, "model": {"path": folder, "dtype": "bfloat16"}})
ranks = start(config)
arch = architecture.read(folder)
made = [Policy(arch, config, ranks, trains=trains) for trains in (True, False)]
for policy in made:
    policy.load(folder)
trained, alone = (policy.held() for policy in made)
assert alone == {"weights": trained["weights"], "gradients": 0, "optimizer": 0}, (alone, trained)
assert trained["gradients"] >= 2 * trained["weights"]
one, other = (score(policy, [[5, 6, 7, 8, 9]]).logprobs for policy in made)
assert (one[0] == other[0]).all()
freed = made[1].offload()
made[1].restore()
again = score(made[1], [[5, 6, 7, 8, 9]]).logprobs
assert (again[0] == one[0]).all()
assert not any(parameter.requires_grad for parameter in made[1].parameters())
cpu, model = {"platform": "cpu"}, {"path": folder, "dtype": "bfloat16", "norms_in_fp32": False}
rounded = Policy(arch, from_dict({"cluster": cpu, "model": model}), ranks, trains=False)
rounded.load(folder)
norms = [type(module) for chunk in rounded.chunks for module in chunk.modules() if isinstance(module, RMSNorm)]
assert norms == [RoundedRMSNorm] * (4 * arch.num_layers + 1), norms  # before attention and MLP, of q and k; the last
(first,) = score(rounded, [[5, 6, 7, 8, 9]]).logprobs
gap = abs(first - one[0]).max()
assert 0 < gap < 0.1, gap
os._exit(0)
"""


def test_it_holds_its_weights_alone_and_computes_the_same(tiny_folder: Path) -> None:
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tiny_folder / "model")],
        env=environment | {"MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
