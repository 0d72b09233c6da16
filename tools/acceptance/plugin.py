"""Let vLLM find the package's plugin also where the package is a checkout that nothing has installed.

vLLM and the engine look for the entry point in the metadata of installed packages, and a machine without internet may
lack what an editable installation needs. The metadata alone are enough: a folder on PYTHONPATH.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import sys
from pathlib import Path

from . import REPO

_GROUP = "vllm.general_plugins"


def make_discoverable(work: Path) -> None:
    """Put the checkout on the PYTHONPATH of all parts, and its entry points too if nothing else names them."""
    paths = [str(REPO)]
    if not any(entry.name == "gspo_hpc" for entry in importlib.metadata.entry_points(group=_GROUP)):
        folder = work / "plugin"
        _write_metadata(folder / "gspo_hpc-0.dist-info")
        paths.append(str(folder))
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *(path for path in before if path not in paths)])
    sys.path.extend(path for path in paths if path not in sys.path)


def _write_metadata(folder: Path) -> None:
    settings = configparser.ConfigParser()
    settings.read(REPO / "setup.cfg", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gspo-hpc\nVersion: 0\n")
    groups = settings["options.entry_points"].items()
    text = "".join(f"[{group}]\n{entries.strip()}\n" for group, entries in groups)
    (folder / "entry_points.txt").write_text(text)
