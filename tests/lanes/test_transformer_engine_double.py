"""Small models through `layers: transformer_engine`, with a double in its place, against the layers of torch.

It would catch wrong sequence bounds, a wrong scale or mask, rotary angles of another shape, norms and matrix products
in another order, weights that land under the wrong names, experts that get one another's tokens, and gradients that
layers add to the buffers themselves but are lost, counted twice or left from the step before: on one rank, and on four
that cut layers and experts, recompute and have stages. A quarter of a minute for each model, and half a minute for four
ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import parameters
from tests.gloo import ranks
from tests.gloo.conftest import make
from tests.gloo.layouts import EP2, PP2, SP, TP2

pytestmark = pytest.mark.skipif("GSPO_HPC_LANE_TE" not in os.environ, reason="bash tools/lanes.sh transformer-engine")
DOUBLE = ("tests.lanes.transformer_engine_double", os.environ.get("GSPO_HPC_LANE_TE", ""))
USED = {"Linear", "LayerNormLinear", "RMSNorm", "DotProductAttention"}
PERMUTED = {
    "moe_permute_with_probs",
    "moe_unpermute",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
}
MIXTURES = {"mixtral", "qwen2moe", "qwen3moe"}
SHARED: dict[str, dict[str, Any]] = {  # families, and what four ranks share
    "qwen3": {"parallel": TP2 | SP | PP2},
    "qwen3moe": {"parallel": TP2 | SP | PP2 | EP2 | {"expert_tensor_parallel_size": 1}},
}
RECOMPUTED = {"memory": {"recompute_granularity": "full"}}


def agree(theirs: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in ours.items():
        scale = max(1e-3, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(theirs[name], expected, atol=2e-4 * scale, err_msg=name)


def said(folder: Path, world: int) -> str:
    return (folder / f"rank-0-of-{world}.log").read_text()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3moe", "qwen2moe"])
def test_forward_and_backward_equal_the_layers_of_torch(family: str, tmp_path: Path) -> None:
    model = str(make(tmp_path / family, family, tied=False))
    case = {"steps": ("steps", {"model": model, "count": 2})}
    ours = ranks.run(1, tmp_path, case)["steps"]
    agree(ranks.run(1, tmp_path, case, module=DOUBLE)["steps"], ours)
    text = said(tmp_path, 1)
    called = {pair.partition("=")[0] for pair in text.rpartition("calls:")[2].partition("\n")[0].split()}
    methods = {f"{name}.{part}" for name in USED for part in ("__init__", "forward")}
    experts = {"GroupedLinear.__init__", "GroupedLinear.forward", *PERMUTED} if family in MIXTURES else set()
    seldom = {"Linear.__init__", "Linear.forward", "RMSNorm.forward"}  # by some families only
    assert called | seldom == methods | experts | {"apply_rotary_pos_emb", "accumulated"} | seldom
    planned = from_dict(
        {
            "cluster": {"nodes": 1, "gpus_per_node": 1},
            "model": {"path": model, "dtype": "float32", "layers": "transformer_engine"},
        }
    )
    arch = architecture.find(planned)
    assert arch is not None
    kept = int(text.rpartition("unused gradients:")[2].split()[0])
    assert kept == parameters.unused_gradients(arch, planned, 0)


def test_ranks_that_cut_layers_and_experts_and_recompute_equal_one(tmp_path: Path) -> None:
    """Two stages of two ranks, with sequence parallelism; experts are spread over the ranks that cut the rest."""
    models = {family: str(make(tmp_path / family, family, tied=False)) for family in SHARED}
    one = {family: ("steps", {"model": models[family], "count": 2}) for family in SHARED}
    four = {family: ("steps", {**one[family][1], **sections, **RECOMPUTED}) for family, sections in SHARED.items()}
    ours = ranks.run(1, tmp_path, one)
    theirs = ranks.run(4, tmp_path, four, module=DOUBLE)
    for family in SHARED:
        agree(theirs[family], ours[family])
    text = said(tmp_path, 4)
    assert {"GroupedLinear.forward", "accumulated"} <= {pair.partition("=")[0] for pair in text.split()}
