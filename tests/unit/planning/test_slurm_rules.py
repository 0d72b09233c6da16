"""Requests of a job to Slurm, before it is submitted: cores, time to train, options of sbatch, variables. A second."""

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
    bound = raw(1) | {"slurm": {"cpus_per_task": 1, "srun": ["--cpu-bind=cores"]}}
    assert [one.rule for one in make_plan(from_dict(bound)).broken] == [RULE]


def broken(**slurm: Any) -> list[tuple[str, str]]:
    return [(item.rule, item.message) for item in make_plan(from_dict({"slurm": slurm})).broken]


def test_a_job_has_time_before_it_is_told_to_stop() -> None:
    """One that is told at once saves, is requeued, and never makes a step."""
    assert broken(time_minutes="2:01", signal_seconds=120) == []  # three minutes, as Slurm rounds them
    ((rule, message),) = broken(time_minutes="1:00")  # a minute, where an hour was meant
    assert rule == "signal_leaves_time" and "signal_seconds (120) must be below the 60 seconds" in message
    assert broken(time_minutes=2)[0][0] == rule and broken(time_minutes=2, signal_seconds=119) == []
    offered = [str(fix) for fix in search.find(from_dict({"slurm": {"time_minutes": "1:00"}}))]
    assert any(text.startswith("slurm.signal_seconds=") for text in offered)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 3, "time": 5}, "slurm.sbatch: nodes, time are set by other keys"),
        ({"--mem": "1G"}, "slurm.sbatch: mem is set by other keys"),
        ({"a b": 1}, "'a b': 1 cannot be an option of sbatch"),
        ({"switches": "1\n#SBATCH"}, "cannot be an option of sbatch"),
        ({"switches": [1, {}]}, "cannot be an option of sbatch"),
    ],
)
def test_options_that_sbatch_would_not_get(options: dict[str, Any], words: str) -> None:
    found = broken(sbatch=options)
    assert found and {rule for rule, _ in found} == {"sbatch_options_are_free"} and words in found[0][1]
    assert broken(sbatch={"switches": 1, "hint": "nomultithread"}) == []


@pytest.mark.parametrize(
    ("name", "words"), [("WANDB_API_KEY", "looks like a secret"), ("A-B", "cannot be the name of a variable")]
)
def test_variables_of_ranks(name: str, words: str) -> None:
    ((rule, message),) = broken(environment={name: "x"})
    assert rule == "slurm_environment_is_plain" and words in message
    assert broken(environment={"NCCL_DEBUG": "INFO"}) == []
