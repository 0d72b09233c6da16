"""Write prompts most of which the tiny model solves from the start: `make_easy_prompts.py TRAIN --out FILE`.

TRAIN are sums of two numbers (tools/make_tiny_model.py). All without a carry are kept, and one with a carry for nine of
those, so that nine groups of ten have nothing to teach.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path


def carries(prompt: str) -> bool:
    """Return whether a digit is carried in the sum that a prompt asks for."""
    one, other = map(int, re.findall(r"\d+", prompt))
    return one % 10 + other % 10 > 9 or one // 10 + other // 10 > 9


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.train.read_text().splitlines()]
    most = sum(not carries(row["prompt"]) for row in rows) // 9
    kept, hard = [], 0
    for row in rows:
        hard += (carried := carries(row["prompt"]))
        if not carried or hard <= most:
            kept.append(row)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in kept))
    print(f"{len(kept) - most} prompts without a carry and {most} with one: {arguments.out}")


if __name__ == "__main__":
    main()
