"""Write the table of symptoms in docs/diagnose.md from their registry: run this after adding a symptom.

With --check it writes nothing, and exits with 1 if the table is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

import generated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_hpc.diagnose import registry  # noqa: E402

if __name__ == "__main__":
    sys.exit(generated.main("make_symptoms", __doc__, {"diagnose.md": generated.section("symptoms", registry.table())}))
