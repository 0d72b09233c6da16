"""The algorithm of CONTRIBUTING.md computes what it says: a new file changes the loss, and nothing else does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.examples import example

# One sample of three tokens with advantage 2, whose ratios are e^0.5, e^-3 (below the least weight) and e^3 (above 6).
CHECK = """
import math, torch
from gspo_hpc.algorithms.loss import policy_loss
from gspo_hpc.algorithms.objective import resolve
from gspo_hpc.config.loader import from_dict
from gspo_hpc.ops.batch import PackedBatch
from tests.torch.algorithms.test_loss import Case, flat, packed

config = from_dict({"algorithm": {"name": "mine", "least_weight": 0.1, "aggregation": "token"}})
new, old = [-1.0, -4.0, -1.0], [-1.5, -1.0, -4.0]
case = Case([new], [old], [old], [old], [2.0], [True])
point = flat(case.new).requires_grad_()
result = policy_loss(point, packed(case), resolve(config.algorithm), denominator=1.0)
(gradient,) = torch.autograd.grad(result.loss, point)
weights = [math.exp(0.5), 0.1, 6.0]
assert torch.allclose(gradient, torch.tensor([-2.0 * w for w in weights], dtype=gradient.dtype)), gradient
assert result.sums["clip_fraction_low"].tolist() == [1.0, 3.0]
assert result.sums["clip_fraction_high"].tolist() == [1.0, 3.0]

config = from_dict({"algorithm": {"name": "mine", "clip_low": 0.7, "clip_high": 1.0, "aggregation": "token"}})
result = policy_loss(point, packed(case), resolve(config.algorithm), denominator=1.0)
(gradient,) = torch.autograd.grad(result.loss, point)
weights = [math.exp(0.5), 0.3, 2.0]  # both ends of the clip range bound the weights
assert torch.allclose(gradient, torch.tensor([-2.0 * w for w in weights], dtype=gradient.dtype)), gradient
"""


def test_the_loss_of_a_new_file(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "gspo_hpc", tmp_path / "gspo_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    (code,) = re.findall(r"^```python\n(.*?)^```$", example("An algorithm"), re.MULTILINE | re.DOTALL)
    (tmp_path / "gspo_hpc" / "algorithms" / "mine.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(project)])}
    command = [sys.executable, "-P", "-c", CHECK]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
