"""One node's part of ``gspo-hpc doctor --nodes``: ``python -m gspo_hpc.doctor_node FOLDER``, started by srun.

Floor 6. Looks at the node, meets the others in the shared folder, and writes what it found there.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc import (
    config_file,
    doctor_files,
    doctor_gpus,
    doctor_host,
    doctor_meeting,
    doctor_packages,
    doctor_sizes,
    doctor_tracking,
    doctor_versions,
)
from gspo_hpc.config import Config
from gspo_hpc.doctor_finding import Finding, Section, within
from gspo_hpc.durable import write_json

Facts = dict[str, str | float]


@dataclass(frozen=True)
class Machine:
    """What one machine is, and what is wrong with it."""

    findings: list[Finding]
    facts: Facts  # what should be the same on all nodes: texts, or numbers that may differ a little


def look(config: Config, *, elsewhere: str = "", rank_runs_here: bool = True, met: bool = False) -> Machine:
    """Versions, GPUs, memory and limits, network, files: all that is of this machine. `met`: nodes meet as well."""
    sizes = doctor_sizes.of(config)
    facts: Facts = {}
    cuda = config.cluster.platform == "cuda"
    installed: list[doctor_packages.Installed] = []

    def versions() -> list[Finding]:
        python = config.slurm.python
        installed.append(doctor_packages.read_with(python) if python else doctor_packages.read())
        facts.update(doctor_versions.facts(installed[0]))
        return doctor_versions.findings(config, installed[0], elsewhere)

    def gpus() -> list[Finding]:
        found = doctor_gpus.read()
        facts.update(doctor_gpus.facts(found))
        if not rank_runs_here and not found.gpus:
            section = Section("gpus")
            section.skip("count", "none here, where no rank runs: --nodes N looks where they do")
            return section.findings
        section = doctor_gpus.judge(found, config.cluster.gpus_per_node, sizes.rank_gpu if sizes else None)
        if found.gpus and installed:
            section.findings += doctor_versions.driver(installed[0], found.gpus[0].driver, found.cuda)
        return section.findings

    def host() -> list[Finding]:
        available, _ = doctor_host.available_memory()
        shm = doctor_host.space_of("/dev/shm")
        facts.update(
            {
                "kernel": platform.release(),
                "machine": platform.machine(),
                "cores": os.cpu_count() or 0,
                "memory in GiB": round(doctor_host.total_memory() / 2**30, 1),
                "memory left in GiB": round(available / 2**30, 1),
                "/dev/shm in GiB": round(shm.size / 2**30, 1) if shm else 0.0,
                "open files": float(doctor_host.read_limits()["NOFILE"][0]),
            }
        )
        needed = doctor_sizes.shm_needed(config)
        return doctor_host.host(config, sizes.host if sizes else None, needed).findings

    def files() -> list[Finding]:
        folder = doctor_files.run_folder(config)
        mount = doctor_files.mount_of(folder, Path("/proc/self/mountinfo").read_text())
        facts["mount of run.dir"] = f"{mount.kind} at {mount.point}" if mount else "unknown"
        return doctor_files.findings(config, config.cluster.nodes, sizes.checkpoint if sizes else None, met=met)

    findings = within("versions", versions)
    findings += within("gpus", gpus) if cuda else []
    findings += within("host", host)
    findings += within("network", lambda: doctor_host.network(config.cluster.nodes).findings)
    findings += within("files", files)
    return Machine(findings, facts)


def inputs_here(config: Config) -> list[Finding]:
    """Whether what the login node sees is on this node, too."""
    section = Section("files")
    for key, path in (
        ("model.path", config.model.path),
        ("data.train", config.data.train),
        ("data.eval", config.data.eval),
    ):
        if path is None:
            continue
        try:
            os.stat(path)
            if not os.access(path, os.R_OK):
                raise PermissionError(13, "no permission to read it", path)
            section.ok(key, str(path))
        except OSError as error:
            fix = "put it where all nodes see it, or mount that there; relative paths begin where you submit"
            section.fail(key, f"{os.path.abspath(path)}: {error.strerror}", fix)
    return section.findings


def main(arguments: list[str] | None = None) -> int:
    """Write FOLDER/node-RANK.json."""
    (name,) = sys.argv[1:] if arguments is None else arguments
    folder = Path(name)
    rank, size = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    config = config_file.load(folder / "config.yaml")
    findings: list[Finding] = []
    host = doctor_meeting.Host(folder, node, size) if rank == 0 else None
    if host is None:
        findings += within("files", lambda: doctor_meeting.visit(folder, rank))
    machine = look(config, met=size > 1)
    findings += [*machine.findings, *within("files", lambda: inputs_here(config))]
    if rank == 0:  # who logs
        findings += within("tracking", lambda: doctor_tracking.findings(config))
    answer: dict[str, Any] = {"node": node, "facts": machine.facts}
    answer["findings"] = [finding.to_json() for finding in findings]
    write_json(folder / f"node-{rank:05d}.json", answer)
    if host is not None:
        host.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
