"""Checks of Slurm's configuration against what a run needs; docs/slurm-admin.md has the recommended lines.

Pure functions parse what Slurm's commands print; launch/slurm/commands.py runs the commands.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gspo_hpc.config.derived import busy_processes, cpus_per_task
from gspo_hpc.config.reading.slurm_time import parse_minutes
from gspo_hpc.config.schema import Config, Slurm
from gspo_hpc.doctor.finding import Finding, Section, gib
from gspo_hpc.launch.slurm import commands
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.launch.slurm.components import Component, components
from gspo_hpc.system.text import counted, first_line

PATIENCE = 2.0  # seconds during which a controller that does not answer is asked again
_TRIED = (22, 5)  # the oldest Slurm that the tests ran on
_SAVE_SECONDS = 30  # docs/slurm-admin.md recommends this for KillWait ...
_GRACE_SECONDS = 60  # ... and for GraceTime
_LINE = re.compile(r"^\s*([A-Za-z_]+)\s*=\s*(.*?)\s*$")
_UP = ("idle", "mixed", "allocated", "completing", "planned", "reserved")


@dataclass(frozen=True)
class Node:
    """One line of sinfo."""

    name: str
    state: str  # idle, mixed, down* ...
    gres: str
    cpus: int
    memory: int  # bytes
    reason: str

    @property
    def usable(self) -> bool:
        """Return whether jobs can run on it, now or after others have ended."""
        return self.state.rstrip("+~#!%$@^-").lower() in _UP  # a state with a * means that it does not answer

    @property
    def gpus(self) -> int:
        """Number of GPUs of all kinds, as in gpu:2 or gpu:a100:8(S:0-1)."""
        found = re.findall(r"(?:^|,)gpu(?::[A-Za-z][^:,(]*)?:(\d+)", self.gres)
        return sum(map(int, found))


@dataclass(frozen=True)
class Cluster:
    """Slurm's configuration, partitions and nodes."""

    version: str
    config: dict[str, str]
    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    nodes: dict[str, list[Node]] = field(default_factory=dict)  # by partition
    associations: list[dict[str, str]] | None = None  # those of this user; None if not known


def parse_version(text: str) -> str:
    """Parse `sbatch --version`: slurm 24.11.1, slurm-wlm 22.05.8."""
    found = re.search(r"\d+(?:\.\w+)+", text)
    return found.group() if found else text.strip()


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`."""
    return {match[1]: match[2] for line in text.splitlines() if (match := _LINE.match(line))}


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """Parse `scontrol show partition --oneliner`, by name."""
    found = [commands.parse_pairs(line) for line in text.splitlines() if line.startswith("PartitionName=")]
    return {pairs["PartitionName"]: pairs for pairs in found}


def parse_nodes(text: str) -> list[Node]:
    """Parse `sinfo --Node --noheader --format=%N|%T|%G|%c|%m|%E`."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|", 5)]
        if len(words) == 6:
            name, state, gres, cpus, memory, reason = words
            size = int(memory) * 2**20 if memory.isdecimal() else 0
            found.append(Node(name, state.lower(), gres, int(cpus) if cpus.isdecimal() else 0, size, reason))
    return found


def parse_seconds(text: str) -> int | None:
    """Parse `30 sec` or `30`; None for anything else."""
    found = re.match(r"\d+", text)
    return int(found.group()) if found else None


def wanted(config: Config) -> bool:
    """Return whether a config is meant for Slurm."""
    return config.cluster.nodes > 1 or config.slurm != Slurm()


def read(config: Config) -> Cluster:
    """Ask Slurm for its configuration. Raises SlurmError if it does not answer."""
    own = parse_config(commands.run(["scontrol", "show", "config"], PATIENCE))
    partitions = parse_partitions(commands.run(["scontrol", "show", "partition", "--oneliner"], PATIENCE))
    version = parse_version(commands.run(["sbatch", "--version"], PATIENCE))
    names = dict.fromkeys(partition_name(part.slurm, partitions) for part in components(config))
    nodes = {name: read_nodes(name) for name in names if name in partitions}
    associations = None
    if "slurmdbd" in own.get("AccountingStorageType", "") and (config.slurm.account or config.slurm.qos):
        user = pwd.getpwuid(os.getuid()).pw_name
        words = [
            "sacctmgr",
            "--noheader",
            "--parsable2",
            "show",
            "assoc",
            f"user={user}",
            "format=account,partition,qos",
        ]
        try:
            lines = [line.split("|") for line in commands.run(words, PATIENCE).splitlines()]
            associations = [dict(zip(("account", "partition", "qos"), line, strict=False)) for line in lines]
        except SlurmError:
            pass
    return Cluster(version, own, partitions, nodes, associations)


def read_nodes(partition: str) -> list[Node]:
    """Ask Slurm for the nodes of a partition."""
    words = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%T|%G|%c|%m|%E"]
    return parse_nodes(commands.run(words, PATIENCE))


def partition_name(slurm: Slurm, partitions: Mapping[str, Mapping[str, str]]) -> str:
    """Return the partition that is requested, or Slurm's default."""
    default = next((name for name, pairs in partitions.items() if pairs.get("Default") == "YES"), "")
    return slurm.partition or default


def findings(config: Config, cluster: Cluster, save_bytes: int | None = None) -> list[Finding]:
    """Return the findings of the group. `save_bytes`: bytes of a checkpoint, if the model is known."""
    section = Section("slurm")
    _version(section, cluster)
    first, *others = components(config)
    names = ("cluster.nodes", "cluster.gpus_per_node", "slurm.partition")
    _component(section, config, cluster, _Asked(first, *names, beside=config.cluster.nodes - first.nodes))
    names = ("cluster.generation_nodes", "cluster.generation_gpus_per_node", "slurm.generation_partition")
    for part in others:
        _component(section, config, cluster, _Asked(part, *names))
        _together(section, cluster.config)
    name = partition_name(config.slurm, cluster.partitions)
    _preemption(section, config, cluster.config, name, cluster.partitions.get(name, {}), save_bytes)
    _accounting(section, config, cluster)
    return section.findings


@dataclass(frozen=True)
class _Asked:
    """The component of a job, with the keys that say what it is."""

    part: Component
    nodes: str
    gpus: str
    partition: str
    beside: int = 0  # nodes of other components, which the key of the nodes counts as well

    def said(self, partition: str) -> str:
        """Return how many nodes are asked for, as the beginning of a sentence."""
        of = f", {self.part.nodes} of them in {partition}" if self.beside else ""
        return f"{self.nodes} is {self.part.nodes + self.beside}{of}"


def _component(section: Section, config: Config, cluster: Cluster, asked: _Asked) -> None:
    name = partition_name(asked.part.slurm, cluster.partitions)
    pairs = cluster.partitions.get(name)
    if pairs is None:
        known = ", ".join(sorted(cluster.partitions)) or "none"
        what = f"there is no partition {name}" if name else "there is no default partition"
        section.fail("partition", f"{what}; there are {known}", f"set {asked.partition} to one of them")
        return
    _partition(section, asked, name, pairs)
    _time(section, config, name, pairs)
    _nodes(section, config, asked, name, pairs, cluster.nodes.get(name, []))


def _together(section: Section, own: Mapping[str, str]) -> None:
    """Say whether Slurm starts heterogeneous jobs, and steps over all of their components."""
    kind, options = own.get("SchedulerType", "sched/backfill"), own.get("SchedulerParameters", "").lower()
    if kind != "sched/backfill":
        section.fail("components", f"{kind} starts no heterogeneous jobs", "root: SchedulerType=sched/backfill")
    elif "disable_hetjob_steps" in options or "disable_hetero_steps" in options:
        text = "disable_hetjob_steps keeps srun from starting ranks on nodes of two kinds"
        section.fail("components", text, "root: leave it out of SchedulerParameters in slurm.conf")
    else:
        section.ok("components", "heterogeneous jobs start, and a step reaches all of their nodes")


def _version(section: Section, cluster: Cluster) -> None:
    ours = cluster.version
    theirs = cluster.config.get("SLURM_VERSION", "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", ours)[:2])
    if numbers < _TRIED:
        section.warn(
            "version",
            f"Slurm {ours} is older than {_TRIED[0]}.{_TRIED[1]:02d}, the oldest that was tested",
            "try a short run first",
        )
    elif theirs and ours != theirs:
        section.warn(
            "version", f"the commands are of Slurm {ours}, the controller of {theirs}", "use a node where they match"
        )
    else:
        section.ok("version", ours)


def _partition(section: Section, asked: _Asked, name: str, pairs: Mapping[str, str]) -> None:
    state, slurm = pairs.get("State", ""), asked.part.slurm
    if state != "UP":
        fix = f"choose another {asked.partition}; root: scontrol update PartitionName={name} State=UP"
        section.fail("partition", f"{name} is {state}", fix)
        return
    for kind, given in (("Accounts", slurm.account), ("Qos", slurm.qos)):
        allowed, denied = pairs.get(f"Allow{kind}", "ALL"), pairs.get(f"Deny{kind}", "")
        if given and (
            allowed not in ("ALL", "(null)") and given not in allowed.split(",") or given in denied.split(",")
        ):
            key = "account" if kind == "Accounts" else "qos"
            rules = f"Allow{kind}={allowed}{f', Deny{kind}={denied}' * bool(denied)}"
            text = f"{name} does not accept slurm.{key} {given} ({rules})"
            section.fail("partition", text, f"choose another slurm.{key} or another {asked.partition}")
            return
    section.ok("partition", f"{name} is up")


def _time(section: Section, config: Config, name: str, pairs: Mapping[str, str]) -> None:
    limit, asked = parse_minutes(pairs.get("MaxTime", "")), config.slurm.time_minutes
    if limit is not None and asked > limit:
        text = f"slurm.time_minutes is {asked}, but {name} allows {limit:g}, so the job would never start"
        section.fail("time limit", text, f"slurm.time_minutes={int(limit)}; a longer run continues in the next job")
    elif config.slurm.signal_seconds >= asked * 60:
        text = f"slurm.signal_seconds is {config.slurm.signal_seconds}, which takes all of slurm.time_minutes ({asked})"
        section.fail("time limit", text, "raise slurm.time_minutes, or lower slurm.signal_seconds")
    else:
        section.ok(
            "time limit",
            f"the job requests {asked} min; {name} allows {f'{limit:g} min' if limit is not None else 'any time'}",
        )


def _nodes(
    section: Section, config: Config, asked: _Asked, name: str, pairs: Mapping[str, str], nodes: Sequence[Node]
) -> None:
    part, key, said, beside = asked.part, asked.nodes, asked.said(name), asked.beside
    usable = [node for node in nodes if node.usable]
    away = [node for node in nodes if not node.usable]
    shown = ", ".join(
        f"{node.name} {node.state}{f' ({node.reason})' if node.reason not in ('', 'none') else ''}" for node in away[:5]
    )
    more = f" and {len(away) - 5} more" if len(away) > 5 else ""
    most = pairs.get("MaxNodes", "UNLIMITED")
    if most.isdecimal() and part.nodes > int(most):
        section.fail("nodes", f"{said}, but {name} gives a job at most {most}", f"{key}={int(most) + beside}")
        return
    if part.nodes > len(nodes):
        text = f"{said}, but {name} has only {len(nodes)}"
        section.fail("nodes", text, f"{key}={max(1, len(nodes)) + beside}, or choose another {asked.partition}")
        return
    text = f"{len(usable)} of {len(nodes)} nodes of {name} are up"
    fix = "scontrol show node NAME shows the reason; root: scontrol update NodeName=NAME State=RESUME"
    if part.nodes > len(usable):
        section.fail("nodes", f"{text}, but {said}: {shown}{more}", fix)
    elif away:
        section.warn("nodes", f"{text}: {shown}{more}", fix)
    else:
        section.ok("nodes", text)
    gpus = part.gpus
    if config.cluster.platform == "cuda":
        enough = [node for node in usable if node.gpus >= gpus]
        sizes = sorted({node.gpus for node in nodes})
        text = f"nodes of {name} have {' or '.join(map(str, sizes))} GPUs according to gres"
        if len(enough) < part.nodes:
            fix = f"{asked.gpus}={max(sizes, default=0)}, or another {asked.partition}; root: GresTypes=gpu"
            section.fail("gres", f"{text}; the run needs {counted(part.nodes, 'node')} with {gpus}", fix)
        else:
            section.ok("gres", text)
    _cores(section, config, part, name, pairs, nodes)


def _cores(
    section: Section, config: Config, part: Component, name: str, pairs: Mapping[str, str], nodes: Sequence[Node]
) -> None:
    """Compare the cores that ranks request with those that nodes have, and with what the partition would give."""
    gpus, busy, requested = part.gpus, busy_processes(config), cpus_per_task(config) or 1
    most = max((node.cpus for node in nodes), default=0)
    if nodes and requested * gpus > most:
        text = f"the run requests {requested * gpus} CPUs per node ({gpus} ranks, slurm.cpus_per_task {requested})"
        share = max(1, most // gpus)
        fix = f"slurm.cpus_per_task={share}"
        if config.cluster.platform == "cuda" and share < busy.total:  # which the plan refuses for ranks bound to cores
            fix += f" slurm.srun=[--cpu-bind=none], so that ranks share the node's cores: {busy} are busy at once"
        section.fail("cpus", f"{text}, but nodes of {name} have {most}", fix)
    found = re.search(r"DefCpuPerGPU=(\d+)", pairs.get("JobDefaults", ""))
    if found and config.slurm.cpus_per_task is None and requested < int(found[1]):
        text = (
            f"the run requests {requested} CPUs for each rank, one for each busy process; {name} would give {found[1]}"
        )
        section.warn("cores of a task", text, f"slurm.cpus_per_task={found[1]}")


def _preemption(
    section: Section, config: Config, own: Mapping[str, str], name: str, pairs: Mapping[str, str], save: int | None
) -> None:
    preempted = own.get("PreemptType", "preempt/none") not in ("preempt/none", "(null)", "")
    mode = pairs.get("PreemptMode", own.get("PreemptMode", "OFF")).upper()
    preempted = preempted and "OFF" not in mode.split(",")
    if config.slurm.requeue:
        default = "" if own.get("JobRequeue", "1") == "1" else "; JobRequeue=0 is only the default of other jobs"
        section.ok("requeue", f"jobs are submitted with --requeue{default}")
    elif preempted:
        section.warn("requeue", "slurm.requeue is false, so a preemption ends the run", "slurm.requeue=true")
    else:
        section.ok("requeue", "slurm.requeue is false, so a run ends with its job")
    if not preempted:
        section.ok("preemption", f"jobs in {name or 'this partition'} are not preempted")
    else:
        fix = f"root: PreemptMode=REQUEUE for {name} in slurm.conf"
        if "REQUEUE" in mode:
            section.ok("preemption", f"preempted jobs are requeued ({own.get('PreemptType', '')})")
        elif "SUSPEND" in mode or "GANG" in mode:
            text = f"PreemptMode={mode} suspends ranks, so connections between them may break"
            section.warn("preemption", text, fix)
        else:
            section.warn("preemption", f"with PreemptMode={mode} a preempted job does not return to the queue", fix)
        _signal(section, config, own, name, pairs)
    wait = parse_seconds(own.get("KillWait", ""))
    size = f" to save a checkpoint of {gib(save)}" if save else ""
    if wait is not None and wait < _SAVE_SECONDS:
        text = f"without grace time a job has only {wait} s from SIGTERM to SIGKILL{size}"
        section.warn("KillWait", text, f"root: KillWait={_SAVE_SECONDS} or more in slurm.conf")
    elif wait is not None:
        section.ok("KillWait", f"a job has {wait} s from SIGTERM to SIGKILL")
    hold = re.search(r"cred_expire=(\d+)", own.get("AuthInfo", ""))
    seconds = int(hold.group(1)) if hold else 120
    section.ok(
        "requeue hold",
        f"Slurm holds a requeued job for {seconds} s; the run shortens that itself (root: AuthInfo=cred_expire=30)",
    )


def _signal(section: Section, config: Config, own: Mapping[str, str], name: str, pairs: Mapping[str, str]) -> None:
    """Add the findings about the signal that a preempted job gets, and the time that it has."""
    if "preempt_send_user_signal" in own.get("SlurmctldParameters", "").split(","):
        section.ok("user signal", "a preempted job gets the signal of --signal immediately")
    else:
        text = "a preempted job gets only SIGTERM (no preempt_send_user_signal); a run stops and saves on it as well"
        section.warn("user signal", text, "root: SlurmctldParameters=preempt_send_user_signal in slurm.conf")
    grace = parse_seconds(pairs.get("GraceTime", "0")) or 0
    often = f"or save more often, with checkpoint.interval below {config.checkpoint.interval}"
    fix = f"root: GraceTime={_GRACE_SECONDS} or more for {name}; {often}"
    if grace == 0:
        text = "GraceTime is 0 s, so a preemption loses all work since the last checkpoint except finished groups"
        section.warn("GraceTime", text, fix)
    elif grace < _GRACE_SECONDS:
        section.warn("GraceTime", f"a job has {grace} s to stop and save, which is short for a large model", fix)
    else:
        section.ok("GraceTime", f"a job has {grace} s to stop and save")


def _accounting(section: Section, config: Config, cluster: Cluster) -> None:
    kind = cluster.config.get("AccountingStorageType", "")
    account, qos = config.slurm.account, config.slurm.qos
    if "slurmdbd" not in kind:
        section.ok("accounting", f"{first_line(kind) or 'none'}; gspo-hpc does not need accounting")
        if account or qos:
            text = "slurm.account or slurm.qos is set, but Slurm keeps no accounts"
            section.warn("account", text, "slurm.account=null slurm.qos=null")
        return
    section.ok("accounting", kind)
    if not (account or qos):
        return
    known = cluster.associations
    if known is None:
        section.skip("account", "sacctmgr does not tell which accounts this user may use")
        return
    enforced = cluster.config.get("AccountingStorageEnforce", "").lower()
    accounts = sorted({one.get("account", "") for one in known} - {""})
    levels = sorted({level for one in known for level in one.get("qos", "").split(",")} - {""})
    for key, given, names in (("account", account, accounts), ("qos", qos, levels)):
        if given and given not in names:
            text = f"slurm.{key} {given} is not among yours: {', '.join(names) or 'none'}"
            must = any(word in enforced for word in ("associations", "limits", "qos", "safe"))
            section.add("fail" if must else "warn", key, text, f"set slurm.{key} to one of them")
        elif given:
            section.ok(key, given)
