"""Write the table of the planner's rules in docs/plan.md from the rules themselves: run this after adding a rule.

With --check it writes nothing, and exits with 1 if the table is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

import generated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_hpc.planning.rules import registry  # noqa: E402


def table() -> str:
    """Return the rules as a Markdown table, a part for each topic."""
    lines, topic = ["| rule | what must hold |", "|---|---|"], None
    for rule in registry.rules().values():
        if rule.topic is not topic:
            topic = rule.topic
            lines.append(f"| **{topic.value}** | |")
        lines.append(f"| `{rule.id}` | {rule.meaning} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(generated.main("rules", __doc__, {"plan.md": generated.section("rules", table())}))
