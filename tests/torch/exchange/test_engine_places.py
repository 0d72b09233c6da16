"""The ranks that share an engine, as a run finds them, against the GPUs that `plan` draws (a second, and the imports).

It would catch a page of ranks on which engines lie elsewhere than in the run.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.derived import role_of
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.sections.reward_models import first_gpu
from gspo_hpc.exchange.peers import engine_place
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.ranks import engine_gpus

NODES = 3


ONE = [(1, 1), (1, 2), (1, 3), (1, None)]


@pytest.mark.parametrize(("size", "apart"), [(1, 0), (2, 0), (1, 1)])
@pytest.mark.parametrize(
    ("generation_nodes", "per_node", "others"),
    [
        *((*place, 8) for place in [(None, 1), (None, 2), (None, 3), (None, None), (0, 1), (0, 2), (0, 3)]),
        *((*place, others) for place in ONE for others in (8, 6, 12)),
    ],
)
def test_engines_lie_where_the_plan_says(
    generation_nodes: int | None, per_node: int | None, others: int, size: int, apart: int
) -> None:
    """None: the GPUs of engines train as well; 0: some GPUs of every node generate; 1: those of one node do.

    `others`: the GPUs of that node. `apart`: GPUs of a reward model behind those of each engine, in server mode.
    """
    apart = 0 if generation_nodes is None else apart
    rollout: dict[str, Any] = {"engines_per_node": per_node, "tensor_parallel_size": size}
    cluster = {"nodes": NODES, "gpus_per_node": 8}
    if generation_nodes is not None:
        cluster["generation_nodes"], rollout["mode"] = generation_nodes, "server"
        cluster |= {"generation_gpus_per_node": others} if generation_nodes else {}
    model = {"name": "a", "path": "a", "placement": "apart", "tensor_parallel_size": apart}
    reward = {"models": [model], "functions": [{"function": "reward_model"}]} if apart else {}
    config = from_dict({"cluster": cluster, "rollout": rollout, "reward": reward})
    drawn = engine_gpus(make_plan(config).layout)
    behind = [first_gpu(config, one) for one in config.reward.models]
    assert behind == [size] * bool(apart)
    for local in range(others):
        role = role_of(config, (NODES - 1) * 8 + local)
        own = [gpus.index(local) for gpus in drawn if local in gpus]
        if generation_nodes is not None and not role.generates:
            assert own == []
        else:
            assert engine_place(config, role.local_index) == (own[0] if own else None)
