"""``gspo-hpc doctor --nodes N``: a short job that checks every node, and finds nodes that differ from the others."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.config.section import is_sbatch_option
from gspo_hpc.doctor import slurm
from gspo_hpc.doctor.answers import Answer, difference_lines, differences_of, merge, read_answers
from gspo_hpc.doctor.files import run_folder
from gspo_hpc.doctor.finding import Finding, Section, shortened
from gspo_hpc.launch import preflight, watch
from gspo_hpc.launch.slurm import commands, srun, submit
from gspo_hpc.launch.slurm.commands import Job, SlurmError
from gspo_hpc.launch.slurm.components import components, is_heterogeneous
from gspo_hpc.runs import snapshot
from gspo_hpc.system.files import make_private_dir, read_json, write_atomically
from gspo_hpc.system.text import counted, first_line

ANSWER_SECONDS = 200.0  # nodes must answer within this time once the job runs
LATER_SECONDS = 60.0  # the other nodes must answer within this time after the first
_JOINING_SECONDS = 120.0  # in which ranks that have imported their packages join their process groups
# The ranks must have joined them within this time after the nodes' answers; a run allows them as long to import.
GROUPS_SECONDS = watch.COLD + _JOINING_SECONDS
_END_SECONDS = 20.0  # a cancelled job must have ended within this time
_POLL = 0.5
_SETTLE_SECONDS = 5.0  # until the last node's answer is visible here, and until a finished job has ended
_NAMED = 8  # nodes that are named where all of them answered
_ENDED = re.compile(
    r"(?:task|tasks) [\d,-]+: (?:Exited|Terminated|Killed|Aborted|Segmentation)|STEP \S+ ON|Job step|Terminating StepId"
)


@dataclass
class Survey:
    """The check of several nodes: what was asked, and what they answered."""

    asked: int
    job_id: str | None = None
    nodes: list[str] = field(default_factory=list)  # the nodes of the job
    answers: list[Answer] = field(default_factory=list)
    differences: list[dict[str, str]] = field(default_factory=list)  # node, fact, value, others
    findings: list[Finding] = field(default_factory=list)
    places: list[dict[str, Any]] = field(default_factory=list)  # of each rank, with its parameters, as a dry run says

    @property
    def unanswered(self) -> list[str]:
        """Nodes of the job that did not answer."""
        there = {answer.node for answer in self.answers}
        return [node for node in self.nodes if node not in there]

    def to_json(self) -> dict[str, Any]:
        """Return the object for --json."""
        return {
            "asked": self.asked,
            "job_id": self.job_id,
            "answered": [answer.node for answer in self.answers],
            "unanswered": self.unanswered,
            "differences": self.differences,
            "ranks": self.places,
            "answers": {
                answer.node: {"facts": answer.facts, "findings": [one.to_json() for one in answer.findings]}
                for answer in self.answers
            },
        }


def survey(config: Config, count: int, wait: float, say: Callable[[str], None], *, groups: bool = False) -> Survey:
    """Check `count` nodes in a job that may wait `wait` seconds for its start; `say` gets a line about the job.

    `groups`: start the ranks of the run there, too, and have them join their process groups.
    """
    found = Survey(count)
    section = Section("nodes")
    try:
        usable = _available(config, count, section)
        if usable:
            with _job_folder(config) as folder:
                _run(config, usable, wait, folder, found, section, say, groups=groups and usable == count)
        if groups and usable != count:
            text = f"they were not started: the run has {count} nodes, and {usable} can be used"
            section.skip("process groups", text)
    except SlurmError as error:
        section.fail("job", first_line(str(error)), "fix the section slurm; gspo-hpc submit would get the same error")
    except OSError as error:
        section.fail("job", f"{error.filename}: {error.strerror}", "choose a run.dir that you can write to")
    if found.answers:
        first = components(asked_for(config, count))[0].nodes
        early = [answer for answer in found.answers if answer.node in found.nodes[:first]]
        others = [answer for answer in found.answers if answer not in early]
        found.differences = differences_of([kind for kind in (early, others) if kind])
        section.findings += [*difference_lines(found.differences, found.answers), *merge(found.answers)]
    found.findings = section.findings
    return found


def job_minutes(groups: bool) -> int:
    """Return the limit of the job: time for all that is waited for, and a minute to start and to end."""
    return math.ceil((ANSWER_SECONDS + _SETTLE_SECONDS + (GROUPS_SECONDS if groups else 0.0)) / 60.0) + 1


def script(config: Config, count: int, folder: Path, *, groups: bool = False) -> str:
    """Return the batch script: the options of the run's own job, a few minutes, and one process per node.

    With `groups` the ranks of the run come after them, and join their process groups.
    """
    if not preflight.PLAIN_PATH.fullmatch(str(folder)):
        raise SlurmError(f"run.dir: {str(folder.parent)!r} has characters that are not safe in a batch script")
    for key, given in (("sbatch", config.slurm.sbatch), ("generation_sbatch", config.slurm.generation_sbatch)):
        for name, value in given.items():
            if not is_sbatch_option(name, value):
                raise SlurmError(f"slurm.{key}: {name!r}: {value!r} is not a valid option of sbatch")
    short = replace(
        config.slurm,
        time_minutes=job_minutes(groups),
        signal_seconds=30,
        requeue=False,
        comment=None,
        mail_user=None,
        mail_type=None,
        srun=(*config.slurm.srun, "--kill-on-bad-exit=0", "--wait=0"),
    )
    whole = replace(asked_for(config, count), slurm=short)
    one = 1 if is_heterogeneous(whole) else None
    single = replace(whole, cluster=replace(whole.cluster, gpus_per_node=1, generation_gpus_per_node=one))
    own = srun.environment(whole, folder / srun.CODE)
    task = ["gspo_hpc.doctor.node", str(folder)]
    steps = [shlex.join(srun.command(single, folder.parent, folder / srun.CODE, list(own), task))]
    if groups:
        run = replace(whole, slurm=replace(short, srun=config.slurm.srun))  # one rank that fails ends all, as in a run
        task = ["gspo_hpc.training.worker", "dry-run", str(folder)]
        steps.append(shlex.join(srun.command(run, folder.parent, folder / srun.CODE, list(own), task)))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in own.items()]
    named = replace(whole, run=replace(whole.run, name="gspo-doctor"))
    executor = submit.make_executor(named, folder)
    return executor.script("\n".join([*exports, *steps]))


def asked_for(config: Config, count: int) -> Config:
    """Return the config of a job with `count` nodes: those of the run, or else as many as those that train."""
    if count == config.cluster.nodes:
        return config
    alike = replace(config.cluster, nodes=count, generation_nodes=0, generation_gpus_per_node=None)
    if is_heterogeneous(config):
        return replace(config, cluster=alike, rollout=replace(config.rollout, mode="colocate"))
    return replace(config, cluster=replace(config.cluster, nodes=count))


def _available(config: Config, count: int, section: Section) -> int:
    """Return how many nodes can be checked, at most `count`; add a finding about those that cannot."""
    partitions = slurm.parse_partitions(commands.run(["scontrol", "show", "partition", "--oneliner"]))
    parts = components(asked_for(config, count))
    asked = Counter[str]()
    for part in parts:
        asked[slurm.partition_name(part.slurm, partitions)] += part.nodes
    kind = "--nodes is" if len(parts) == 1 else "the run needs"
    usable = [_usable(name, nodes, partitions, section, kind) for name, nodes in asked.items()]
    whole = all(found >= nodes for found, nodes in zip(usable, asked.values(), strict=True))
    return count if whole else usable[0] if len(parts) == 1 else 0  # there is no smaller job of two kinds of nodes


def _usable(name: str, count: int, partitions: Mapping[str, Any], section: Section, asks: str) -> int:
    """Return how many nodes of a partition can be checked, as `_available` does."""
    nodes = slurm.read_nodes(name) if name in partitions else []
    usable = [node for node in nodes if node.usable]
    if count <= len(usable) or not nodes:
        return count
    away = [f"{node.name} is {node.state}" for node in nodes if not node.usable]
    why = f": {', '.join(away)}" if away else ", which has no more"
    text = f"{asks} {count}, but only {counted(len(usable), 'node')} of partition {name} can be used{why}"
    fix = "scontrol show node NAME says why; root: scontrol update NodeName=NAME State=RESUME"
    if not away:
        fix = f"--nodes {len(usable)}, or a partition with more nodes (slurm.partition)"
    section.fail("nodes", text, fix)
    return len(usable)


@contextlib.contextmanager
def _job_folder(config: Config) -> Iterator[Path]:
    """Make a folder beside the run, which all nodes must see, and remove it afterwards."""
    folder = run_folder(config) / f".doctor-job-{secrets.token_hex(4)}"
    make_private_dir(folder)
    try:
        yield folder
    finally:
        for _ in range(5):  # NFS keeps open files a little longer
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(_POLL)


def _run(
    config: Config,
    count: int,
    wait: float,
    folder: Path,
    found: Survey,
    section: Section,
    say: Callable[[str], None],
    *,
    groups: bool,
) -> None:
    write_atomically(folder / "config.yaml", loader.dump(config))
    snapshot.take(folder / srun.CODE, Config())
    path = folder / "job.sh"
    write_atomically(path, script(config, count, folder, groups=groups))
    found.job_id = commands.run(["sbatch", "--parsable", str(path)]).strip().split(";")[0]
    say(f"job {found.job_id} checks {counted(count, 'node')}")
    try:
        _follow(found, count, wait, folder, section)
        if groups and found.answers:
            found.places = _follow_groups(found.job_id, folder, section)
    finally:
        _end(found.job_id)


def _follow(found: Survey, count: int, wait: float, folder: Path, section: Section) -> None:
    """Wait until all nodes have answered, or no more answers can come."""
    assert found.job_id is not None
    began = time.monotonic()
    running_since: float | None = None
    answered_since: float | None = None
    while True:
        job = commands.job(found.job_id)
        now = time.monotonic()
        active = job is not None and job.active
        if job is not None and job.nodes and not found.nodes:
            found.nodes = commands.hostnames(job.nodes)
        if job is not None and active and job.state == "PENDING" and now - began > wait:
            _add_waited(section, job, wait)
            return
        if job is not None and job.state == "RUNNING":
            running_since = running_since or now
        found.answers = read_answers(folder)
        answered_since = answered_since or (now if found.answers else None)
        late = running_since is not None and now - running_since > ANSWER_SECONDS
        late = late or (answered_since is not None and now - answered_since > LATER_SECONDS)
        if len(found.answers) >= count or not active or late:
            break
        time.sleep(_POLL)
    settled = time.monotonic() + _SETTLE_SECONDS
    while len(found.answers) < count and time.monotonic() < settled:
        time.sleep(_POLL)
        found.answers = read_answers(folder)
    if len(found.answers) >= count or (found.answers and found.nodes and not found.unanswered):
        names = ", ".join(answer.node for answer in found.answers[:_NAMED])
        names = names if len(found.answers) <= _NAMED else f"all {len(found.answers)} nodes"
        section.ok("job", f"job {found.job_id}: {names} answered")
        return
    who = ", ".join(found.unanswered) or f"any of {counted(count, 'node')}"
    text = f"job {found.job_id}: no answer from {who}{_said(folder)}"
    fix = "correct slurm.setup, slurm.modules or slurm.python: the job must find this Python and this package"
    if found.answers:
        fix = f"slurm.exclude={','.join(found.unanswered)}; each node must see {folder.parent} and find this Python"
    section.fail("job", text, fix)


def _follow_groups(job_id: str, folder: Path, section: Section) -> list[dict[str, Any]]:
    """Wait until the ranks have written their places, or the job is over; return the places."""
    deadline = time.monotonic() + GROUPS_SECONDS
    path = folder / "ranks.json"
    ended = False
    while path.name not in os.listdir(folder) and time.monotonic() < deadline:
        if (job := commands.job(job_id)) is None or not job.active:
            time.sleep(_SETTLE_SECONDS)  # until what a node wrote is visible here
            ended = True
            break
        time.sleep(_POLL)
    if path.name in os.listdir(folder):
        places: list[dict[str, Any]] = read_json(path)
        nodes = len({one["node"] for one in places})
        section.ok(
            "process groups",
            f"{counted(len(places), 'rank')} on {counted(nodes, 'node')} joined them and summed over each",
        )
        return places
    text = f"the ranks did not join their process groups within {GROUPS_SECONDS:.0f} s"
    fix = "slurm.environment: NCCL_DEBUG=INFO tells more, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME picks the network"
    if ended:
        text = "a rank failed before all had joined their process groups"
        fix = f"correct what it says; if that is the network, {fix}"
    section.fail("process groups", text + _said(folder), fix)
    return []


def _add_waited(section: Section, job: Job, wait: float) -> None:
    reason = job.reason.strip("()") or "unknown"
    text = f"job {job.id} did not start within {wait:.0f} s ({reason}) and was cancelled, so no node was checked"
    if job.never_starts:
        section.fail("job", text, f"correct the section slurm: with the reason {reason} the job would never start")
    else:
        section.warn("job", text, "try again when nodes are free, with a longer --wait, or with fewer --nodes")


def _end(job_id: str) -> None:
    """Wait for the end of the job, and cancel it if it is late. A job whose nodes all answered ends by itself."""
    deadline, patience = time.monotonic() + _END_SECONDS, time.monotonic() + _SETTLE_SECONDS
    with contextlib.suppress(SlurmError):
        cancelled = False
        while (job := commands.job(job_id)) is not None and job.active and time.monotonic() < deadline:
            late = job.state == "PENDING" or time.monotonic() > patience
            if late and not cancelled and job.state != "COMPLETING":
                commands.cancel(job_id)
                cancelled = True
            time.sleep(_POLL)


def _said(folder: Path) -> str:
    """Return the line of the job's log that gives the reason of its failure, as the end of a sentence."""
    lines: list[str] = []
    for path in folder.glob("*_log.out"):
        lines += [line.strip() for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    reason = told(lines)
    return f"; the job says: {shortened(reason, 300)}" if reason else ""


def told(lines: Sequence[str]) -> str:
    """Return the line that gives the reason: the first error of a rank, else of Slurm, else the last line."""
    ours = [line for line in lines if line.startswith("error: ")]
    steps = [line for line in lines if _ENDED.search(line)]  # srun only says which task ended
    slurms = [line for line in lines if re.match(r"(slurmstepd|srun|\w+): error: ", line) and line not in steps]
    others = [line for line in lines if line not in steps]
    return next(iter([*ours, *slurms, *others[-1:], *steps[-1:]]), "")
