"""The pinned sets for GPUs are consistent and complete: `bash tools/lanes.sh resolve` runs this.

Twenty seconds for each set where uv has its metadata already, and the network. It would catch a pin that another
package's requirements refuse, a requirement of setup.cfg for which a set has no pin, and a pin that nothing needs.
With UPDATE=1 in the environment each set is resolved anew around its four versions, and written.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETS = sorted((ROOT / "tools" / "requirements" / "gpu").glob("*.txt"))
CHOSEN = ("vllm", "torch", "megatron-core", "transformer-engine")
MEGATRON = "0.16.1"  # the oldest that is supported; the sets have the newest
# Transformer Engine's part for torch is distributed as source; uv reads its metadata without building it.
COMPILE = ("pip", "compile", "-q", "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_31")
pytestmark = pytest.mark.skipif("GSPO_HPC_LANE_UV" not in os.environ, reason="bash tools/lanes.sh resolve")


def pins(text: str) -> dict[str, str]:
    return dict(line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))


def resolve(tmp_path: Path, constraints: dict[str, str]) -> dict[str, str]:
    """What uv makes of the extra `gpu` of setup.cfg with these versions. Fails with its reason if nothing fits."""
    for name in (
        "setup.cfg",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "gspo_hpc/__init__.py",
    ):  # uv builds beside them
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    given = tmp_path / "constraints.txt"
    given.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
    command = [os.environ["GSPO_HPC_LANE_UV"], *COMPILE, "--extra", "gpu", "setup.cfg", "-c", str(given)]
    done = subprocess.run([*command, "--no-header", "--no-annotate"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return pins(done.stdout)


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_a_set_is_what_its_versions_resolve_to(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    told = pins(text)
    if os.environ.get("UPDATE"):
        told = resolve(tmp_path, {name: told[name] for name in CHOSEN})
        comments = [line for line in text.splitlines() if line.startswith("#")]
        path.write_text("\n".join([*comments, *(f"{name}=={version}" for name, version in told.items())]) + "\n")
    assert resolve(tmp_path, told) == told
    assert re.fullmatch(r"vllm-[\d.]+", path.stem) and path.stem == f"vllm-{told['vllm']}"


@pytest.mark.parametrize("path", [path for path in SETS if "0.26" not in path.stem], ids=lambda path: path.stem)
def test_the_oldest_megatron_fits_too(path: Path, tmp_path: Path) -> None:
    chosen = {name: version for name, version in pins(path.read_text()).items() if name in CHOSEN}
    assert resolve(tmp_path, chosen | {"megatron-core": MEGATRON})["vllm"] == chosen["vllm"]
