"""A small model through `layers: transformer_engine`, with a double in its place, against the layers of torch.

It would catch wrong sequence bounds, a wrong scale or mask, rotary angles of another shape, norms and matrix products
in another order, weights that land under the wrong names, and gradients that layers add to the buffers themselves but
are lost, counted twice or left from the step before. A quarter of a minute for each model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gloo.conftest import make
from tests.gloo.ranks import free_port

pytestmark = pytest.mark.skipif("GSPO_HPC_LANE_TE" not in os.environ, reason="bash tools/lanes.sh transformer-engine")
USED = {"Linear", "LayerNormLinear", "RMSNorm", "DotProductAttention"}


def ran(folder: Path, name: str, module: list[str], model: Path) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays of two steps of the model on one rank, by this program, and what it said."""
    out, work = folder / f"{name}.npz", folder / f"{name}.json"
    work.write_text(json.dumps([[str(out), "steps", {"model": str(model), "count": 2}]]))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-m", *module, str(work)],
        env=os.environ | alone | meeting,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return dict(np.load(out)), done.stdout


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_forward_and_backward_equal_the_layers_of_torch(family: str, tmp_path: Path) -> None:
    model = make(tmp_path / family, family, tied=False)
    double = ["tests.lanes.transformer_engine_double", os.environ["GSPO_HPC_LANE_TE"]]
    ours, _ = ran(tmp_path, "torch", ["tests.gloo.cases"], model)
    theirs, said = ran(tmp_path, "double", double, model)
    called = {pair.partition("=")[0] for pair in said.rpartition("calls:")[2].split()}
    assert called == {f"{name}.{part}" for name in USED for part in ("__init__", "forward")} - {"RMSNorm.forward"} | {
        "apply_rotary_pos_emb",
        "accumulated",
    }
    assert ours.keys() == theirs.keys()
    for name, expected in ours.items():
        scale = max(1e-3, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(theirs[name], expected, atol=2e-4 * scale, err_msg=name)
