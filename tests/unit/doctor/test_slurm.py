"""Slurm's side of doctor: what its commands print, what is concluded from it, and the job that looks at nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.config import loader
from gspo_hpc.config.reading.slurm_time import parse_minutes
from gspo_hpc.config.schema import Config
from gspo_hpc.config.schema import replace as with_changes
from gspo_hpc.doctor import answers as doctor_answers
from gspo_hpc.doctor import examine, slurm
from gspo_hpc.doctor import nodes as doctor_nodes
from gspo_hpc.doctor.answers import Answer
from gspo_hpc.doctor.finding import Finding, Section
from gspo_hpc.doctor.slurm import Cluster
from gspo_hpc.launch.slurm.commands import Job
from gspo_hpc.system.files import write_json

# From a Slurm 22.05.8, lines that say nothing here left out.
CONFIG = """\
Configuration data as of 2026-11-22T15:05:51
AccountingStorageEnforce = none
AccountingStorageType   = accounting_storage/none
AuthInfo                = socket=/run/munge/munge.socket,cred_expire=120
GresTypes               = gpu
JobRequeue              = 1
KillWait                = 5 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SlurmctldHost[0]        = vm(127.0.0.1)
SlurmctldParameters     = (null)
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at vm is UP
"""
PARTITIONS = """\
PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
DisableRootJobs=NO ExclusiveUser=NO GraceTime=20 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO \
Nodes=n[1-4] PriorityTier=1 OverSubscribe=NO PreemptMode=REQUEUE State=UP TotalCPUs=16 TotalNodes=4 \
SelectTypeParameters=NONE JobDefaults=(null) TRES=cpu=16,mem=96420M,node=4,billing=16
PartitionName=high AllowGroups=ALL AllowAccounts=abc,def AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A \
GraceTime=0 MaxNodes=2 MaxTime=1-00:00:00 Nodes=n[1-4] PriorityTier=10 PreemptMode=OFF State=UP TotalNodes=4
"""
NODES = (
    "n1|mixed|gpu:2|16|24105|none\nn2|mixed|gpu:2|16|24105|none\n"
    "n3|idle|gpu:2|16|24105|none\nn4|idle|gpu:2|16|24105|none\n"
)


def cluster(config: str = CONFIG, partitions: str = PARTITIONS, nodes: str = NODES, **more: Any) -> Cluster:
    """What doctor reads of a Slurm that prints these."""
    found = slurm.parse_nodes(nodes)
    known = slurm.parse_partitions(partitions)
    return Cluster("22.05.8", slurm.parse_config(config), known, {"low": found, "high": found}, **more)


def look(overrides: list[str], at: Cluster | None = None) -> dict[str, Finding]:
    """The findings by check."""
    config = loader.load(None, ["cluster.platform=cuda", "cluster.gpus_per_node=2", *overrides])
    return {one.check: one for one in slurm.findings(config, at or cluster())}


def test_a_cluster_as_it_is() -> None:
    found = look(["cluster.nodes=4", "slurm.time_minutes=600"])
    assert found["version"].state == "ok" and found["version"].finding == "22.05.8"
    assert found["partition"].finding == "low is up"
    assert found["time limit"].finding == "the job requests 600 min; low allows any time"
    assert (found["nodes"].state, found["nodes"].finding) == ("ok", "4 of 4 nodes of low are up")
    assert found["gres"].state == "ok"
    assert found["preemption"].finding == "preempted jobs are requeued (preempt/partition_prio)"
    assert found["user signal"].state == "warn" and "preempt_send_user_signal" in found["user signal"].fix
    assert (found["GraceTime"].state, found["KillWait"].state) == ("warn", "warn")
    assert "20 s" in found["GraceTime"].finding and "KillWait=30" in found["KillWait"].fix
    assert "120 s" in found["requeue hold"].finding
    assert found["accounting"].state == "ok" and "account" not in found
    assert not [one for one in found.values() if one.state == "fail"]
    assert all(one.fix for one in found.values() if one.state == "warn")


@pytest.mark.parametrize(("version", "state"), [("21.08.8", "warn"), ("22.05.0", "ok"), ("25.11.1", "ok")])
def test_a_slurm_that_is_older_than_the_oldest_that_was_tried(version: str, state: str) -> None:
    at = replace(cluster(CONFIG.replace("22.05.8", version)), version=version)
    assert look([], at)["version"].state == state
    other = replace(at, version="24.05.1")
    assert look([], other)["version"].state == "warn", "commands and controller of two versions"


def test_accounts_that_a_partition_denies() -> None:
    denies = cluster(partitions=PARTITIONS.replace("AllowAccounts=ALL", "AllowAccounts=ALL DenyAccounts=abc,def", 1))
    found = look(["slurm.account=def"], denies)["partition"]
    assert found.state == "fail" and "low does not accept slurm.account def" in found.finding
    assert look(["slurm.account=xyz"], denies)["partition"].state == "ok"


def test_the_recommended_lines_are_not_complained_of(project: Path) -> None:
    """What docs/slurm-admin.md recommends is what leaves nothing to say."""
    text = (project / "docs" / "slurm-admin.md").read_text()
    assert (
        "SlurmctldParameters=preempt_send_user_signal" in text and "KillWait=30" in text and "a minute or more" in text
    )
    good = CONFIG.replace("= 5 sec", "= 30 sec").replace(
        "SlurmctldParameters     = (null)", "SlurmctldParameters = x,preempt_send_user_signal"
    )
    found = look(
        ["cluster.nodes=4", "slurm.cpus_per_task=2"], cluster(good, PARTITIONS.replace("GraceTime=20", "GraceTime=60"))
    )
    assert {one.check: one.state for one in found.values() if one.state != "ok"} == {}


def test_a_task_has_a_core_for_each_busy_process() -> None:
    """A rank requests 4 CPUs if nobody says otherwise, and these nodes have 2 for each GPU."""
    small = cluster(nodes=NODES.replace("|16|", "|4|"))
    found = look([], small)["cpus"]
    assert found.state == "fail" and "8 CPUs per node (2 ranks, slurm.cpus_per_task 4)" in found.finding
    assert found.fix.startswith("slurm.cpus_per_task=2 slurm.srun=[--cpu-bind=none]")
    assert "the rank (1), its engine (1)" in found.fix
    unbound = ["slurm.cpus_per_task=2", "slurm.srun=[--cpu-bind=none]"]  # as it says
    for words in (unbound, ["cluster.platform=cpu"], ["cluster.gpus_per_node=1"]):
        assert "cpus" not in look(words, small), words


def test_a_partition_that_gives_more_cores_is_named() -> None:
    by_gpu = cluster(partitions=PARTITIONS.replace("JobDefaults=(null)", "JobDefaults=DefCpuPerGPU=8"))
    found = look(["cluster.gpus_per_node=1"], by_gpu)["cores of a task"]
    assert found.state == "warn" and "requests 4 CPUs" in found.finding and found.fix == "slurm.cpus_per_task=8"
    more = by_gpu.partitions["low"] | {"JobDefaults": "DefCpuPerGPU=4"}
    same = replace(by_gpu, partitions=by_gpu.partitions | {"low": more})
    for words, at in ((["slurm.cpus_per_task=4"], by_gpu), ([], cluster()), ([], same)):
        assert "cores of a task" not in look(words, at)


@pytest.mark.parametrize(
    ("overrides", "change", "check", "expected", "fix"),
    [
        (["slurm.partition=gpu"], ("", ""), "partition", "no partition gpu; there are high, low", "slurm.partition"),
        ([], ("State=UP TotalCPUs", "State=DOWN TotalCPUs"), "partition", "low is DOWN", "State=UP"),
        (
            ["slurm.partition=high", "slurm.account=xyz"],
            ("", ""),
            "partition",
            "does not accept slurm.account xyz",
            "account",
        ),
        (
            ["slurm.partition=high", "slurm.time_minutes=1441"],
            ("", ""),
            "time limit",
            "allows 1440",
            "time_minutes=1440",
        ),
        (["slurm.time_minutes=2", "slurm.signal_seconds=120"], ("", ""), "time limit", "takes all of", "time_minutes"),
        (["slurm.partition=high", "cluster.nodes=3"], ("", ""), "nodes", "gives a job at most 2", "cluster.nodes=2"),
        (["cluster.nodes=5"], ("", ""), "nodes", "cluster.nodes is 5, but low has only 4", "cluster.nodes=4"),
        (["cluster.gpus_per_node=8"], ("", ""), "gres", "the run needs 1 node with 8", "cluster.gpus_per_node=2"),
        (["slurm.cpus_per_task=9"], ("", ""), "cpus", "18 CPUs per node", "slurm.cpus_per_task=8"),
    ],
)
def test_what_slurm_would_not_do(
    overrides: list[str], change: tuple[str, str], check: str, expected: str, fix: str
) -> None:
    found = look(overrides, cluster(partitions=PARTITIONS.replace(*change)))[check]
    assert found.state == "fail" and expected in found.finding and fix in found.fix, found


def test_a_job_may_ask_for_all_the_time_that_a_partition_gives() -> None:
    found = look(["slurm.partition=high", "slurm.time_minutes=1440"])["time limit"]
    assert found.state == "ok" and "high allows 1440 min" in found.finding


def test_nodes_that_are_away() -> None:
    nodes = (
        NODES.replace("n3|idle", "n3|drained").replace("|none\nn4", "|disk is bad\nn4").replace("n2|mixed", "n2|down*")
    )
    found = look(["cluster.nodes=2"], cluster(nodes=nodes))["nodes"]
    assert found.state == "warn" and "2 of 4 nodes of low are up: n2 down*, n3 drained (disk is bad)" in found.finding
    assert look(["cluster.nodes=3"], cluster(nodes=nodes))["nodes"].state == "fail"


def test_five_of_the_nodes_that_are_away_are_named() -> None:
    nodes = "".join(f"n{number}|{'idle' if number == 1 else 'down*'}|gpu:2|16|24105|none\n" for number in range(1, 9))
    found = look(["cluster.nodes=1"], cluster(nodes=nodes))["nodes"].finding
    assert found.endswith("are up: n2 down*, n3 down*, n4 down*, n5 down*, n6 down* and 2 more")


@pytest.mark.parametrize(
    ("state", "usable"),
    [("idle", True), ("idle~", True), ("mixed", True), ("idle*", False), ("down*", False), ("drained", False)],
)
def test_states_of_nodes(state: str, usable: bool) -> None:
    (node,) = slurm.parse_nodes(f"n1|{state}|gpu:2|4|100|none")
    assert node.usable is usable


def test_preemption_that_costs_more() -> None:
    cancel = look([], cluster(partitions=PARTITIONS.replace("PreemptMode=REQUEUE", "PreemptMode=CANCEL")))
    assert cancel["preemption"].state == "warn" and "PreemptMode=REQUEUE" in cancel["preemption"].fix
    none = look([], cluster(CONFIG.replace("preempt/partition_prio", "preempt/none")))
    assert none["preemption"].state == "ok" and "GraceTime" not in none and "user signal" not in none
    now = look(["checkpoint.interval=7"], cluster(partitions=PARTITIONS.replace("GraceTime=20", "GraceTime=0")))
    assert "since the last checkpoint" in now["GraceTime"].finding and "below 7" in now["GraceTime"].fix
    ends = look(["slurm.requeue=false"])
    assert ends["requeue"].state == "warn" and ends["requeue"].fix == "slurm.requeue=true"


def test_accounts() -> None:
    with_accounts = CONFIG.replace("accounting_storage/none", "accounting_storage/slurmdbd")
    enforced = with_accounts.replace("Enforce = none", "Enforce = associations,limits,qos")
    mine = [{"account": "abc", "partition": "", "qos": "normal,long"}]
    asked = ["slurm.account=abd", "slurm.qos=long"]
    found = look(asked, cluster(enforced, associations=mine))
    assert (found["account"].state, found["qos"].state) == ("fail", "ok") and "abc" in found["account"].finding
    assert look(asked, cluster(with_accounts, associations=mine))["account"].state == "warn"
    assert look(asked, cluster(enforced))["account"].state == "skip"
    assert look(asked)["account"].state == "warn"  # Slurm keeps none


@given(st.integers(0, 30), st.integers(0, 23), st.integers(0, 59))
def test_time_limits_in_all_of_slurms_forms(days: int, hours: int, minutes: int) -> None:
    total = days * 1440 + hours * 60 + minutes
    assert parse_minutes(f"{days}-{hours:02d}:{minutes:02d}:00") == total
    assert parse_minutes(f"{hours:02d}:{minutes:02d}:30") == hours * 60 + minutes + 0.5
    assert parse_minutes(str(minutes)) == minutes
    assert parse_minutes(f"{days}-{hours}") == days * 1440 + hours * 60
    assert parse_minutes("UNLIMITED") is None


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gpu:2", 2), ("gpu:a100:8(S:0-1)", 8), ("gpu:h100:4,gpu:l4:2,shard:8", 6), ("(null)", 0), ("nic:2,gpu:1", 1)],
)
def test_gpus_of_a_gres(gres: str, gpus: int) -> None:
    (node,) = slurm.parse_nodes(f"n1|idle|{gres}|4|100|none")
    assert node.gpus == gpus and node.usable


def test_versions_of_slurm() -> None:
    assert slurm.parse_version("slurm-wlm 22.05.8\n") == "22.05.8"
    assert slurm.parse_version("slurm 24.11.1\n") == "24.11.1"
    old = replace(cluster(), version="20.11.9")
    assert look([], old)["version"].state == "warn"
    assert look([], replace(cluster(), version="23.02.1"))["version"].state == "warn"  # the controller has another


def test_no_slurm_is_no_failure_of_a_laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = loader.load(None, ["cluster.platform=cpu"])

    def commands(found: examine.Diagnosis) -> Finding:
        return next(one for one in found.findings if one.group == "slurm")

    assert commands(examine.diagnose(None)).state == "skip"
    assert commands(examine.diagnose(config)).state == "skip"
    for_slurm = examine.diagnose(with_changes(config, slurm=with_changes(config.slurm, partition="gpu")))
    assert commands(for_slurm).state == "fail" and "not installed" in commands(for_slurm).finding
    asked = examine.diagnose(config, nodes=2)
    assert commands(asked).state == "fail" and not asked.ok
    assert [one.state for one in asked.findings if one.group == "nodes"] == ["fail"]


def test_the_script_of_the_job(tmp_path: Path) -> None:
    words = ["slurm.partition=low", "slurm.account=abc", "slurm.sbatch={licenses: a}", "slurm.mail_user=me@x.org"]
    words += ["slurm.environment={NCCL_SOCKET_IFNAME: ib0}", "cluster.gpus_per_node=8", "slurm.srun=[--mpi=none]"]
    text = doctor_nodes.script(loader.load(None, words), 4, tmp_path / "job")
    lines = text.splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert {
        "partition=low",
        "account=abc",
        "licenses=a",
        "nodes=4",
        "time=5",
        "no-requeue",
        "gpus-per-node=8",
    } <= options
    assert not [line for line in options if line.startswith(("mail", "requeue"))]
    assert "supervisor" not in text  # no other one is started for a check that a signal ended
    (command,) = [line for line in lines if line.startswith("srun ")]
    assert command.startswith("srun --nodes=4 --ntasks=4 --ntasks-per-node=1 ")
    assert command.endswith(
        f"--mpi=none --kill-on-bad-exit=0 --wait=0 {sys.executable} -P -m gspo_hpc.doctor.node {tmp_path}/job"
    )
    assert "export NCCL_SOCKET_IFNAME=ib0" in lines
    with pytest.raises(slurm.SlurmError, match="not safe in a batch script"):
        doctor_nodes.script(loader.load(None, words), 4, tmp_path / "a$(b)")
    with pytest.raises(slurm.SlurmError, match="is not a valid option"):
        doctor_nodes.script(loader.load(None, ["slurm.sbatch={licenses: a;b}"]), 1, tmp_path)


def answer(node: str, torch: str = "2.13.0", memory: float = 64.0, **more: Any) -> Answer:
    return Answer(node, {"torch": torch, "memory in GiB": memory, "kernel": "6.1", **more}, [])


def test_the_odd_one_out() -> None:
    nodes = [answer("n1"), answer("n2", memory=64.5), answer("n3", torch="2.11.0"), answer("n4", memory=32.0)]
    assert doctor_answers.differences(nodes) == [
        {"node": "n3", "fact": "torch", "value": "2.11.0", "others": "2.13.0"},
        {"node": "n4", "fact": "memory in GiB", "value": "32", "others": "64"},
    ]
    lacking = replace(nodes[0], facts={"memory in GiB": 64.0, "kernel": "6.1"}, node="n5")
    assert {"node": "n5", "fact": "torch", "value": "nothing", "others": "2.13.0"} in doctor_answers.differences(
        [*nodes, lacking]
    )
    assert doctor_answers.differences(nodes[:2]) == []


def test_a_fact_that_half_of_the_nodes_lack_has_no_usual_number() -> None:
    """Two nodes that do not tell their GPU's clock, and two that tell different ones: none of the latter is usual."""
    nodes = [answer("n1"), answer("n2"), answer("n3", clock=1410.0), answer("n4", clock=1980.0)]
    assert doctor_answers.differences(nodes) == [
        {"node": "n3", "fact": "clock", "value": "1410", "others": "nothing"},
        {"node": "n4", "fact": "clock", "value": "1980", "others": "nothing"},
    ]


def test_memory_that_is_left_may_differ_by_a_quarter() -> None:
    """It changes while the nodes are asked; that of the machine does not."""
    for left, odd in ((52.0, False), (47.0, True)):
        nodes = [Answer(f"n{i}", {"memory left in GiB": 64.0}, []) for i in range(2)]
        nodes.append(Answer("n3", {"memory left in GiB": left}, []))
        assert bool(doctor_answers.differences(nodes)) == odd
    assert doctor_answers.differences([answer("n1"), answer("n2"), answer("n3", memory=61.0)])


@pytest.mark.parametrize(
    ("fact", "state"),
    [("torch", "fail"), ("GPUs", "fail"), ("machine", "fail"), ("kernel", "warn"), ("driver", "warn")],
)
def test_what_must_be_alike_is_a_failure_and_the_rest_a_warning(fact: str, state: str) -> None:
    nodes = [Answer(f"n{i}", {fact: "b" if i == 3 else "a"}, []) for i in range(1, 4)]
    (found,) = doctor_answers.difference_lines(doctor_answers.differences(nodes), nodes)
    assert (found.state, found.finding) == (state, "n3: b; the others: a") and found.fix.endswith("slurm.exclude=n3")


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=9))
def test_most_nodes_are_never_odd(values: list[str]) -> None:
    odd = doctor_answers.differences([answer(f"n{i}", torch=value) for i, value in enumerate(values)])
    most = max(values.count(value) for value in values)
    assert len(odd) == len(values) - most
    assert all(values.count(one["value"]) <= most and one["value"] != one["others"] for one in odd)


def at(node: str, *states: str, text: str = "text") -> Answer:
    """Return the answer of a node with these states of check 0, 1, ..."""
    findings = [Finding("host", f"check {i}", state, f"{text} {i}", "fix") for i, state in enumerate(states)]  # type: ignore[arg-type]
    return Answer(node, {}, findings)


def lines_of(*answers: Answer) -> list[tuple[str, str, str]]:
    return [(one.check, one.state, one.finding) for one in doctor_answers.merge(answers)]


def test_findings_of_nodes_become_a_line_each() -> None:
    """A node with a warning is named beside one that fails."""
    found = lines_of(at("n1", "ok", "ok", "warn"), at("n2", "ok", "fail", "warn"), at("n3", "ok", "warn", "warn"))
    assert found == [
        ("host: check 1", "fail", "n2: text 1"),
        ("host: check 1", "warn", "n3: text 1"),
        ("host: check 2", "warn", "all 3: text 2"),
        ("host", "ok", "1 check is ok on 3 nodes"),
    ]


def test_what_nodes_did_not_check_is_not_ok() -> None:
    found = lines_of(at("n1", "skip", "skip", "ok"), at("n2", "skip", "ok", "ok"))
    assert found == [
        ("host: check 0", "skip", "all 2: text 0"),
        ("host: check 1", "skip", "n1: text 1"),
        ("host", "ok", "1 check is ok on 2 nodes; 1 check is ok on n2, which alone makes it"),
    ]
    three = lines_of(at("n1", "skip"), at("n2", "ok"), at("n3", "ok"))
    assert three[1:] == [("host", "ok", "1 check is ok on the 2 nodes that make it")]
    assert lines_of(at("n1", "skip"), at("n2", "warn"), at("n3", "ok"))[2:] == [], "one that made it found it otherwise"


def test_a_check_is_ok_on_the_nodes_that_made_it() -> None:
    """Only the first node looks for W&B, and only the others meet it."""
    found = lines_of(at("n1", "ok"), at("n2", "ok", "ok", "ok"), at("n3", "ok", "ok", "ok"))
    assert found == [("host", "ok", "1 check is ok on 3 nodes; 2 checks are ok on the 2 nodes that make them")]
    alone = lines_of(at("n1", "ok", "ok"), at("n2", "ok"))
    assert alone == [("host", "ok", "1 check is ok on 2 nodes; 1 check is ok on n1, which alone makes it")]


def test_nodes_that_say_different_things_are_told_apart() -> None:
    found = lines_of(at("n1", "fail", text="a"), at("n2", "fail", text="b"), at("n3", "fail", text="a"))
    assert found == [("host: check 0", "fail", "n1, n3: a 0; n2: b 0")]
    four = [at(f"n{number}", "warn", text=f"{number} GiB") for number in range(4)]
    assert lines_of(*four) == [("host: check 0", "warn", "all 4: 0 GiB 0 (and 3 similar)")]


def test_two_findings_of_a_check_on_a_node_are_both_told() -> None:
    """Two processes of others on GPUs, for example."""
    both = Answer("n1", {}, [*at("n1", "warn", text="one").findings, *at("n1", "warn", text="two").findings])
    assert lines_of(both, at("n2", "ok")) == [("host: check 0", "warn", "n1: one 0; n1: two 0")]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["loading", "error: RuntimeError: no address for ib9", "srun: error: n1: task 0: Exited with exit code 1"],
            "error: RuntimeError: no address for ib9",
        ),
        (
            [
                "slurmstepd: error: execve(): /nonexistent/python: No such file or directory",
                "srun: error: n1: task 0: Exited with exit code 2",
            ],
            "slurmstepd: error: execve(): /nonexistent/python: No such file or directory",
        ),
        (
            ["bash: module: command not found", "srun: error: n2: tasks 0-3: Exited with exit code 127"],
            "bash: module: command not found",
        ),
        (
            [
                "/var/spool/job3/slurm_script: line 9: /no/such/python: No such file or directory",
                "slurmstepd: _step_signal: Terminating StepId=3.1",
                "srun: error: n1: task 0: Exited with exit code 127",
            ],
            "/var/spool/job3/slurm_script: line 9: /no/such/python: No such file or directory",
        ),
        (
            ["loading modules", "Fatal Python error: no encodings", "srun: error: n1: task 0: Exited with exit code 1"],
            "Fatal Python error: no encodings",
        ),
        (
            ["srun: error: n1: task 1: Killed", "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 1 ***"],
            "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 1 ***",
        ),
        ([], ""),
    ],
)
def test_a_job_that_fails_says_why(lines: list[str], reason: str) -> None:
    """Slurm's own last line says only which task ended."""
    assert doctor_nodes.told(lines) == reason


@pytest.mark.timeout(60)
def test_a_node_that_does_not_answer_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm says that the job runs; one of its two nodes hangs after the other has answered."""
    running = Job("7", "RUNNING", "None", "n[1-2]", None, None, None, 0, "")
    monkeypatch.setattr(doctor_nodes.commands, "job", lambda job_id: running)
    monkeypatch.setattr(doctor_nodes, "LATER_SECONDS", 0.5)
    monkeypatch.setattr(doctor_nodes, "_SETTLE_SECONDS", 0.5)
    write_json(tmp_path / "node-00000.json", {"node": "n1", "facts": {}, "findings": []})
    found = doctor_nodes.Survey(2, "7", ["n1", "n2"])
    section = Section("nodes")
    doctor_nodes._follow(found, 2, 60.0, tmp_path, section)
    (told,) = section.findings
    assert told.state == "fail" and "no answer from n2" in told.finding and "slurm.exclude=n2" in told.fix


# As Slurm's job_state_reason.c writes them: limits that other jobs use up, and what no end of another job changes.
PASSING = (
    "Resources Priority Reservation Licenses ReqNodeNotAvail PartitionDown AssociationJobLimit QOSJobLimit "
    "QOSResourceLimit QOSMaxJobsPerUserLimit QOSMaxNodePerUserLimit QOSMaxCpuPerUserLimit QOSMaxGRESPerUser "
    "QOSMaxSubmitJobPerUserLimit QOSGrpNodeLimit QOSGrpGRES QOSGrpCPUMinutesLimit AssocGrpGRES AssocGrpJobsLimit "
    "AssocGrpCpuLimit AssocMaxJobsLimit MaxGRESPerAccount MaxNodePerAccount MaxJobsPerAccount"
)
LASTING = (
    "PartitionTimeLimit PartitionNodeLimit PartitionConfig BadConstraints QOSMaxNodePerJobLimit "
    "QOSMaxWallDurationPerJobLimit QOSMaxGRESPerJob QOSMaxGRESPerNode QOSMaxCpuMinutesPerJobLimit "
    "AssocMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit AssocMaxCpuPerNode AssocMaxGRESPerJob QOSMinGRES "
    "QOSMinCpuNotSatisfied MaxMemPerLimit InvalidAccount InvalidQOS AccountNotAllowed QOSNotAllowed "
    "DependencyNeverSatisfied ReservationDeleted"
)


@pytest.mark.parametrize(
    ("reason", "state"),
    [(f"({one})", "warn") for one in PASSING.split()] + [(f"({one})", "fail") for one in LASTING.split()],
)
def test_a_job_that_would_never_start_is_a_failure(
    reason: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = Job("7", "PENDING", reason, "", None, None, None, 0, "")
    monkeypatch.setattr(doctor_nodes.commands, "job", lambda job_id: pending)
    section = Section("nodes")
    doctor_nodes._follow(doctor_nodes.Survey(2, "7"), 2, -1.0, tmp_path, section)
    (told,) = section.findings
    assert (told.state, reason.strip("()") in told.finding) == (state, True)
    assert ("correct the section slurm" in told.fix) == (state == "fail")


def run_nodes(folder: Path, count: int, environment: dict[int, dict[str, str]]) -> list[Answer]:
    """The nodes' part in as many processes as there would be nodes: what srun starts, all on this machine."""
    processes = []
    for rank in range(count):
        own = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(count), "SLURMD_NODENAME": f"n{rank + 1}"}
        variables = os.environ | {"WANDB_MODE": "disabled"} | own | environment.get(rank, {})
        command = [sys.executable, "-m", "gspo_hpc.doctor.node", str(folder)]
        processes.append(subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    return doctor_answers.read_answers(folder)


def test_nodes_meet_and_one_is_odd(tmp_path: Path) -> None:
    """Locks, renames, connections and clocks between three; one of them has another torch on its path."""
    metadata = tmp_path / "other" / "torch-9.9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    config = loader.load(None, ["cluster.platform=cpu", f"run.dir={tmp_path}/run", f"model.path={tmp_path}/none"])
    (folder / "config.yaml").write_text(loader.dump(config))
    answers = run_nodes(folder, 3, {1: {"PYTHONPATH": str(metadata.parent)}})

    assert [one.node for one in answers] == ["n1", "n2", "n3"]
    assert [(one["node"], one["fact"], one["value"]) for one in doctor_answers.differences(answers)] == [
        ("n2", "torch", "9.9.9")
    ]
    for one in answers[1:]:
        states = {(f.group, f.check): f.state for f in one.findings}
        assert states["files", "lock between nodes"] == "ok"
        assert states["files", "rename between nodes"] == "ok"
        assert states["network", "between nodes"] == "ok"
        clocks = [f for f in one.findings if (f.group, f.check) == ("host", "clock")]
        assert [f.state for f in clocks] == ["ok"] and "within 1 s of n1" in clocks[0].finding
    merged = {one.check: one for one in doctor_answers.merge(answers)}
    assert merged["versions: torch"].state == "fail" and merged["versions: torch"].finding.startswith("n2: 9.9.9")
    assert merged["files: model.path"].state == "fail" and "all 3" in merged["files: model.path"].finding
    hello = json.loads((folder / "hello.json").read_text())
    assert oct((folder / "hello.json").stat().st_mode)[-3:] == "600" and hello["node"] == "n1"


def test_a_node_that_is_given_the_lock_says_so(tmp_path: Path) -> None:
    """Where locks hold on one node only, the second gets what the first has: the same file, not locked."""
    from gspo_hpc.doctor import meeting

    host = meeting.Host(tmp_path, "n1", 2)
    shutil.copy(tmp_path / "lock", tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "lock")
    try:
        found = {one.check: one for one in meeting.visit(tmp_path, 1)}
    finally:
        host.close(0.0)
    assert (
        found["lock between nodes"].state == "fail"
        and "this node got it as well" in found["lock between nodes"].finding
    )
    assert found["between nodes"].state == "ok"


def test_only_nodes_of_this_job_are_answered(tmp_path: Path) -> None:
    """Whoever has not read the token in the job's folder gets no answer."""
    from gspo_hpc.doctor import meeting

    host = meeting.Host(tmp_path, "n1", 2)
    hello = json.loads((tmp_path / "hello.json").read_text())
    try:
        with pytest.raises((OSError, ValueError)):
            meeting._ahead("127.0.0.1", hello["port"], "another token")
        assert abs(meeting._ahead("127.0.0.1", hello["port"], hello["token"])) < 1.0
    finally:
        host.close(0.0)


def test_the_fastest_exchange_tells_the_time() -> None:
    """One answer comes late: half of its time would be taken for a clock that is ahead."""
    from gspo_hpc.doctor import meeting

    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rwb", buffering=0) as stream:
            stream.readline()
            for number in range(5):
                stream.readline()
                text = f"{time.time()!r}\n"
                time.sleep(1.0 if number == 2 else 0.0)
                stream.write(text.encode())

    threading.Thread(target=answer, daemon=True).start()
    with server:
        assert abs(meeting._ahead("127.0.0.1", server.getsockname()[1], "token")) < 0.4


def test_a_file_that_others_see_late_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gspo_hpc.doctor import meeting

    hello = {"node": "n1", "addresses": [], "port": 9, "token": "", "written": 0.0}
    (tmp_path / "lock").touch()
    for late, state in ((60.0, "ok"), (0.1, "warn")):
        monkeypatch.setattr(meeting, "_LATE", late)
        (tmp_path / "hello.json").unlink(missing_ok=True)
        threading.Timer(0.5, lambda: write_json(tmp_path / "hello.json", hello)).start()
        found = {one.check: one for one in meeting.visit(tmp_path, 1, seconds=20.0)}
        assert found["rename between nodes"].state == state, found


def test_a_first_node_that_does_not_come(tmp_path: Path) -> None:
    from gspo_hpc.doctor import meeting

    (found,) = meeting.visit(tmp_path, 1, seconds=0.3)
    assert (found.check, found.state) == ("rename between nodes", "fail")
    (tmp_path / "hello.json").write_text(
        json.dumps({"node": "n1", "addresses": ["127.0.0.1"], "port": 9, "token": "", "written": 0.0})
    )
    (tmp_path / "lock").touch()
    told = {one.check: one for one in meeting.visit(tmp_path, 1, seconds=0.3)}
    assert told["between nodes"].state == "fail" and re.search("refused", told["between nodes"].finding)


def test_numbers_that_cannot_be() -> None:
    for words, text in (
        ({"nodes": 0}, "--nodes is 0"),
        ({"wait": 0.0}, "--wait is 0"),
        ({"wait": float("nan")}, "--wait"),
    ):
        with pytest.raises(ValueError, match=text):
            examine.diagnose(Config(), **words)  # type: ignore[arg-type]


def test_the_job_starts_the_ranks_of_the_run_only_where_they_are_asked_for(tmp_path: Path) -> None:
    config = loader.load(None, ["cluster.platform=cpu", "cluster.gpus_per_node=2", "cluster.nodes=4"])
    for groups in (False, True):
        lines = doctor_nodes.script(config, 4, tmp_path, groups=groups).splitlines()
        steps = [line for line in lines if line.startswith("srun ")]
        assert len(steps) == 1 + groups and "gspo_hpc.doctor.node" in steps[0] and "--ntasks=4 " in steps[0]
        assert "--kill-on-bad-exit=0" in steps[0]  # the other nodes answer although one cannot
        if groups:
            assert "--kill-on-bad-exit=0" not in steps[1] and "--kill-on-bad-exit=1" in steps[1]
            assert steps[1].endswith(f"gspo_hpc.training.worker dry-run {tmp_path}") and "--ntasks=8 " in steps[1]


@pytest.mark.parametrize(
    ("nodes", "words", "told"),
    [
        (2, ["cluster.nodes=4"], "it needs --nodes 4, the nodes of the run"),
        (2, None, "it needs a config"),
        (2, ["cluster.nodes=2", "parallel.tensor_model_parallel_size=3"], "world_size"),
    ],
)
def test_ranks_are_started_for_a_whole_run_only(nodes: int, words: list[str] | None, told: str) -> None:
    config = None if words is None else loader.load(None, ["cluster.platform=cpu", *words])
    with pytest.raises(ValueError, match=told):
        examine.diagnose(config, nodes=nodes, groups=True)
