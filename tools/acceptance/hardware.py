"""The GPUs of this machine, as torch sees them: asked in a process of its own, which leaves no context on them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

_CODE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = torch.cuda.get_device_properties(0) if count else None
print(json.dumps([count, found and found.name, found and found.total_memory, torch.version.cuda]))
"""


@dataclass(frozen=True)
class Gpus:
    """The GPUs as torch describes them."""

    count: int
    description: str = "a CPU: figures of speed say nothing about GPUs"


def find_gpus() -> Gpus:
    """Return what there is. Raises RuntimeError where torch cannot be asked."""
    done = subprocess.run([sys.executable, "-P", "-c", _CODE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"torch failed to list the GPUs: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    count, name, memory, cuda = json.loads(done.stdout.splitlines()[-1])
    if not count:
        return Gpus(0)
    return Gpus(count, f"{count} x {name}, {memory / 2**30:.1f} GiB, CUDA {cuda}")
