#!/usr/bin/env python
"""Print what tests cost, from the file that pytest's --junitxml writes: processor time by tier, and by file.

The time of ranks, engines and runs counts for the test in which they end; what several tests share counts for the last
of them, or the one that starts it. `bash tools/test.sh --junitxml=FILE` makes the file, also on a busy machine.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

_CASE = re.compile(r'<testcase classname="([^"]*)" name="[^"]*" time="([^"]*)"(?:>(.*?)</testcase>|\s*/>)', re.DOTALL)
_SPENT = re.compile(r'<property name="processor_seconds" value="([\d.]+)"')


def main() -> None:
    """Read the file, and print two of_files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what --junitxml wrote")
    parser.add_argument("--files", type=int, default=20, metavar="N", help="print the N files that cost most")
    args = parser.parse_args()
    tests, waited, spent = defaultdict[str, int](int), defaultdict[str, float](float), defaultdict[str, float](float)
    for where, seconds, inside in _CASE.findall(args.file.read_text()):
        parts = where.split(".")
        last = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
        found = _SPENT.search(inside)
        for name in ("/".join(parts[:2]), "/".join(parts[: last + 1]) + ".py"):
            tests[name] += 1
            waited[name] += float(seconds)
            spent[name] += float(found[1]) if found else 0.0
    ordered = sorted(spent.items(), key=lambda one: -one[1])
    for of_files in (False, True):
        chosen = [(name, seconds) for name, seconds in ordered if name.endswith(".py") == of_files]
        print(f"| {'file' if of_files else 'tier'} | tests | seconds | processor seconds |\n|---|---|---|---|")
        for name, seconds in chosen[: args.files if of_files else None]:
            print(f"| `{name}` | {tests[name]:,} | {waited[name]:,.0f} | {seconds:,.0f} |")
        print()


if __name__ == "__main__":
    main()
