"""Write the table of the planner's rules in docs/plan.md from the rules themselves: run this after adding a rule.

With --check it writes nothing, and exits with 1 if the table is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from gspo_hpc.planning.rules import registry  # noqa: E402

PAGE = PROJECT / "docs" / "plan.md"
BEGIN, END = "<!-- rules: written by tools/rules.py -->\n", "<!-- end of rules -->\n"


def table() -> str:
    """Return the rules as a Markdown table, a part for each topic."""
    lines, topic = ["| rule | what must hold |", "|---|---|"], None
    for rule in registry.rules().values():
        if rule.topic is not topic:
            topic = rule.topic
            lines.append(f"| **{topic.value}** | |")
        lines.append(f"| `{rule.id}` | {rule.meaning} |")
    return "\n".join([*lines, ""])


def page(text: str) -> str:
    """Return the page with the table of today."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    check, text = parser.parse_args().check, PAGE.read_text("utf-8")
    if page(text) == text:
        return 0
    if check:
        print("the table of rules in docs/plan.md is out of date; run: python tools/rules.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(text), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
