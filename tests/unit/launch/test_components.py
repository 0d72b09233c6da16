"""Heterogeneous jobs: what is asked of Slurm for nodes that only generate, and what it says of such a job (3 s).

They would catch ranks that a step over two components numbers in another way than the layout, options of one component
that the other gets, a signal or a look at steps that misses a component, and an array of such jobs.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config.derived import gpus_of_node, node_of, role_of
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.slurm import commands, srun, submit
from gspo_hpc.launch.slurm.components import components, is_heterogeneous
from gspo_hpc.planning.plan import make_plan
from tests.unit.launch.test_submit import SMALL

CLUSTER = {"nodes": 3, "gpus_per_node": 4, "generation_nodes": 1, "generation_gpus_per_node": 2}


def made(cluster: dict[str, Any] | None = None, **slurm: Any) -> Config:
    raw = SMALL | {"cluster": cluster or CLUSTER, "rollout": {"mode": "server"}}
    return from_dict(raw | {"slurm": {"python": "/opt/python", **slurm}})


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([None, 1, 2, 3, 5, 8]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_ranks_are_numbered_as_steps_over_components_number_tasks(
    training: int, gpus: int, generating: int, others: int | None, server: bool
) -> None:
    """Slurm deals tasks to the nodes of one component after the other, as many to each node as it was asked for."""
    cluster = {"nodes": training + generating, "gpus_per_node": gpus, "generation_nodes": generating}
    if not generating or not server:
        cluster, server, others = {"nodes": training, "gpus_per_node": gpus}, False, None
    if others is not None:
        cluster["generation_gpus_per_node"] = others
    config = from_dict({"cluster": cluster, "rollout": {"mode": "server" if server else "colocate"}})
    parts = components(config)
    assert len(parts) == (1 if others is None else 2) and is_heterogeneous(config) == (others is not None)
    dealt = [gpus for part in parts for gpus in [part.gpus] * part.nodes]
    places = [(node, place) for node, count in enumerate(dealt) for place in range(count)]
    assert [node_of(config, rank) for rank in range(config.num_ranks)] == places
    assert [gpus_of_node(config, node) for node in range(len(dealt))] == dealt
    roles = [role_of(config, rank) for rank in range(config.num_ranks)]
    trains = [role for role in roles if not role.generates]
    assert [role.index for role in trains] == list(range(training * gpus)) and config.world_size == training * gpus
    assert roles[: len(trains)] == trains, "rank 0 and those after it train"
    generates = roles[len(trains) :]
    each = others or gpus
    assert [role.index for role in generates] == list(range(generating * each if server else 0))
    assert {(role.count, role.per_node, role.nodes) for role in generates} <= {(len(generates), each, generating)}
    assert [(len(dealt) - generating + role.index // each, role.local_index) for role in generates] == places[
        len(trains) :
    ]


def options(script: str) -> tuple[list[str], list[str]]:
    """The options of both components, without dashes."""
    lines = [line.removeprefix("#SBATCH ").lstrip("-") for line in script.splitlines() if line.startswith("#SBATCH ")]
    place = lines.index("hetjob")
    return lines[:place], lines[place + 1 :]


def test_each_component_is_asked_for_by_its_own_options() -> None:
    config = made(
        partition="train",
        account="abc",
        constraint="h200",
        gres="gpu:h200:4",
        mem="900G",
        nodelist="n[1-2]",
        exclude="n9",
        mail_type="END",
        sbatch={"switches": 1, "nice": 5},
        generation_partition="generate",
        generation_gres="gpu:l40:2",
        generation_sbatch={"mem": "200G", "nice": 7, "licenses": "x"},
    )
    assert not make_plan(config).broken
    text = submit.dry_run(config)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    first, second = options(text)
    both = {"account=abc", "constraint=h200", "exclude=n9", "requeue", "signal=USR2@120", "switches=1", "time=60"}
    assert both <= {*first} and both <= {*second}
    assert {"partition=train", "gres=gpu:h200:4", "mem=900G", "nice=5", "nodelist='n[1-2]'", "mail-type=END"} <= {
        *first
    }
    assert {"nodes=2", "ntasks-per-node=4"} <= {*first} and {"nodes=1", "ntasks-per-node=2"} <= {*second}
    assert {"partition=generate", "gres=gpu:l40:2", "mem=200G", "nice=7", "licenses=x"} <= {*second}
    names = [line.partition("=")[0] for line in second]
    assert len({*names}) == len(names), "each option once"
    assert not {*names} & {"nodelist", "mail-type", "job-name", "output", "open-mode"}
    assert text.index("#SBATCH hetjob") < text.index("# setup"), "options end where the script begins"


def test_one_step_starts_the_ranks_of_both_components() -> None:
    config = made(srun=["--mpi=none"], cpus_per_task=6)
    (line,) = [line for line in submit.dry_run(config).splitlines() if line.startswith("#   srun ")]
    program, first, second = line.removeprefix("#   ").partition(" ")[0], *line.split(" : ")
    ranks = " /opt/python -P -m gspo_hpc.training.worker train /runs/demo"
    assert program == "srun" and first.endswith(ranks) and second.endswith(ranks)
    assert "--het-group=0 --nodes=2 --ntasks=8 --ntasks-per-node=4" in first
    assert "--het-group=1 --nodes=1 --ntasks=2 --ntasks-per-node=2" in second
    for option in ("--kill-on-bad-exit=1", "--cpus-per-task=6", "--mpi=none", "--gpu-bind=none"):
        assert option in first.split() and option in second.split()
    alone = made({**CLUSTER, "generation_gpus_per_node": None})
    assert "--het-group" not in " ".join(srun.command(alone, *(submit.Path("/runs"),) * 2, []))
    assert "hetjob" not in submit.dry_run(alone)


def test_another_partition_makes_a_component_though_nodes_have_as_many_gpus() -> None:
    config = made({**CLUSTER, "generation_gpus_per_node": None}, generation_partition="generate")
    first, second = options(submit.dry_run(config))
    assert "ntasks-per-node=4" in first and "ntasks-per-node=4" in second and "partition=generate" in second


def test_a_sweep_of_heterogeneous_jobs_is_refused() -> None:
    with pytest.raises(ValueError, match="of which Slurm has no arrays"):
        submit.make_executor(made(), submit.Path("/runs"), array="0-3")


# From a Slurm 22.05.8, columns that say nothing here left out.
SHOWN = (
    "JobId=3 HetJobId=3 HetJobOffset=0 JobName=demo HetJobIdSet=3-4 JobState=RUNNING Reason=None Requeue=1 Restarts=1 "
    "StartTime=2026-11-30T11:46:09 EndTime=2026-11-30T11:51:09 PreemptTime=None NodeList=n[1-2] Comment=abc \n"
    "JobId=4 HetJobId=3 HetJobOffset=1 JobName=demo HetJobIdSet=3-4 JobState=RUNNING Reason=None Requeue=1 Restarts=1 "
    "StartTime=2026-11-30T11:46:09 EndTime=2026-11-30T11:51:09 PreemptTime=None NodeList=n3 Comment=abc \n"
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that were run, in a heterogeneous job whose second component is job 4."""
    known = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID": "3", "SLURM_JOB_ID_HET_GROUP_0": "3"}
    known |= {"SLURM_JOB_ID_HET_GROUP_1": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    known |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "n3"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    answers = {
        "scontrol show job --oneliner 3": SHOWN,
        "squeue --noheader --me --array --format=%i %k": "3+0 abc\n3+1 abc\n5_1 def\n6 \n",
        "squeue --noheader --steps --jobs=3,4 --format=%i": "3.0\n3.batch\n4.0\n",
        "scontrol show hostnames n[1-2]": "n1\nn2\n",
        "scontrol show hostnames n3": "n3\n",
        "sinfo --noheader --Node --nodes=n1,n2,n3 --format=%N %T": "n1 idle\nn2 idle\nn3 down*\n",
    }
    run: list[str] = []

    def answer(words: list[str], *_: Any, **__: Any) -> str:
        run.append(" ".join(words))
        return answers[run[-1]]

    def probed(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        run.append(" ".join(words))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(commands, "run", answer)
    monkeypatch.setattr(commands.subprocess, "run", probed)
    return run


def test_a_heterogeneous_job_is_one_job(asked: list[str]) -> None:
    job = commands.job("3")
    assert job is not None and (job.id, job.state, job.nodes, job.restarts) == ("3", "RUNNING", "n[1-2],n3", 1)
    assert commands.own_jobs() == [("3", "abc"), ("5_1", "def"), ("6", "")]


def test_steps_are_looked_for_and_ended_in_every_component(asked: list[str]) -> None:
    assert commands.steps("3") == ["3.0", "4.0"]
    assert commands.in_components({"3.0"}) == ["3.0", "4.0"]
    assert commands.in_components(set()) == []


def test_every_node_of_every_component_is_probed(asked: list[str]) -> None:
    allocated = commands.allocation()
    assert allocated == [["n1", "n2"], ["n3"]]
    assert commands.dead_nodes(allocated) == ["n3"]
    (probe,) = [line for line in asked if line.startswith("srun ")]
    first, second = probe.split(" : ")
    assert "--het-group=0 --overlap --nodes=2 --ntasks=2" in first and first.endswith(" true")
    assert "--het-group=1 --overlap --nodes=1 --ntasks=1" in second and second.endswith(" true")


def test_a_job_with_one_component_is_asked_for_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    assert commands.in_components({"7.1", "7.0"}) == ["7.0", "7.1"]
