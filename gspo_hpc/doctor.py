"""``gspo-hpc doctor``: what a run needs, looked at before it starts.

Floor 6, on the user's side: imports no torch. The checks are in doctor_*.py; here is which of them are asked, and how
it is told.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_hpc import doctor_inputs, doctor_sizes, doctor_slurm, doctor_tracking
from gspo_hpc.config import Cluster, Config, Tracking
from gspo_hpc.doctor_finding import GROUPS, STATES, Finding, Section, State, within
from gspo_hpc.doctor_node import Machine, look
from gspo_hpc.plan_page import paint
from gspo_hpc.slurm_commands import SlurmError

WAIT_SECONDS = 300.0
_TITLES = {"gpus": "GPUs", "slurm": "Slurm"}
_COLOURS = {"ok": "32", "warn": "33", "fail": "31", "skip": "2"}
# On a login node these are of a machine on which no rank will run.
_OF_A_NODE = ("gpus", "host", "network")


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and where they were made."""

    config: str | None
    platform: str  # cuda or cpu
    place: str  # "login node": no rank runs here; "node": ranks run here
    findings: list[Finding] = field(default_factory=list)
    nodes: dict[str, Any] | None = None  # of --nodes

    @property
    def counts(self) -> dict[State, int]:
        """How many findings have each state."""
        return {state: sum(one.state == state for one in self.findings) for state in STATES}

    @property
    def ok(self) -> bool:
        """Whether nothing was found that will fail."""
        return not self.counts["fail"]

    def to_json(self) -> dict[str, Any]:
        """For --json; docs/doctor.md has the keys."""
        return {
            "ok": self.ok,
            "config": self.config,
            "platform": self.platform,
            "place": self.place,
            "counts": self.counts,
            "findings": [one.to_json() for one in self.findings],
            "nodes": self.nodes,
        }


def diagnose(
    config: Config | None,
    name: str | None = None,
    *,
    nodes: int | None = None,
    wait: float = WAIT_SECONDS,
    say: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Look at everything that a run of `config` needs, or, without one, at what this machine is.

    `nodes`: so many of them are looked at as well, in a job that may wait `wait` seconds. Raises ValueError for numbers
    that cannot be.
    """
    if nodes is not None and nodes < 1:
        raise ValueError(f"--nodes is {nodes}: at least 1")
    if not wait > 0:
        raise ValueError(f"--wait is {wait:g}: seconds, more than 0")
    given = config is not None
    config = config or _of_this_machine()
    cluster, error = _ask_slurm(config)
    for_slurm = nodes is not None or (given and doctor_slurm.wanted(config))
    login = cluster is not None and for_slurm and "SLURM_JOB_ID" not in os.environ
    machine = look(config, elsewhere=_elsewhere(config), rank_runs_here=not login, met=nodes is not None and nodes > 1)
    findings = _softened(machine) if login else list(machine.findings)
    if given:
        findings += within("inputs", lambda: doctor_inputs.findings(config), 300.0)
    findings += within("tracking", lambda: doctor_tracking.findings(config))
    findings += _slurm(config, cluster, error, for_slurm)
    told = None
    if nodes is not None and cluster is not None:
        from gspo_hpc.doctor_nodes import survey  # submitit comes with it

        found = survey(config, nodes, wait, say)
        findings += found.findings
        told = found.to_json()
    elif nodes is not None:
        section = Section("nodes")
        section.fail("job", "no node was looked at: Slurm does not answer here", "run it on a login node")
        findings += section.findings
    findings.sort(key=lambda one: GROUPS.index(one.group))
    return Diagnosis(name, config.cluster.platform, "login node" if login else "node", findings, told)


def page(diagnosis: Diagnosis) -> Iterator[str]:
    """The lines that a person reads."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    where = "a login node" if diagnosis.place == "login node" else "this machine"
    yield f"{paint('doctor', '1', sys.stdout)} of {diagnosis.config or where}, platform {diagnosis.platform}"
    indent = max((len(one.check) for one in diagnosis.findings), default=0)
    indent = min(indent, 24) + 10
    for group in GROUPS:
        found = [one for one in diagnosis.findings if one.group == group]
        if found:
            yield ""
            yield paint(_TITLES.get(group, group.capitalize()), "1", sys.stdout)
        for one in found:
            head = f"  {paint(f'{one.state:<4}', _COLOURS[one.state], sys.stdout)}  {one.check:<{indent - 10}}  "
            texts = [one.finding, *([f"fix: {one.fix}"] if one.fix else [])]
            lines = [line for text in texts for line in _wrapped(text, width - indent)]
            long = len(one.check) > indent - 10
            if long:  # the check on a line of its own
                yield head.rstrip()
            else:
                yield head + lines.pop(0)
            yield from (" " * indent + line for line in lines)
    counts = diagnosis.counts
    summary = ", ".join(paint(f"{counts[state]} {state}", _COLOURS[state], sys.stdout) for state in STATES)
    verdict = "nothing here will fail" if diagnosis.ok else "what fails is to be mended before a run"
    yield ""
    yield f"{summary}: {verdict}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(40, width), break_long_words=False, break_on_hyphens=False) or [""]


def _of_this_machine() -> Config:
    """Where there is no config: the platform that the machine has, and no tracker that anybody asked for."""
    platform = "cuda" if shutil.which("nvidia-smi") else "cpu"
    return Config(cluster=Cluster(platform=platform), tracking=Tracking())  # type: ignore[arg-type]


def _elsewhere(config: Config) -> str:
    """What gives ranks other packages than this interpreter's, if anything does."""
    slurm = config.slurm
    given = {"slurm.container": slurm.container, "slurm.setup": slurm.setup, "slurm.modules": slurm.modules}
    return next((key for key, value in given.items() if value), "")


def _ask_slurm(config: Config) -> tuple[doctor_slurm.Cluster | None, str]:
    """What Slurm tells here, or why it does not."""
    if shutil.which("scontrol") is None or shutil.which("sbatch") is None:
        return None, "Slurm is not installed here"
    try:
        return doctor_slurm.read(config), ""
    except SlurmError as error:
        said = str(error).strip().splitlines()[-1]  # the lines before lead to it
        return None, f"Slurm does not answer: {re.sub(r'^[a-z]+: (?:error|fatal): ', '', said)[:200]}"


def _slurm(config: Config, cluster: doctor_slurm.Cluster | None, error: str, wanted: bool) -> list[Finding]:
    section = Section("slurm")
    if cluster is None and wanted:
        fix = "run it on a login node of the cluster; for this machine alone: cluster.nodes=1 and no section slurm"
        section.fail("commands", error, fix)
        return section.findings
    if cluster is None:
        section.skip("commands", f"{error}; the config asks for none")
        return section.findings
    found = cluster
    sizes = doctor_sizes.of(config)
    return within("slurm", lambda: doctor_slurm.findings(config, found, sizes.checkpoint if sizes else None))


def _softened(machine: Machine) -> list[Finding]:
    """What fails on a login node is not where ranks run: a warning, which says so."""

    def soft(one: Finding) -> Finding:
        if one.group not in _OF_A_NODE or one.state != "fail":
            return one
        return replace(one, state="warn", finding=f"{one.finding} (here, where no rank runs; --nodes N looks there)")

    return [soft(one) for one in machine.findings]
