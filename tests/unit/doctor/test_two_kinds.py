"""Questions and answers of doctor about a run on nodes of two kinds, one of which only generates (1 s).

The tests would catch a component whose partition, nodes or GPUs nobody looked at, a Slurm that starts no such jobs,
and a job of doctor that does not ask for the nodes of the run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.doctor import answers, slurm
from gspo_hpc.doctor import nodes as doctor_nodes
from gspo_hpc.doctor.answers import Answer
from gspo_hpc.doctor.finding import Finding, Section
from gspo_hpc.doctor.slurm import Cluster
from tests.unit.doctor.test_slurm import PARTITIONS, cluster

APART = [
    *("cluster.platform=cuda", "cluster.nodes=3", "cluster.gpus_per_node=8", "rollout.mode=server"),
    *("cluster.generation_nodes=1", "cluster.generation_gpus_per_node=2"),
    *("slurm.partition=high", "slurm.generation_partition=low"),
]
EIGHT = "n8|idle|gpu:8|64|24105|none\nn9|idle|gpu:8|64|24105|none\n"


def two_kinds() -> Cluster:
    """Two nodes of eight GPUs in one partition, and four of two in the other."""
    found = cluster()
    return replace(found, nodes=found.nodes | {"high": slurm.parse_nodes(EIGHT)})


def look(at: Cluster, *overrides: str) -> list[tuple[str, str, str]]:
    """Check, state and finding of each line."""
    found: list[Finding] = slurm.findings(loader.load(None, [*APART, *overrides]), at)
    return [(one.check, one.state, one.finding) for one in found]


def test_each_component_is_held_against_its_own_partition() -> None:
    found = look(two_kinds())
    assert [line for line in found if line[0] in ("partition", "nodes", "gres", "components")] == [
        ("partition", "ok", "high is up"),
        ("nodes", "ok", "2 of 2 nodes of high are up"),
        ("gres", "ok", "nodes of high have 8 GPUs according to gres"),
        ("partition", "ok", "low is up"),
        ("nodes", "ok", "4 of 4 nodes of low are up"),
        ("gres", "ok", "nodes of low have 2 GPUs according to gres"),
        ("components", "ok", "heterogeneous jobs start, and a step reaches all of their nodes"),
    ]
    assert not [line for line in look(two_kinds(), "rollout.mode=colocate") if line[0] == "components"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["cluster.generation_gpus_per_node=4"],
            "nodes of low have 2 GPUs according to gres; the run needs 1 node with 4",
        ),
        (["slurm.generation_partition=none"], "there is no partition none; there are high, low"),
        (["cluster.nodes=9", "cluster.generation_nodes=5"], "cluster.generation_nodes is 5, but low has only 4"),
        (["cluster.nodes=4"], "cluster.nodes is 4, 3 of them in high, but high gives a job at most 2"),
        (["slurm.partition=low", "slurm.generation_partition=high"], "nodes of low have 2 GPUs according to gres"),
    ],
)
def test_what_a_component_cannot_have_is_told_by_its_own_keys(words: list[str], told: str) -> None:
    failed = [finding for _, state, finding in look(two_kinds(), *words) if state == "fail"]
    assert any(told in finding for finding in failed), failed


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("SchedulerType           = sched/builtin", "sched/builtin starts no heterogeneous jobs"),
        ("SchedulerParameters     = bf_interval=2,disable_hetjob_steps", "keeps srun from starting ranks"),
    ],
)
def test_a_slurm_that_starts_no_such_jobs(line: str, told: str) -> None:
    at = two_kinds()
    at = replace(at, config=at.config | slurm.parse_config(line))
    assert [one for one in look(at) if one[0] == "components" and one[1] == "fail" and told in one[2]]


def test_doctors_job_asks_for_the_nodes_of_the_run(tmp_path: Path) -> None:
    config = loader.load(None, APART)
    lines = doctor_nodes.script(config, 3, tmp_path / "job", groups=True).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    first, second = options[: options.index("hetjob")], options[options.index("hetjob") + 1 :]
    assert {"--nodes=2", "--gpus-per-node=8", "--partition=high", "--no-requeue"} <= {*first}
    assert {"--nodes=1", "--gpus-per-node=2", "--partition=low", "--no-requeue"} <= {*second}
    nodes, ranks = ([*line.split(" : ")] for line in lines if line.startswith("srun "))
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in nodes[0] and "--nodes=1 --ntasks=1" in nodes[1]
    assert "--nodes=2 --ntasks=16 --ntasks-per-node=8" in ranks[0] and "--nodes=1 --ntasks=2" in ranks[1]
    assert all(part.split()[-2:] == ["gspo_hpc.doctor.node", str(tmp_path / "job")] for part in nodes)
    assert all(part.split()[-2:] == ["dry-run", str(tmp_path / "job")] for part in ranks)
    fewer = doctor_nodes.script(config, 1, tmp_path / "job")
    assert "hetjob" not in fewer and "--nodes=1" in fewer and "--gpus-per-node=8" in fewer
    with pytest.raises(slurm.SlurmError, match=r"slurm.generation_sbatch: .* is not a valid option"):
        doctor_nodes.script(loader.load(None, [*APART, "slurm.generation_sbatch={licenses: a;b}"]), 3, tmp_path)


def test_nodes_of_two_kinds_have_the_same_versions_and_else_what_they_have() -> None:
    def of(node: str, gpus: str, torch: str = "2.13.0", memory: float = 64.0) -> Answer:
        return Answer(node, {"torch": torch, "GPUs": gpus, "memory in GiB": memory}, [])

    train = [of("n1", "8 x H200"), of("n2", "8 x H200", memory=32.0), of("n3", "8 x H200")]
    generate = [of("n4", "2 x L40S", memory=16.0), of("n5", "2 x L40S", torch="2.11.0", memory=16.0)]
    found = answers.differences_of([train, generate])
    assert [(one["node"], one["fact"], one["others"]) for one in found] == [
        ("n5", "torch", "2.13.0"),
        ("n2", "memory in GiB", "64"),
    ]
    assert answers.differences_of([train]) == answers.differences(train)
    alike = [train[0], generate[0]]
    (line,) = answers.difference_lines(answers.differences_of([[one] for one in alike]), alike)
    assert line.finding == "the same on 2 nodes: torch"


@pytest.mark.parametrize(("away", "usable", "told"), [("", 3, []), ("n8", 0, ["the run needs 2, but only 1 node"])])
def test_nodes_are_counted_in_the_partition_of_each_component(
    away: str, usable: int, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = two_kinds()
    known = at.nodes | {"high": slurm.parse_nodes(EIGHT.replace(f"{away}|idle", f"{away}|down*") if away else EIGHT)}
    monkeypatch.setattr(slurm, "read_nodes", lambda name: known[name])
    monkeypatch.setattr(doctor_nodes.commands, "run", lambda _: PARTITIONS)
    section = Section("nodes")
    assert doctor_nodes._available(loader.load(None, APART), 3, section) == usable
    assert len(section.findings) == len(told)
    assert all(text in one.finding for text, one in zip(told, section.findings, strict=True))
