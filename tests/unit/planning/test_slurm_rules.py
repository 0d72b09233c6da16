"""Resources that a job must ask Slurm for: cores for a rank, its engine and its reward functions. Under a second."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.config.derived import busy_processes
from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan

RULE = "cpus_per_task_suffice"


def raw(cpus: int | None, **sections: Any) -> dict[str, Any]:
    return {"cluster": {"gpus_per_node": 8}, "slurm": {"cpus_per_task": cpus}, **sections}


@pytest.mark.parametrize(
    ("tp", "workers", "needed"),
    [(1, 2, 4), (1, 1, 3), (2, 2, 6), (8, 2, 12), (8, 6, 16)],  # an engine on several GPUs: its core and their workers
)
def test_every_busy_process_has_a_core(tp: int, workers: int, needed: int) -> None:
    more = {"rollout": {"tensor_parallel_size": tp}, "reward": {"workers": workers}}
    assert busy_processes(from_dict(raw(None, **more))).total == needed
    assert make_plan(from_dict(raw(needed, **more))).valid and make_plan(from_dict(raw(None, **more))).valid
    (broken,) = make_plan(from_dict(raw(needed - 1, **more))).broken
    assert broken.rule == RULE
    assert broken.message.startswith(f"slurm.cpus_per_task ({needed - 1}) must be at least {needed}: the rank (1), ")
    assert f"reward.workers is {workers}" in broken.message


def test_the_fix_is_the_number_of_cores() -> None:
    offered = [str(fix) for fix in search.find(from_dict(raw(3)))]
    assert "slurm.cpus_per_task=4" in offered and "reward.workers=1" in offered


def test_where_cores_are_shared_or_phases_take_turns() -> None:
    assert make_plan(from_dict(raw(1) | {"cluster": {"platform": "cpu"}})).valid
    unbound = raw(1) | {"slurm": {"cpus_per_task": 1, "srun": ["--cpu-bind=none"]}}
    assert make_plan(from_dict(unbound)).valid
