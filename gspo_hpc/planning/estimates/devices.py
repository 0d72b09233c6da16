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
    products: float = 1.0  # what passes of dense layers reach of sustained_flops, over rates.EFFICIENCY
    reads: float = 1.0  # what engines reach of memory_bytes_per_s, over rates.BANDWIDTH


# By names as people say them. Networks: HDR, 200 Gb/s a GPU, for A100; NDR, 400 Gb/s, for Hopper, B200 and GB200; XDR,
# 800 Gb/s, for B300 and GB300. Sustained operations of GB200, B300 and GB300 have B200's share of the peak. That the
# CPU of GH200, GB200 and GB300 launches kernels half as fast is calibrated on one of the runs of docs/estimates.md, on
# GB200. What H20 reaches is calibrated on another: no other card has a run there whose phases and lengths are known.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("A100-40GB", int(39.5 * GIB), 312e12, 250e12, 1.555e12, 300e9, 25e9, 25e9),
        Device("A100-80GB", int(79.3 * GIB), 312e12, 260e12, 2.039e12, 300e9, 25e9, 25e9),
        Device("A800-80GB", int(79.3 * GIB), 312e12, 260e12, 2.039e12, 200e9, 25e9, 25e9),
        Device("H100-PCIe", int(79.2 * GIB), 756e12, 430e12, 2.0e12, 300e9, 25e9, 50e9),
        Device("H100-80GB", int(79.2 * GIB), 989e12, 660e12, 3.35e12, 450e9, 50e9, 50e9),
        Device("H800-80GB", int(79.2 * GIB), 989e12, 660e12, 3.35e12, 200e9, 50e9, 50e9),
        Device("H20-96GB", int(95.1 * GIB), 148e12, 135e12, 4.0e12, 450e9, 50e9, 50e9, products=1.2, reads=0.57),
        Device("H200-141GB", int(139.8 * GIB), 989e12, 680e12, 4.8e12, 450e9, 50e9, 50e9),
        Device("GH200-96GB", int(94.5 * GIB), 989e12, 680e12, 4.0e12, 450e9, 25e9, 200e9, 2.0),
        Device("B200-180GB", int(178.3 * GIB), 2250e12, 1550e12, 7.7e12, 900e9, 50e9, 50e9),
        Device("GB200-186GB", int(184.3 * GIB), 2500e12, 1720e12, 8.0e12, 900e9, 50e9, 225e9, 2.0),
        Device("B300-288GB", int(267.9 * GIB), 2250e12, 1550e12, 8.0e12, 900e9, 100e9, 50e9),
        Device("GB300-279GB", int(276.0 * GIB), 2500e12, 1720e12, 8.0e12, 900e9, 100e9, 225e9, 2.0),
        Device("L40S-48GB", int(44.5 * GIB), 362e12, 230e12, 0.864e12, 25e9, 12.5e9, 25e9),
    )
}
# Cards that people have and that nobody is advised to buy: estimates know them, and no fix proposes them. Operations
# are those with sums in float32. On V100 and the cards of the second list large products are taken to reach four fifths
# of them, for want of measurements; on cards with NVL in their names as much as on H100-PCIe; on T4 half, because 70 W
# do not hold the clock that its data sheet counts with. Bridges of NVLink are not counted on for A100-PCIe: most
# machines with it have none.
OWNED: dict[str, Device] = {
    device.name: device
    for device in (
        Device("A100-PCIe-40GB", int(39.4 * GIB), 312e12, 230e12, 1.555e12, 25e9, 25e9, 25e9),
        Device("A100-PCIe-80GB", int(79.3 * GIB), 312e12, 230e12, 1.935e12, 25e9, 25e9, 25e9),
        Device("H100-NVL-94GB", int(93.1 * GIB), 835e12, 480e12, 3.9e12, 300e9, 50e9, 50e9),
        Device("H200-NVL-141GB", int(139.8 * GIB), 835e12, 480e12, 4.8e12, 450e9, 50e9, 50e9),
        Device("GH200-144GB", int(142.0 * GIB), 989e12, 680e12, 4.9e12, 450e9, 25e9, 200e9, 2.0),
        Device("V100-16GB", int(15.7 * GIB), 125e12, 100e12, 0.9e12, 150e9, 12.5e9, 12.5e9),
        Device("V100-32GB", int(31.7 * GIB), 125e12, 100e12, 0.9e12, 150e9, 12.5e9, 12.5e9),
        Device("T4-16GB", int(14.6 * GIB), 65e12, 32.5e12, 0.32e12, 12.5e9, 12.5e9, 12.5e9),
        *(
            Device(name, int(memory * GIB), flops, 0.8 * flops, bandwidth, link, 12.5e9, link)
            for name, memory, flops, bandwidth, link in (
                ("A10-24GB", 22.5, 125e12, 0.6e12, 25e9),
                ("A10G-24GB", 22.3, 70e12, 0.6e12, 25e9),
                ("A30-24GB", 23.6, 165e12, 0.933e12, 25e9),
                ("A40-48GB", 44.5, 150e12, 0.696e12, 25e9),
                ("L4-24GB", 22.1, 121e12, 0.3e12, 25e9),
                ("L20-48GB", 44.5, 119e12, 0.864e12, 25e9),
                ("L40-48GB", 44.5, 181e12, 0.864e12, 25e9),
                ("GB10-128GB", 119.0, 125e12, 0.273e12, 25e9),
                ("RTX3090-24GB", 23.6, 71e12, 0.936e12, 25e9),
                ("RTX3090Ti-24GB", 23.6, 80e12, 1.008e12, 25e9),
                ("RTX4080-16GB", 15.6, 97e12, 0.717e12, 25e9),
                ("RTX4090-24GB", 23.6, 165e12, 1.008e12, 25e9),
                ("RTX5070Ti-16GB", 15.5, 88e12, 0.896e12, 50e9),
                ("RTX5080-16GB", 15.5, 113e12, 0.96e12, 50e9),
                ("RTX5090-32GB", 31.4, 209e12, 1.792e12, 50e9),
                ("RTXA5000-24GB", 23.6, 111e12, 0.768e12, 25e9),
                ("RTXA6000-48GB", 47.5, 155e12, 0.768e12, 25e9),
                ("RTX5000Ada-32GB", 31.5, 261e12, 0.576e12, 25e9),
                ("RTX6000Ada-48GB", 47.5, 364e12, 0.96e12, 25e9),
                ("RTXPRO5000-48GB", 47.3, 258e12, 1.344e12, 50e9),
                ("RTXPRO6000-96GB", 95.0, 500e12, 1.792e12, 50e9),
                ("V100-PCIe-16GB", 15.7, 112e12, 0.9e12, 12.5e9),
                ("V100-PCIe-32GB", 31.7, 112e12, 0.9e12, 12.5e9),
                ("V100S-32GB", 31.7, 130e12, 1.134e12, 12.5e9),
            )
        ),
    )
}
_KNOWN = DEVICES | OWNED
# What else names say of a device, such as the memory of the chip, of the machine or of another count, or its form.
_ALSO = {
    **{"H100-PCIe": "80gb", "B200-180GB": "192gb", "GB200-186GB": "192gb", "B300-288GB": "270gb"},
    **{"GB300-279GB": "288gb", "GH200-96GB": "480gb", "V100S-32GB": "pcie"},
}
# What is meant by a name that fits several.
_USUAL = {
    **{"h100": "H100-80GB", "a100": "A100-80GB", "a100-pcie": "A100-PCIe-80GB", "gh200": "GH200-96GB"},
    **{"v100": "V100-32GB", "v100-pcie": "V100-PCIe-32GB"},
}
# Compute capability of cards before Ampere (8.0), by the first word of their names.
_BEFORE_AMPERE = {"v100": (7, 0), "v100s": (7, 0), "t4": (7, 5)}
_ALIKE = 10  # memories that differ by less than about a twentieth of a doubling are alike
_USABLE = 0.98  # of the memory that a card is sold with, where only that is known

# Words that differ in nothing that an estimate counts with: who made it, its form, the machine that it is in.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|hgx|dgx|sxm\d?|hbm\d?e?|ac|gpu|generation|blackwell|(?:max-)?q|max|server|workstation"
    r"|edition|nvl\d+|grace|hopper|tensor|core|superchip"
)
_PARTS = re.compile(r"(?<=rtx)-|(?<=pro)-(?=\d)|-(?=ada\b)|(?<=\d)-(?=(?:ti|s)\b)")  # RTX 6000 Ada is RTX6000Ada here
_GRACE = re.compile(r"(?i)g[bh][-_ ]?\d")  # names of devices on the board of such a CPU
_MOST_BESIDE_GRACE = 4
_LETTERS = re.compile(r"(?<![a-z\d])(g[bh]|[abhltv])-(?=\d)")  # GB-200 is GB200


@cache
def find(name: str, network_gb_per_s: float | None = None) -> Device:
    """Return the device of that name, with another network if that is given.

    Case does not matter, nor the order of words, nor whether they are joined by hyphens, underscores or spaces; the
    form of the module may be given (SXM5, HBM3), and words but the first may be left out if no other name has the
    others (H200, A100-40). ValueError names the nearest device.
    """
    words = _words(name)
    kin = [device for device in _KNOWN.values() if _family(device.name) in words[:1]]  # H20 is not H200
    found = [device for device in kin if all(_says(device, word) for word in words)]
    least = min((_unsaid(device, words) for device in found), default=0)
    found = [device for device in found if _unsaid(device, words) == least]
    if len(found) > 1 and (usual := _USUAL.get("-".join(words))) is not None:
        found = [_KNOWN[usual]]
    if len(found) != 1:
        families = {family: _USUAL.get(family, known) for known in reversed(_KNOWN) for family in [_family(known)]}
        hint = near_miss(words[0] if words else "", families, shown=families.__getitem__, cutoff=0.8)
        instead = ". For another card, give cluster.gpu_memory_gb and leave out cluster.gpu: memory is estimated then"
        known = f"known: {listed()}" + ("" if hint else instead)
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


def rated(cluster: Cluster) -> tuple[Device, str | None] | None:
    """Return the GPU of a cluster with all its rates, and the name of the card whose rates are assumed for it.

    That is None for a card that is known by its name, and for others the first known one of about as much memory. None
    for both if neither a name nor memory is given.
    """
    own = card(cluster)
    if own is None or not math.isnan(own.flops):
        return None if own is None else (own, None)
    like = min(_KNOWN.values(), key=lambda one: round(_ALIKE * abs(math.log2(one.memory / own.memory))))
    network = cluster.network_gb_per_s
    found = replace(like, name=own.name, memory=own.memory)
    return (found if network is None else replace(found, network_bytes_per_s=network * 1e9)), like.name


def before_ampere(cluster: Cluster) -> tuple[str, tuple[int, int]] | None:
    """Return the name and the compute capability of a cluster's GPUs if they are known and older than Ampere.

    They have no bfloat16, and FlashAttention is not made for them.
    """
    if cluster.gpu is None or cluster.platform != "cuda":
        return None
    try:
        name = find(cluster.gpu).name
    except ValueError:  # a rule says so
        return None
    capability = _BEFORE_AMPERE.get(_family(name))
    return None if capability is None else (name, capability)


def plural(cluster: Cluster) -> str:
    """Return what the GPUs of a cluster are called in messages."""
    if cluster.gpu is None and cluster.gpu_memory_gb is not None:
        return f"GPUs of {cluster.gpu_memory_gb:g} GB"
    return cluster.gpu or "GPUs"


def offered(cluster: Cluster) -> list[Device]:
    """Return the devices that nodes like those of a cluster are sold with: boards with a Grace CPU have up to four."""
    beside_grace = cluster.gpus_per_node <= _MOST_BESIDE_GRACE or _GRACE.match(cluster.gpu or "")
    return [device for device in DEVICES.values() if beside_grace or not _GRACE.match(device.name)]


def sold_sizes() -> list[int]:
    """Return the GB of memory with which the cards are sold that fixes propose."""
    return sorted({int(found[1]) for name in DEVICES if (found := re.search(r"-(\d+)GB$", name))})


def is_like_none(name: str) -> bool:
    """Return whether a name is that of no known GPU, nor like one."""
    try:
        find(name)
    except ValueError as error:
        return "nearest" not in str(error)
    return False


def listed() -> str:
    """Return the names of all devices, for messages."""
    return ", ".join(_KNOWN)


def of(device_name: str) -> Device | None:
    """Return a GPU by the name that it reports; None if it is not known, the usual one if the name fits several."""
    words = _words(device_name)
    kin = [device for device in _KNOWN.values() if _family(device.name) in words]

    def fits(device: Device) -> tuple[int, int, bool, int]:
        said = sum(_says(device, word) for word in words)
        usual = device.name == _USUAL.get(_family(device.name))
        return said, -_unsaid(device, words), usual, device.memory

    return max(kin, key=fits, default=None)


def _says(device: Device, word: str) -> bool:
    """Return whether a word is part of a device's name; the unit of a size may be left out."""
    own = [*_words(device.name), _ALSO.get(device.name, "")]
    return any(word == one or (word.isdecimal() and one == f"{word}gb") for one in own)


def _unsaid(device: Device, words: list[str]) -> int:
    """Return how many words of a device's name, but for the first, are not among these."""
    return sum(word not in words for word in _words(device.name)[1:])


@cache
def _words(name: str) -> list[str]:
    """Return the words of a name that tell devices apart."""
    apart = re.sub(r"(?<=\d)(?=sxm|pcie|nvl|hbm)", "-", name.lower().strip())
    joined = _LETTERS.sub(r"\1", _PARTS.sub("", re.sub(r"[ _]+", "-", apart)))
    parts = [re.sub(r"(?<=\d)(g|gib)$", "gb", part) for part in joined.split("-")]
    return [part for part in parts if part and not _NOISE.fullmatch(part)]


def _family(name: str) -> str:
    return _words(name)[0]


def peak(device_name: str) -> float | None:
    """Return the dense 16-bit operations a second of a GPU by the name that it reports; None if it is not known."""
    found = of(device_name)
    return None if found is None else found.flops
