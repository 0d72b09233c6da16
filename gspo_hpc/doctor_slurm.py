"""Slurm's configuration against what a run asks of it; the recommended lines are those of docs/slurm-admin.md.

Floor 6. What Slurm's commands print is read by pure functions; the commands themselves are run by slurm_commands.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gspo_hpc import slurm_commands
from gspo_hpc.config import Config, Slurm
from gspo_hpc.doctor_finding import Finding, Section, first_line, gib
from gspo_hpc.slurm_commands import SlurmError

PATIENCE = 2.0  # seconds that a controller which does not answer is asked again
_TRIED = (22, 5)  # the oldest Slurm that the tests ran on
_SAVE_SECONDS = 30  # what docs/slurm-admin.md recommends for KillWait ...
_GRACE_SECONDS = 60  # ... and for GraceTime
_LINE = re.compile(r"^\s*([A-Za-z_]+)\s*=\s*(.*?)\s*$")
_PAIR = re.compile(r"(?:^| )([A-Za-z]+)=(\S*)")
_DAYS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
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
        """Whether jobs will run on it, now or when others have ended."""
        return self.state.rstrip("+~#!%$@^-").lower() in _UP  # with a *: does not answer

    @property
    def gpus(self) -> int:
        """gpu:2, gpu:a100:8(S:0-1): of all kinds together."""
        found = re.findall(r"(?:^|,)gpu(?::[A-Za-z][^:,(]*)?:(\d+)", self.gres)
        return sum(map(int, found))


@dataclass(frozen=True)
class Cluster:
    """What Slurm told."""

    version: str
    config: dict[str, str]
    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    nodes: dict[str, list[Node]] = field(default_factory=dict)  # by partition
    associations: list[dict[str, str]] | None = None  # of this user; None: not known


def parse_version(text: str) -> str:
    """`sbatch --version`: slurm 24.11.1, slurm-wlm 22.05.8."""
    found = re.search(r"\d+(?:\.\w+)+", text)
    return found.group() if found else text.strip()


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`."""
    return {match[1]: match[2] for line in text.splitlines() if (match := _LINE.match(line))}


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """`scontrol show partition --oneliner`, by name."""
    found = [dict(_PAIR.findall(line)) for line in text.splitlines() if line.startswith("PartitionName=")]
    return {pairs["PartitionName"]: pairs for pairs in found}


def parse_nodes(text: str) -> list[Node]:
    """`sinfo --Node --noheader --format=%N|%T|%G|%c|%m|%E`."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|", 5)]
        if len(words) == 6:
            name, state, gres, cpus, memory, reason = words
            size = int(memory) * 2**20 if memory.isdigit() else 0
            found.append(Node(name, state.lower(), gres, int(cpus) if cpus.isdigit() else 0, size, reason))
    return found


def parse_minutes(text: str) -> float | None:
    """A time limit (90, 1:30:00, 2-12:00:00) in minutes; None for UNLIMITED and the like."""
    match = _DAYS.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = match.groups()
    if days is not None:  # D-H[:M[:S]]
        return int(days) * 1440 + int(first) * 60 + int(second or 0) + int(third or 0) / 60
    if third is not None:
        return int(first) * 60 + int(second) + int(third) / 60
    return int(first) + int(second or 0) / 60


def parse_seconds(text: str) -> int | None:
    """`30 sec`, or 30."""
    found = re.match(r"\d+", text)
    return int(found.group()) if found else None


def wanted(config: Config) -> bool:
    """Whether a config is one for Slurm."""
    return config.cluster.nodes > 1 or config.slurm != Slurm()


def read(config: Config) -> Cluster:
    """What Slurm tells here. Raises SlurmError where it does not answer."""
    own = parse_config(slurm_commands.run(["scontrol", "show", "config"], PATIENCE))
    partitions = parse_partitions(slurm_commands.run(["scontrol", "show", "partition", "--oneliner"], PATIENCE))
    version = parse_version(slurm_commands.run(["sbatch", "--version"], PATIENCE))
    name = partition_name(config, partitions)
    nodes = {name: read_nodes(name)} if name in partitions else {}
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
            lines = [line.split("|") for line in slurm_commands.run(words, PATIENCE).splitlines()]
            associations = [dict(zip(("account", "partition", "qos"), line, strict=False)) for line in lines]
        except SlurmError:
            pass
    return Cluster(version, own, partitions, nodes, associations)


def read_nodes(partition: str) -> list[Node]:
    """The nodes of a partition."""
    words = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%T|%G|%c|%m|%E"]
    return parse_nodes(slurm_commands.run(words, PATIENCE))


def partition_name(config: Config, partitions: Mapping[str, Mapping[str, str]]) -> str:
    """The one that the run asks for, or Slurm's default."""
    default = next((name for name, pairs in partitions.items() if pairs.get("Default") == "YES"), "")
    return config.slurm.partition or default


def findings(config: Config, cluster: Cluster, save_bytes: int | None = None) -> list[Finding]:
    """All lines of the group. `save_bytes`: of a checkpoint, where the model is known."""
    section = Section("slurm")
    _version(section, cluster)
    name = partition_name(config, cluster.partitions)
    pairs = cluster.partitions.get(name)
    if pairs is None:
        known = ", ".join(sorted(cluster.partitions)) or "none"
        what = f"there is no partition {name}" if name else "there is no default partition"
        section.fail("partition", f"{what}; there are {known}", "slurm.partition=NAME")
    else:
        _partition(section, config, name, pairs)
        _time(section, config, name, pairs)
        _nodes(section, config, name, pairs, cluster.nodes.get(name, []))
    _preemption(section, config, cluster.config, name, pairs or {}, save_bytes)
    _accounting(section, config, cluster)
    return section.findings


def _version(section: Section, cluster: Cluster) -> None:
    ours = cluster.version
    theirs = cluster.config.get("SLURM_VERSION", "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", ours)[:2])
    if numbers < _TRIED:
        section.warn(
            "version",
            f"{ours}: older than any that this was tried on ({_TRIED[0]}.{_TRIED[1]:02d})",
            "try a short run first",
        )
    elif theirs and ours != theirs:
        section.warn("version", f"commands {ours}, controller {theirs}", "log in where both are the same")
    else:
        section.ok("version", ours)


def _partition(section: Section, config: Config, name: str, pairs: Mapping[str, str]) -> None:
    state = pairs.get("State", "")
    if state != "UP":
        fix = f"another slurm.partition, or ask when it comes back (scontrol update PartitionName={name} State=UP)"
        section.fail("partition", f"{name} is {state}", fix)
        return
    for kind, given in (("Accounts", config.slurm.account), ("Qos", config.slurm.qos)):
        allowed, denied = pairs.get(f"Allow{kind}", "ALL"), pairs.get(f"Deny{kind}", "")
        if given and (
            allowed not in ("ALL", "(null)") and given not in allowed.split(",") or given in denied.split(",")
        ):
            key = "account" if kind == "Accounts" else "qos"
            text = (
                f"{name} takes no slurm.{key} {given} (Allow{kind}={allowed}{f', Deny{kind}={denied}' * bool(denied)})"
            )
            section.fail("partition", text, f"another slurm.{key}, or another slurm.partition")
            return
    section.ok("partition", f"{name} is up")


def _time(section: Section, config: Config, name: str, pairs: Mapping[str, str]) -> None:
    limit, asked = parse_minutes(pairs.get("MaxTime", "")), config.slurm.time_minutes
    if limit is not None and asked > limit:
        text = f"slurm.time_minutes is {asked}, and {name} allows {limit:g}: the job would wait for ever"
        section.fail("time limit", text, f"slurm.time_minutes={int(limit)}: a longer run goes on in the next job")
    elif config.slurm.signal_seconds >= asked * 60:
        text = f"slurm.signal_seconds {config.slurm.signal_seconds} is all of slurm.time_minutes {asked}"
        section.fail("time limit", text, "a longer slurm.time_minutes, or a shorter slurm.signal_seconds")
    else:
        section.ok(
            "time limit", f"{asked} min asked for, {f'{limit:g} min' if limit is not None else 'no limit'} in {name}"
        )


def _nodes(section: Section, config: Config, name: str, pairs: Mapping[str, str], nodes: Sequence[Node]) -> None:
    cluster, slurm = config.cluster, config.slurm
    usable = [node for node in nodes if node.usable]
    away = [node for node in nodes if not node.usable]
    shown = ", ".join(
        f"{node.name} {node.state}{f' ({node.reason})' if node.reason not in ('', 'none') else ''}" for node in away[:5]
    )
    more = f" and {len(away) - 5} more" if len(away) > 5 else ""
    most = pairs.get("MaxNodes", "UNLIMITED")
    if most.isdigit() and cluster.nodes > int(most):
        section.fail(
            "nodes", f"cluster.nodes is {cluster.nodes}, and {name} gives a job {most}", f"cluster.nodes={most}"
        )
        return
    if cluster.nodes > len(nodes):
        text = f"cluster.nodes is {cluster.nodes}, and {name} has {len(nodes)}"
        section.fail("nodes", text, f"cluster.nodes={max(1, len(nodes))}, or another slurm.partition")
        return
    text = f"{len(usable)} of {len(nodes)} of {name} are up"
    fix = "scontrol show node NAME tells more; root: scontrol update NodeName=NAME State=RESUME"
    if cluster.nodes > len(usable):
        section.fail("nodes", f"{text}, and cluster.nodes is {cluster.nodes}: {shown}{more}", fix)
    elif away:
        section.warn("nodes", f"{text}: {shown}{more}", fix)
    else:
        section.ok("nodes", text)
    gpus = cluster.gpus_per_node
    if cluster.platform == "cuda":
        enough = [node for node in usable if node.gpus >= gpus]
        sizes = sorted({node.gpus for node in nodes})
        text = f"nodes of {name} have {' or '.join(map(str, sizes))} GPUs by gres"
        if len(enough) < cluster.nodes:
            fix = f"cluster.gpus_per_node={max(sizes, default=0)}, another slurm.partition, or ask for GresTypes=gpu"
            section.fail("gres", f"{text}; {cluster.nodes} nodes with {gpus} are asked for", fix)
        else:
            section.ok("gres", text)
    cpus = (slurm.cpus_per_task or 1) * gpus
    if nodes and cpus > max(node.cpus for node in nodes):
        text = f"{cpus} CPUs a node are asked for ({gpus} ranks of slurm.cpus_per_task {slurm.cpus_per_task or 1})"
        fix = f"slurm.cpus_per_task={max(1, max(node.cpus for node in nodes) // gpus)}"
        section.fail("cpus", f"{text}, and nodes of {name} have {max(node.cpus for node in nodes)}", fix)


def _preemption(
    section: Section, config: Config, own: Mapping[str, str], name: str, pairs: Mapping[str, str], save: int | None
) -> None:
    preempted = own.get("PreemptType", "preempt/none") not in ("preempt/none", "(null)", "")
    mode = pairs.get("PreemptMode", own.get("PreemptMode", "OFF")).upper()
    preempted = preempted and "OFF" not in mode.split(",")
    if config.slurm.requeue:
        default = "" if own.get("JobRequeue", "1") == "1" else "; JobRequeue=0 here is only the default of others"
        section.ok("requeue", f"jobs ask for --requeue{default}")
    elif preempted:
        section.warn("requeue", "slurm.requeue is false: a preemption ends the run", "slurm.requeue=true")
    else:
        section.ok("requeue", "slurm.requeue is false: a run ends with its job")
    if not preempted:
        section.ok("preemption", f"jobs in {name or 'this partition'} are not preempted")
    else:
        fix = f"root: PreemptMode=REQUEUE for {name} in slurm.conf"
        if "REQUEUE" in mode:
            section.ok("preemption", f"by requeue ({own.get('PreemptType', '')})")
        elif "SUSPEND" in mode or "GANG" in mode:
            text = f"PreemptMode={mode}: ranks are stopped where they are, and connections between them may break"
            section.warn("preemption", text, fix)
        else:
            section.warn("preemption", f"PreemptMode={mode}: a preempted job does not come back by itself", fix)
        _signal(section, config, own, name, pairs)
    wait = parse_seconds(own.get("KillWait", ""))
    size = f"; a checkpoint has {gib(save)}" if save else ""
    if wait is not None and wait < _SAVE_SECONDS:
        text = f"{wait} s from SIGTERM to SIGKILL{size}: without grace time that is all a save gets"
        section.warn("KillWait", text, f"root: KillWait={_SAVE_SECONDS} or more in slurm.conf")
    elif wait is not None:
        section.ok("KillWait", f"{wait} s from SIGTERM to SIGKILL")
    hold = re.search(r"cred_expire=(\d+)", own.get("AuthInfo", ""))
    seconds = int(hold.group(1)) if hold else 120
    section.ok("requeue hold", f"{seconds} s; the job cuts it down itself (root: AuthInfo=cred_expire=30)")


def _signal(section: Section, config: Config, own: Mapping[str, str], name: str, pairs: Mapping[str, str]) -> None:
    """What a preempted job hears, and how long it has."""
    if "preempt_send_user_signal" in own.get("SlurmctldParameters", "").split(","):
        section.ok("user signal", "a preempted job gets the signal of --signal at once")
    else:
        text = "a preempted job gets SIGTERM only (no preempt_send_user_signal), which a run stops and saves on as well"
        section.warn("user signal", text, "root: SlurmctldParameters=preempt_send_user_signal in slurm.conf")
    grace = parse_seconds(pairs.get("GraceTime", "0")) or 0
    often = f"yours: a checkpoint.interval below {config.checkpoint.interval}"
    fix = f"root: GraceTime={_GRACE_SECONDS} or more for {name}; {often}"
    if grace == 0:
        text = "0 s: a preemption costs what has been done since the last checkpoint, but for finished groups"
        section.warn("GraceTime", text, fix)
    elif grace < _GRACE_SECONDS:
        section.warn("GraceTime", f"{grace} s to stop and save: short for a large model", fix)
    else:
        section.ok("GraceTime", f"{grace} s to stop and save")


def _accounting(section: Section, config: Config, cluster: Cluster) -> None:
    kind = cluster.config.get("AccountingStorageType", "")
    account, qos = config.slurm.account, config.slurm.qos
    if "slurmdbd" not in kind:
        section.ok("accounting", f"{first_line(kind) or 'none'}; no command here needs it")
        if account or qos:
            text = "slurm.account or slurm.qos is given, and Slurm keeps no accounts"
            section.warn("account", text, "slurm.account=null slurm.qos=null")
        return
    section.ok("accounting", kind)
    if not (account or qos):
        return
    known = cluster.associations
    if known is None:
        section.skip("account", "sacctmgr does not say what this user may use")
        return
    enforced = cluster.config.get("AccountingStorageEnforce", "").lower()
    accounts = sorted({one.get("account", "") for one in known} - {""})
    levels = sorted({level for one in known for level in one.get("qos", "").split(",")} - {""})
    for key, given, names in (("account", account, accounts), ("qos", qos, levels)):
        if given and given not in names:
            text = f"slurm.{key} {given} is not among yours: {', '.join(names) or 'none'}"
            must = any(word in enforced for word in ("associations", "limits", "qos", "safe"))
            section.add("fail" if must else "warn", key, text, f"slurm.{key}=NAME")
        elif given:
            section.ok(key, given)
