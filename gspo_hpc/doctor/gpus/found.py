"""The answer of a driver about the GPUs of a machine, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """A MIG instance: the part of a GPU that a process can have."""

    uuid: str
    memory: int | None  # bytes


@dataclass(frozen=True)
class Gpu:
    """One GPU. None where it does not report a value."""

    index: int
    name: str
    uuid: str
    memory: int | None  # bytes
    used: int | None
    mig: bool
    ecc_errors: int | None  # uncorrected errors since the driver was loaded
    compute_mode: str
    persistence: bool | None
    driver: str
    slices: tuple[Slice, ...] | None = ()  # with MIG; None: not known


@dataclass(frozen=True)
class App:
    """A process on a GPU."""

    uuid: str
    pid: int
    name: str
    used: int | None  # bytes


@dataclass(frozen=True)
class Link:
    """A way from one GPU to another, by their indices."""

    first: int
    second: int
    nvlink: bool
    path: str  # where the PCIe ways of both meet


@dataclass(frozen=True)
class Gpus:
    """All GPUs of this machine, or the reason why they are not known."""

    gpus: tuple[Gpu, ...] = ()
    apps: tuple[App, ...] = ()
    cuda: str | None = None  # the newest CUDA that the driver supports
    error: str = ""  # empty: the driver answered
    installed: bool = True  # whether there is a driver
    links: tuple[Link, ...] | None = None  # between every two GPUs; None: not known
