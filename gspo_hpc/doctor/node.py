"""Check one machine: for the page of doctor, before the ranks of a run start on it, and as a node of a Slurm job.

``python -m gspo_hpc.doctor.node FOLDER``, started by srun for ``gspo-hpc doctor --nodes``, checks its node, meets the
others in the shared folder, and writes its findings there.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config import loader
from gspo_hpc.config.derived import gpus_of_node
from gspo_hpc.config.schema import Config
from gspo_hpc.data import counting
from gspo_hpc.data.sources import parts
from gspo_hpc.doctor import files, host, meeting, packages, sizes, tracking, versions
from gspo_hpc.doctor.finding import Finding, Section, within
from gspo_hpc.doctor.gpus import judging, reading
from gspo_hpc.launch import mounts
from gspo_hpc.launch.preflight import Problem
from gspo_hpc.models import hub
from gspo_hpc.rewards import registry
from gspo_hpc.rewards.environments import tools
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system import environment, host_memory, processes
from gspo_hpc.system.files import write_json
from gspo_hpc.system.text import GIB

Facts = dict[str, str | float]


@dataclass(frozen=True)
class Machine:
    """The findings on one machine, and the facts about it."""

    findings: list[Finding]
    facts: Facts  # texts that should be the same on all nodes, and numbers that may differ a little


def look(
    config: Config,
    *,
    elsewhere: str = "",
    rank_runs_here: bool = True,
    met: bool = False,
    given: bool = True,
    node: int = 0,
) -> Machine:
    """Check everything that belongs to this machine: versions, GPUs, memory and limits, network, files.

    `elsewhere`: the setting that gives ranks other packages than this interpreter has. `met`: nodes also meet.
    `given`: the config is that of a run, not one that only names the platform of this machine. `node`: the number of
    this one in the job.
    """
    needed = sizes.of(config)
    facts: Facts = {}
    cuda = config.cluster.platform == "cuda"
    installed: list[packages.Installed] = []

    def check_versions() -> list[Finding]:
        python = config.slurm.python
        installed.append(packages.read_with(python) if python else packages.read())
        facts.update(versions.facts(installed[0]))
        return versions.findings(config, installed[0], elsewhere)

    def check_gpus() -> list[Finding]:
        found = reading.read()
        facts.update(judging.facts(found))
        if not rank_runs_here and not found.gpus:
            section = Section("gpus")
            section.skip("count", "no rank runs here, and there is no GPU; --nodes N checks the nodes")
            return section.findings
        sharing = max(config.parallel.tensor_model_parallel_size, config.rollout.tensor_parallel_size)
        rank = needed.rank_gpu if needed else None
        section = judging.judge(found, gpus_of_node(config, node) if given else None, rank, sharing)
        if found.gpus and installed:
            section.findings += versions.driver(installed[0], found.gpus[0].driver, found.cuda)
        return section.findings

    def check_host() -> list[Finding]:
        shm = host.space_of("/dev/shm")
        facts.update(
            {
                "kernel": platform.release(),
                "machine": platform.machine(),
                "cores": os.cpu_count() or 0,
                "memory in GiB": round(host_memory.total() / GIB, 1),
                "memory left in GiB": round(host_memory.left().size / GIB, 1),
                "/dev/shm in GiB": round(shm.size / GIB, 1) if shm else 0.0,
                "open files": float(host.read_limits()["NOFILE"][0]),
            }
        )
        return host.host(config, needed.host if needed else None, sizes.shm_needed(config)).findings

    def check_sandbox() -> list[Finding]:
        section, facts["sandbox"] = host.sandbox(config.sandbox, _runs_programs(config))
        return section.findings

    def check_files() -> list[Finding]:
        folder = files.run_folder(config)
        mount = mounts.holding(folder)
        facts["mount of run.dir"] = f"{mount.kind} at {mount.point}" if mount else "unknown"
        return files.findings(config, config.cluster.nodes, needed.checkpoint if needed else None, met=met)

    findings = within("versions", check_versions)
    findings += within("gpus", check_gpus) if cuda else []
    findings += within("host", check_host)
    findings += within("host", check_sandbox, 120.0)
    findings += within("network", lambda: host.network(config.cluster.nodes).findings)
    findings += within("files", check_files)
    return Machine(findings, facts)


def _runs_programs(config: Config) -> bool:
    """Tell whether a reward function or a tool of a config asks for the sandbox."""
    try:
        return registry.asks_for_sandbox(config.reward) or tools.any_asks_for_sandbox(config.environment)
    except ValueError:  # one that is not there, of which another check speaks
        return False


def obstacles(config: Config) -> Iterator[Problem]:
    """Yield what ends a run whose ranks start on this machine, as far as a few reads show it (a tenth of a second).

    That is a Python or a package that a run cannot do without, memory, /dev/shm, limits, and space on the disk. Other
    versions than those that are declared may work: of them, and of what is only scarce, `gspo-hpc doctor` speaks.
    """
    needed = sizes.of(hub.with_cached_folder(config))
    installed = packages.read()
    declared = {packages.requirement(line).name for line in installed.declared}
    absent = {"python", *declared} - installed.versions.keys()
    found = [one for one in versions.findings(config, installed) if one.check in absent]
    section = host.host(config, needed.host if needed else None, sizes.shm_needed(config))
    # What a killed start of the run has left goes before its ranks start, and its memory with it.
    found += [one for one in section.findings if one.check != "memory" or not _left_behind(config)]
    found += files.space(config, needed.checkpoint if needed else None).findings
    for one in found:
        if one.state == "fail":
            yield Problem(one.check, one.finding, one.fix)


def no_space(config: Config) -> Iterator[Problem]:
    """Yield that no checkpoint of a run finds room in its directory, which other machines see too."""
    needed = sizes.of(hub.with_cached_folder(config))
    for one in files.space(config, needed.checkpoint if needed else None).findings:
        if one.state == "fail":
            yield Problem(one.check, one.finding, one.fix)


def _left_behind(config: Config) -> bool:
    """Return whether processes of an earlier start of the run are alive."""
    run = RunDir(Path(config.run_dir))
    try:
        return bool(processes.marked(run.read_info()["run_id"]))
    except (OSError, ValueError, KeyError):
        return False


def inputs_here(config: Config) -> list[Finding]:
    """Check whether this node has the model and the data, as the login node does."""
    section = Section("files")
    for key, path in (
        ("model.path", config.model.path),
        *(
            (part.key, str(file))
            for part in parts.every(config.data)
            for file in (counting.files(part.path) or [Path(part.path)])
        ),
    ):
        if path is None:
            continue
        try:
            os.stat(path)
            if not os.access(path, os.R_OK):
                raise PermissionError(13, "you have no permission to read it", path)
            section.ok(key, f"{path} is readable")
        except OSError as error:
            fix = "put it on a file system that all nodes mount; relative paths start where you submit"
            section.fail(key, f"{os.path.abspath(path)}: {error.strerror}", fix)
    return section.findings


def main(arguments: list[str] | None = None) -> int:
    """Check this node, and write FOLDER/node-RANK.json."""
    (name,) = sys.argv[1:] if arguments is None else arguments
    folder = Path(name)
    rank, size = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    node = environment.node_name()
    config = loader.load(folder / "config.yaml")
    findings: list[Finding] = []
    first = meeting.Host(folder, node, size) if rank == 0 else None
    if first is None:
        findings += within("files", lambda: meeting.visit(folder, rank))
    machine = look(config, met=size > 1, node=rank if size == config.cluster.nodes else 0)
    findings += [*machine.findings, *within("files", lambda: inputs_here(config))]
    if rank == 0:  # the rank that logs
        findings += within("tracking", lambda: tracking.findings(config))
    answer: dict[str, Any] = {"node": node, "facts": machine.facts}
    answer["findings"] = [finding.to_json() for finding in findings]
    write_json(folder / f"node-{rank:05d}.json", answer)
    if first is not None:
        first.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
