"""GPUs and what ties them together, from the vendors' data sheets: what estimates count with.

Dense 16-bit operations; bytes are powers of ten, as on data sheets, but for memory. What large
products sustain is from public benchmarks of matrix products, rounded: a figure of experience.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache

from gspo_hpc.config.schema import Cluster
from gspo_hpc.system.text import GIB, near_miss


@dataclass(frozen=True)
class Device:
    """One GPU and its links."""

    name: str
    memory: int  # bytes that a process can have of it, about
    flops: float  # dense 16-bit matrix operations a second
    sustained_flops: float  # what large products reach of that, about: power and clocks are limits, too
    memory_bytes_per_s: float
    node_bytes_per_s: float  # to GPUs of its node, one way
    network_bytes_per_s: float  # to other nodes, one way: its share of the usual machine's adapters
    host_bytes_per_s: float  # to host memory, one way
    launching: float = 1.0  # seconds that its CPU takes to launch kernels, over those of usual machines


# By names as people say them. Networks: HDR, 200 Gb/s a GPU, for A100; NDR, 400 Gb/s, for Hopper, B200 and GB200; XDR,
# 800 Gb/s, for B300. Sustained operations of GB200 and B300 have B200's share of the peak. That the CPU of GH200 and
# GB200 launches kernels half as fast is calibrated on one of the runs of docs/estimates.md, on GB200.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("A100-40GB", int(39.5 * GIB), 312e12, 250e12, 1.555e12, 300e9, 25e9, 25e9),
        Device("A100-80GB", int(79.3 * GIB), 312e12, 260e12, 2.039e12, 300e9, 25e9, 25e9),
        Device("A800-80GB", int(79.3 * GIB), 312e12, 260e12, 2.039e12, 200e9, 25e9, 25e9),
        Device("H100-PCIe", int(79.2 * GIB), 756e12, 430e12, 2.0e12, 300e9, 25e9, 50e9),
        Device("H100-80GB", int(79.2 * GIB), 989e12, 660e12, 3.35e12, 450e9, 50e9, 50e9),
        Device("H800-80GB", int(79.2 * GIB), 989e12, 660e12, 3.35e12, 200e9, 50e9, 50e9),
        Device("H20-96GB", int(95.1 * GIB), 148e12, 135e12, 4.0e12, 450e9, 50e9, 50e9),
        Device("H200-141GB", int(139.8 * GIB), 989e12, 680e12, 4.8e12, 450e9, 50e9, 50e9),
        Device("GH200-96GB", int(94.5 * GIB), 989e12, 680e12, 4.0e12, 450e9, 25e9, 200e9, 2.0),
        Device("B200-180GB", int(178.3 * GIB), 2250e12, 1550e12, 7.7e12, 900e9, 50e9, 50e9),
        Device("GB200-186GB", int(184.3 * GIB), 2500e12, 1720e12, 8.0e12, 900e9, 50e9, 225e9, 2.0),
        Device("B300-288GB", int(267.9 * GIB), 2250e12, 1550e12, 8.0e12, 900e9, 100e9, 50e9),
        Device("L40S-48GB", int(44.5 * GIB), 362e12, 230e12, 0.864e12, 25e9, 12.5e9, 25e9),
    )
}
# Cards that people have and that nobody is advised to buy: estimates know them, and no fix proposes them. Operations
# are those with sums in float32; large products are taken to reach four fifths of them, for want of measurements.
OWNED: dict[str, Device] = {
    name: Device(name, int(memory * GIB), flops, 0.8 * flops, bandwidth, link, 12.5e9, link)
    for name, memory, flops, bandwidth, link in (
        ("A10-24GB", 22.5, 125e12, 0.6e12, 25e9),
        ("A30-24GB", 23.6, 165e12, 0.933e12, 25e9),
        ("A40-48GB", 44.5, 150e12, 0.696e12, 25e9),
        ("L4-24GB", 22.1, 121e12, 0.3e12, 25e9),
        ("L40-48GB", 44.5, 181e12, 0.864e12, 25e9),
        ("RTX3090-24GB", 23.6, 71e12, 0.936e12, 25e9),
        ("RTX4090-24GB", 23.6, 165e12, 1.008e12, 25e9),
        ("RTX5090-32GB", 31.4, 209e12, 1.792e12, 50e9),
        ("RTXA6000-48GB", 47.5, 155e12, 0.768e12, 25e9),
        ("RTX6000Ada-48GB", 47.5, 364e12, 0.96e12, 25e9),
        ("RTXPRO6000-96GB", 95.0, 500e12, 1.792e12, 50e9),
    )
}
_KNOWN = DEVICES | OWNED
_USABLE = 0.98  # of the memory that a card is sold with, where only that is known

_FORM = re.compile(r"-(sxm\d?|hbm\d?e?|ac)(?=-|$)")  # forms that differ in nothing that an estimate counts with
_PARTS = re.compile(r"(?<=rtx)-|(?<=pro)-(?=\d)|-(?=ada\b)")  # RTX 6000 Ada is RTX6000Ada here


@cache
def find(name: str, network_gb_per_s: float | None = None) -> Device:
    """Return the device of that name, with another network if that is given.

    Case does not matter, nor whether words are joined by hyphens, underscores or spaces; the form of the module may be
    given (SXM5, HBM3), and what follows a hyphen may be left out if no other name begins alike (H200, A100-40).
    ValueError names the nearest device.
    """
    wanted = _joined(name).removeprefix("nvidia-").removeprefix("geforce-")
    kin = [device for device in _KNOWN.values() if _family(device.name) == _family(wanted)]  # H20 is not H200
    found = [device for device in kin if device.name.lower().startswith(wanted)]
    if wanted in ("h100", "a100"):  # the usual ones
        found = [DEVICES[f"{wanted.upper()}-80GB"]]
    if len(found) != 1:
        families = {_family(known): known for known in _KNOWN}
        hint = near_miss(_family(wanted), families, shown=families.__getitem__, cutoff=0.8)
        instead = ". For another card, give cluster.gpu_memory_gb and leave out cluster.gpu: memory is estimated then"
        known = f"known: {', '.join(_KNOWN)}" + ("" if hint else instead)
        raise ValueError(f"cluster.gpu {name} is not known{hint}; {known}")
    if network_gb_per_s is None:
        return found[0]
    return replace(found[0], network_bytes_per_s=network_gb_per_s * 1e9)


def card(cluster: Cluster) -> Device | None:
    """Return the GPU of a config's cluster; None if neither its name nor its memory is given.

    Of a card without a name only the memory is known. ValueError names the nearest device, as :func:`find` does.
    """
    memory = None if cluster.gpu_memory_gb is None else int(_USABLE * cluster.gpu_memory_gb * GIB)
    if cluster.gpu is not None:
        found = find(cluster.gpu, cluster.network_gb_per_s)
        return found if memory is None else replace(found, memory=memory)
    if memory is None:
        return None
    return Device(f"GPU with {cluster.gpu_memory_gb:g} GB", memory, *[math.nan] * 6)


def is_like_none(name: str) -> bool:
    """Return whether a name is that of no known GPU, nor like one."""
    try:
        find(name)
    except ValueError as error:
        return "nearest" not in str(error)
    return False


def of(device_name: str) -> Device | None:
    """Return a GPU by the name that it reports; None if it is not known, the largest if the name fits several."""
    said = _joined(device_name)
    if "h100-pcie" in said:
        return DEVICES["H100-PCIe"]
    family = max((name for name in map(_family, _KNOWN) if name in said), key=len, default=None)  # H200 is not H20
    cards = [device for name, device in _KNOWN.items() if _family(name) == family and name != "H100-PCIe"]
    named = [device for device in cards if device.name.split("-")[1].lower() in said]
    return max(named or cards, key=lambda device: device.memory, default=None)


def _joined(name: str) -> str:
    """Return a name with hyphens between its words, without the form of the module."""
    return _PARTS.sub("", _FORM.sub("", re.sub(r"[ _]", "-", name.lower())))


def _family(name: str) -> str:
    return name.split("-")[0].lower()


def peak(device_name: str) -> float | None:
    """Return the dense 16-bit operations a second of a GPU by the name that it reports; None if it is not known."""
    found = of(device_name)
    return None if found is None else found.flops
