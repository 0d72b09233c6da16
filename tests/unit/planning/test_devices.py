"""Devices by the names that people and drivers give them."""

from __future__ import annotations

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.planning import layouts
from gspo_hpc.planning.estimates import devices
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("Some other GPU", None),
    ],
)
def test_the_driver_s_names(name: str, value: float | None) -> None:
    assert devices.peak(name) == value


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA H20", "H20-96GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GB200", "GB200-186GB"),
        ("NVIDIA B300 SXM6 AC", "B300-288GB"),
        ("NVIDIA GB300", "GB300-279GB"),
        ("NVIDIA H100", "H100-80GB"),
        ("NVIDIA A100", "A100-80GB"),
    ],
)
def test_the_card_behind_a_driver_s_name(name: str, known: str) -> None:
    found = devices.of(name)
    assert found is not None and found.name == known
    assert devices.of("Some other GPU") is None


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("H100", "H100-80GB"),
        ("h200", "H200-141GB"),
        ("NVIDIA H20", "H20-96GB"),
        ("A100", "A100-80GB"),
        ("A100-40", "A100-40GB"),
        ("h100-pcie", "H100-PCIe"),
        ("b200", "B200-180GB"),
        ("GB200", "GB200-186GB"),
        ("b300", "B300-288GB"),
        ("NVIDIA_B300_SXM6_AC", "B300-288GB"),
        ("H100_80GB", "H100-80GB"),
        ("NVIDIA H100 SXM5", "H100-80GB"),
        ("h100-80gb-hbm3", "H100-80GB"),
        ("A100_SXM4_40GB", "A100-40GB"),
        ("A100-PCIe", "A100-PCIe-80GB"),
        ("h100-pcie-80gb", "H100-PCIe"),
        ("h100-sxm-80gb", "H100-80GB"),
        ("DGX H100", "H100-80GB"),
        ("NVIDIA GB300", "GB300-279GB"),
        ("gb300_288gb", "GB300-279GB"),
        ("GB300 NVL72", "GB300-279GB"),
        ("B200-192GB", "B200-180GB"),
        ("gh200", "GH200-96GB"),
        ("A100 40G", "A100-40GB"),
    ],
)
def test_names_that_people_use(said: str, meant: str) -> None:
    assert devices.find(said).name == meant


def test_a_name_that_is_not_known_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match="cluster.gpu H100-90GB is not known; nearest: H100-80GB"):
        devices.find("H100-90GB")
    with pytest.raises(ValueError, match="known: A100-40GB"):
        devices.find("")


@pytest.mark.parametrize("name", ["MI300X", "P100", "RX7900", "K80", "H", ""])
def test_a_name_like_no_other_gets_none(name: str) -> None:
    """A P100 is no H100."""
    with pytest.raises(ValueError, match=f"cluster.gpu {name} is not known; known: A100"):
        devices.find(name)


def test_a_gpu_that_is_like_no_other_is_left_out_and_not_replaced() -> None:
    """Whoever has an RX 7900 has no H20."""
    (fix,) = search.find(from_dict({"cluster": {"gpu": "RX7900"}}))
    assert str(fix) == "cluster.gpu=null"
    assert str(search.find(from_dict({"cluster": {"gpu": "H1000"}}))[0]) == "cluster.gpu=H100-80GB"
    with pytest.raises(ValueError, match="leave out cluster.gpu: memory is estimated then$"):
        devices.find("RX7900")


@pytest.mark.parametrize(("name", "near"), [("GB301", "GB300-279GB"), ("A1000", "A100-80GB"), ("H20-141", "H20-96GB")])
def test_the_nearest_is_of_the_nearest_kind(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"cluster.gpu {name} is not known; nearest: {near}; known"):
        devices.find(name)


def test_another_network() -> None:
    assert devices.find("H100", 12.5).network_bytes_per_s == 12.5e9
    assert devices.find("H100").network_bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("rtx_3090", "RTX3090-24GB"),
        ("GeForce RTX 5090", "RTX5090-32GB"),
        ("NVIDIA RTX A6000", "RTXA6000-48GB"),
        ("NVIDIA RTX 6000 Ada", "RTX6000Ada-48GB"),
        ("RTX PRO 6000", "RTXPRO6000-96GB"),
        ("A10", "A10-24GB"),  # not A100
        ("NVIDIA A40", "A40-48GB"),  # not A100-40GB
        ("L4", "L4-24GB"),
        ("L40", "L40-48GB"),
        ("L40S", "L40S-48GB"),
        ("NVIDIA A10G", "A10G-24GB"),  # not A10
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("H100_NVL", "H100-NVL-94GB"),
        ("H100-94GB", "H100-NVL-94GB"),
        ("NVIDIA H200 NVL", "H200-NVL-141GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX3090Ti-24GB"),
        ("RTX 5070 Ti", "RTX5070Ti-16GB"),
        ("NVIDIA RTX 5000 Ada Generation", "RTX5000Ada-32GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTXPRO6000-96GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000-96GB"),
        ("NVIDIA GB10", "GB10-128GB"),
        ("L20", "L20-48GB"),
        ("V100", "V100-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"),
        ("Tesla V100S-PCIE-32GB", "V100S-32GB"),
        ("V-100-16GB", "V100-16GB"),
        ("Tesla T4", "T4-16GB"),
        ("T-4", "T4-16GB"),
    ],
)
def test_cards_of_workstations_and_older_ones(said: str, meant: str) -> None:
    """The driver's name and a config's name find the same card, and no fix proposes it."""
    assert devices.find(said).name == meant
    found = devices.of(said)
    assert found is not None and found.name == meant
    assert (meant in devices.DEVICES) == (meant == "L40S-48GB")


def test_the_memory_of_a_card_is_enough_to_estimate_memory() -> None:
    """Without a name there are bytes and no seconds; with one, the memory that is given counts."""
    model, data = {"path": "Qwen/Qwen3-0.6B"}, {"batch": {"micro_batch_tokens": 8192, "global_batch_size": 64}}
    sizes = data | {"model": model, "rollout": {"max_response_length": 1024}}
    unnamed = make_plan(from_dict({**sizes, "cluster": {"gpu_memory_gb": 80}}))
    named = make_plan(from_dict({**sizes, "cluster": {"gpu": "A10", "gpu_memory_gb": 80}}))
    small = make_plan(from_dict({**sizes, "cluster": {"gpu_memory_gb": 12}}))
    assert unnamed.memory is not None and named.memory is not None and small.memory is not None
    assert unnamed.memory.phases == named.memory.phases and unnamed.memory.card == int(0.98 * 80 * 2**30)
    assert not unnamed.broken and any(item.rule == "trainer_fits_gpu_memory" for item in small.broken)
    assert layouts.find(from_dict({**sizes, "cluster": {"gpu_memory_gb": 80}}))[0].rates_of == "A100-80GB"
    assert layouts.find(from_dict({**sizes, "cluster": {"gpu": "A10", "gpu_memory_gb": 80}}))[0].rates_of is None
    with pytest.raises(ValueError, match=r"cluster\.gpu says which GPUs there are"):
        layouts.find(from_dict(sizes))


def test_every_device_is_found_by_its_own_name_and_in_every_spelling() -> None:
    for name in devices.DEVICES | devices.OWNED:
        for said in (name, name.lower(), name.replace("-", "_"), f"NVIDIA {name.replace('-', ' ')}"):
            assert devices.find(said).name == name, said
            found = devices.of(said)
            assert found is not None and found.name == name, said


@pytest.mark.parametrize(
    ("said", "name"),
    [
        *[
            ("H100SXM", "H100-80GB"),
            ("H200NVL", "H200-NVL-141GB"),
            ("L40_S", "L40S-48GB"),
            ("l40-s", "L40S-48GB"),
            ("gb-200", "GB200-186GB"),
            ("B-300", "B300-288GB"),
            ("h_100", "H100-80GB"),
            ("NVIDIA H 200", "H200-141GB"),
        ],
        *[("A-100-40GB", "A100-40GB"), ("l 40s", "L40S-48GB"), ("h-200 nvl", "H200-NVL-141GB"), ("h200", "H200-141GB")],
    ],
)
def test_a_letter_may_stand_apart_from_its_number(said: str, name: str) -> None:
    assert devices.find(said).name == name


def test_plan_and_suggest_list_the_same_devices() -> None:
    model = {"model": {"path": "Qwen/Qwen3-0.6B"}}
    with pytest.raises(ValueError, match="give one of") as wanted:
        layouts.Search(from_dict(model))
    with pytest.raises(ValueError, match="known: ") as unknown:
        devices.find("RX7900")
    listed = str(wanted.value).partition("give one of ")[2]
    assert listed == str(unknown.value).partition("known: ")[2].partition(". For another")[0]
    assert set(listed.split(", ")) == set(devices.DEVICES | devices.OWNED)


def test_what_data_sheets_have_in_common() -> None:
    """Sustained operations are a part of the peak, and a name's size is that of the memory."""
    for device in (devices.DEVICES | devices.OWNED).values():
        assert 0.5 <= device.sustained_flops / device.flops <= 0.95, device
        size = int(device.name.rpartition("-")[2].removesuffix("GB")) if device.name.endswith("GB") else 80
        assert 0.9 * size < device.memory / 2**30 <= size, device


@pytest.mark.parametrize(
    ("gpus", "gpu", "with_grace"),
    [(8, "H100", False), (8, None, False), (4, "H100", True), (1, None, True), (8, "GB200", True), (72, "gb301", True)],
)
def test_boards_with_grace_are_offered_where_nodes_are_small_or_have_them(
    gpus: int, gpu: str | None, with_grace: bool
) -> None:
    """No node of eight is sold with GB200."""
    cluster = from_dict({"cluster": {"gpus_per_node": gpus, "gpu": gpu}}).cluster
    found = {device.name for device in devices.offered(cluster)}
    grace = {name for name in devices.DEVICES if name.startswith(("GB", "GH"))}
    assert len(grace) > 2 and found == {*devices.DEVICES} - (set() if with_grace else grace)
