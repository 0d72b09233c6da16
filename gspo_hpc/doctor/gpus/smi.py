"""The text that nvidia-smi prints: pure functions parse it."""

from __future__ import annotations

import csv
import re
import subprocess
from dataclasses import replace

from gspo_hpc.doctor.finding import shortened
from gspo_hpc.doctor.gpus.found import App, Gpu, Gpus, Slice
from gspo_hpc.system.text import GIB, first_line

QUERY = (
    *("index", "name", "uuid", "memory.total", "memory.used", "mig.mode.current"),
    *("ecc.errors.uncorrected.volatile.total", "compute_mode", "persistence_mode", "driver_version"),
)
APPS_QUERY = ("gpu_uuid", "pid", "process_name", "used_memory")
_FORMAT = "--format=csv,noheader,nounits"
_TIMEOUT = 30.0
_LISTED = re.compile(r"^GPU \d+: .*\(UUID: ([^)]+)\)", re.ASCII)
_SLICE = re.compile(r"^\s+MIG \S+?\.(\d+)gb\S*\s+Device\s+\d+: \(UUID: ([^)]+)\)", re.ASCII)
_OF_NOMINAL = 0.95  # what a slice has of the GiB in its name: 9,728 MiB where it says 10gb
_CUDA = re.compile(r"CUDA Version\s*:\s*(\d+\.\d+)")


def read() -> Gpus:
    """Return what nvidia-smi prints here."""
    try:
        gpus = parse_gpus(_smi(f"--query-gpu={','.join(QUERY)}", _FORMAT))
        if any(gpu.mig for gpu in gpus):
            slices = parse_slices(_smi("--list-gpus"))
            gpus = tuple(replace(gpu, slices=slices.get(gpu.uuid)) if gpu.mig else gpu for gpu in gpus)
        apps = parse_apps(_smi(f"--query-compute-apps={','.join(APPS_QUERY)}", _FORMAT))
        return Gpus(gpus, apps, parse_cuda(_smi()))
    except FileNotFoundError:
        return Gpus(error="nvidia-smi is not installed", installed=False)
    except (ValueError, OSError) as error:
        return Gpus(error=str(error))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse what nvidia-smi prints for --query-gpu=QUERY, as CSV without header and units.

    Raises ValueError for another format.
    """
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(QUERY) or not row[0].strip().isdecimal():
            raise ValueError(f"nvidia-smi printed {shortened(','.join(row), 100)!r}, not {len(QUERY)} values per GPU")
        index, name, uuid, total, used, mig, ecc, mode, persistence, version = (value.strip() for value in row)
        on = {"Enabled": True, "Disabled": False}.get(persistence)
        memory = (_mebibytes(total), _mebibytes(used))
        found.append(Gpu(int(index), name, uuid, *memory, mig == "Enabled", _number(ecc), mode, on, version))
    return tuple(found)


def parse_apps(text: str) -> tuple[App, ...]:
    """Parse what nvidia-smi prints for --query-compute-apps=APPS_QUERY. Raises ValueError for another format."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) < len(APPS_QUERY) or not row[1].strip().isdecimal():
            raise ValueError(
                f"nvidia-smi printed {shortened(','.join(row), 100)!r}, not {len(APPS_QUERY)} values per process"
            )
        uuid, pid, *name, used = (value.strip() for value in row)  # a path may have a comma
        found.append(App(uuid, int(pid), ",".join(name), _mebibytes(used)))
    return tuple(found)


def parse_slices(text: str) -> dict[str, tuple[Slice, ...]]:
    """Parse what nvidia-smi prints for --list-gpus: the MIG instances by the UUID of their GPU, about as large."""
    found: dict[str, tuple[Slice, ...]] = {}
    gpu = None
    for line in text.splitlines():
        if head := _LISTED.match(line):
            gpu = head[1]
            found[gpu] = ()
        elif gpu is not None and (own := _SLICE.match(line)):
            found[gpu] += (Slice(own[2], int(_OF_NOMINAL * int(own[1]) * GIB)),)
    return found


def parse_cuda(text: str) -> str | None:
    """Return the newest CUDA that the driver supports, from the head of nvidia-smi's page."""
    found = _CUDA.search(text)
    return found.group(1) if found else None


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"nvidia-smi did not answer within {_TIMEOUT:.0f} s") from None
    if done.returncode:
        raise ValueError(
            f"nvidia-smi: {shortened(first_line(done.stderr or done.stdout)) or f'exit code {done.returncode}'}"
        )
    return done.stdout


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * 2**20


def _number(text: str) -> int | None:
    """Parse a number; None for [N/A], [Not Supported], [Unknown Error] and the like."""
    digits = text.removesuffix("MiB").strip()
    return int(digits) if digits.isdecimal() else None
