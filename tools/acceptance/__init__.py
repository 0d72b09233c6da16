"""Acceptance on a GPU: everything that only a GPU can show, in independent parts that end as a page.

``tools/gpu_acceptance.sh`` is the command. On a machine without a GPU the same code runs in small sizes.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

# Other tools are scripts that find each other in their own folders. Behind everything else: their names are common.
sys.path.extend(str(REPO / folder) for folder in ("tools", "tools/bench"))
