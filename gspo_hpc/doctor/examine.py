"""Examine a machine, a config and a cluster before a run starts: which checks are made, and where."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Cluster, Config, Tracking
from gspo_hpc.data import hub_data
from gspo_hpc.doctor import inputs, sizes, slurm, tracking
from gspo_hpc.doctor.finding import GROUPS, STATES, Finding, Section, State, shortened, within
from gspo_hpc.doctor.node import Machine, look
from gspo_hpc.launch import preflight
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.models import hub
from gspo_hpc.planning.plan import make_plan

WAIT_SECONDS = 300.0
# Groups that describe the machine itself: on a login node no rank will run there.
_OF_A_NODE = ("gpus", "host", "network")


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the place where they were made."""

    config: str | None
    platform: str  # cuda or cpu
    place: str  # "login node": no rank runs there; "node": ranks run there
    findings: list[Finding] = field(default_factory=list)
    nodes: dict[str, Any] | None = None  # what --nodes found

    @property
    def counts(self) -> dict[State, int]:
        """Number of findings by state."""
        return {state: sum(one.state == state for one in self.findings) for state in STATES}

    @property
    def ok(self) -> bool:
        """Return whether no finding is a failure."""
        return not self.counts["fail"]

    def to_json(self) -> dict[str, Any]:
        """Return the object for --json; docs/doctor.md documents its keys."""
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
    groups: bool = False,
    wait: float = WAIT_SECONDS,
    say: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Check everything that a run of `config` needs; without a config, check this machine.

    `nodes`: check this many nodes as well, in a Slurm job that may wait `wait` seconds for its start; with `groups` the
    ranks of the run join their process groups there. `say` gets lines
    about the progress of that job. Raises ValueError for numbers out of range.
    """
    if nodes is not None and nodes < 1:
        raise ValueError(f"--nodes is {nodes}; it must be at least 1")
    if not wait > 0:
        raise ValueError(f"--wait is {wait:g}; it must be a number of seconds above 0")
    if groups and (config is None or nodes != config.cluster.nodes):
        asked = "a config" if config is None else f"--nodes {config.cluster.nodes}, the nodes of the run"
        raise ValueError(f"--groups starts all ranks of a run: it needs {asked}")
    given = config is not None
    config = hub_data.with_cached_files(hub.with_cached_folder(config or _of_this_machine()))
    if groups:
        make_plan(config, preflight.rows(config)).require()
    cluster, error = _ask_slurm(config)
    for_slurm = nodes is not None or (given and slurm.wanted(config))
    login = cluster is not None and for_slurm and "SLURM_JOB_ID" not in os.environ
    met = nodes is not None and nodes > 1
    machine = look(config, elsewhere=_elsewhere(config), rank_runs_here=not login, met=met, given=given)
    findings = _softened(machine) if login else list(machine.findings)
    if given:
        findings += within("inputs", lambda: inputs.findings(config), 300.0)
    findings += within("tracking", lambda: tracking.findings(config))
    findings += _slurm(config, cluster, error, for_slurm)
    surveyed = None
    if nodes is not None and cluster is not None:
        from gspo_hpc.doctor.nodes import survey  # imports submitit

        found = survey(config, nodes, wait, say, groups=groups)
        findings += found.findings
        surveyed = found.to_json()
    elif nodes is not None:
        section = Section("nodes")
        section.fail("job", "no node was checked, because Slurm does not answer here", "run it on a login node")
        findings += section.findings
    findings.sort(key=lambda one: GROUPS.index(one.group))
    return Diagnosis(name, config.cluster.platform, "login node" if login else "node", findings, surveyed)


def _of_this_machine() -> Config:
    """Return a config for the platform of this machine, without a tracker."""
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")
    platform = "cuda" if driver else "cpu"
    return Config(cluster=Cluster(platform=platform), tracking=Tracking())  # type: ignore[arg-type]


def _elsewhere(config: Config) -> str:
    """Return the setting that gives ranks other packages than this interpreter has; empty if there is none."""
    slurm = config.slurm
    given = {"slurm.container": slurm.container, "slurm.setup": slurm.setup, "slurm.modules": slurm.modules}
    return next((key for key, value in given.items() if value), "")


def _ask_slurm(config: Config) -> tuple[slurm.Cluster | None, str]:
    """Return what Slurm reports here, or the reason why it does not."""
    if shutil.which("scontrol") is None or shutil.which("sbatch") is None:
        return None, "Slurm is not installed here"
    try:
        return slurm.read(config), ""
    except SlurmError as error:
        last = str(error).strip().splitlines()[-1]  # the lines before only lead up to it
        return None, f"Slurm does not answer: {shortened(re.sub(r'^[a-z]+: (?:error|fatal): ', '', last))}"


def _slurm(config: Config, cluster: slurm.Cluster | None, error: str, wanted: bool) -> list[Finding]:
    section = Section("slurm")
    if cluster is None and wanted:
        fix = "run it on a login node of the cluster; for a run on this machine, set cluster.nodes=1 and omit slurm"
        section.fail("commands", error, fix)
        return section.findings
    if cluster is None:
        section.skip("commands", f"{error}; the config does not need it")
        return section.findings
    found = cluster
    needed = sizes.of(config)
    return within("slurm", lambda: slurm.findings(config, found, needed.checkpoint if needed else None))


def _softened(machine: Machine) -> list[Finding]:
    """Turn failures of a login node into warnings, because no rank runs there."""

    def soft(one: Finding) -> Finding:
        if one.group not in _OF_A_NODE or one.state != "fail":
            return one
        return replace(
            one,
            state="warn",
            finding=f"{one.finding} (on this login node, where no rank runs; --nodes N checks the nodes)",
        )

    return [soft(one) for one in machine.findings]
