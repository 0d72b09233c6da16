"""Two-number arithmetic as JSONL, as training prompts and unseen prompts: `make_arithmetic.py --out DIR --kind sum20`.

Writes DIR/train.jsonl and DIR/eval.jsonl, one {"prompt": ..., "answer": ...} a line. Every pair of numbers of the kind
occurs; a pair and its mirror image (3 + 5, 5 + 3) are always on the same side, so that no evaluation prompt was seen in
training in either order. The same kind and seed give the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kind:
    """A set of questions: all pairs of numbers from `low` to `high`, both included, under one operator."""

    operator: str  # "+" or "-"; differences are asked so that the answer is not negative
    low: int
    high: int
    template: str = "What is {a} {operator} {b}?"
    eval_rows: int = 100


NUMBER_ONLY = "What is {a} {operator} {b}? Answer with the number only."
KINDS = {
    "sum12": Kind("+", 1, 12, NUMBER_ONLY, eval_rows=40),
    "sum20": Kind("+", 1, 20, NUMBER_ONLY),
    "sum50": Kind("+", 1, 50, NUMBER_ONLY),
    "sum99": Kind("+", 10, 99, eval_rows=256),
    "difference20": Kind("-", 1, 20, NUMBER_ONLY, eval_rows=40),
}


def rows(kind: Kind, seed: int) -> tuple[list[dict[str, str | int]], list[dict[str, str | int]]]:
    """All rows of a kind, shuffled: (train, eval)."""
    pairs = [(a, b) for a in range(kind.low, kind.high + 1) for b in range(kind.low, a + 1)]  # a >= b: each pair once
    rng = random.Random(f"{kind.operator} {kind.low} {kind.high} {seed}")
    rng.shuffle(pairs)
    train: list[tuple[int, int]] = []
    unseen: list[tuple[int, int]] = []
    for a, b in pairs:
        side = unseen if len(unseen) < kind.eval_rows else train
        side.append((a, b))
        if kind.operator == "+" and a != b:
            side.append((b, a))
    rng.shuffle(train)
    rng.shuffle(unseen)
    # The last mirror image may be one too many for a round number of unseen rows.
    return [row(kind, *pair) for pair in train], [row(kind, *pair) for pair in unseen[: kind.eval_rows]]


def row(kind: Kind, a: int, b: int) -> dict[str, str | int]:
    """One question and its answer."""
    prompt = kind.template.format(a=a, b=b, operator=kind.operator)
    return {"prompt": prompt, "answer": a + b if kind.operator == "+" else a - b}


def write_jsonl(path: Path, lines: list[dict[str, str | int]]) -> None:
    """Write `lines` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    temporary.replace(path)


def make(out: Path, kind: str, seed: int) -> None:
    """Write both files of a kind into `out`."""
    train, unseen = rows(KINDS[kind], seed)
    write_jsonl(out / "train.jsonl", train)
    write_jsonl(out / "eval.jsonl", unseen)
    print(f"make_arithmetic: {out}: {len(train)} rows to train on, {len(unseen)} unseen ones ({kind}, seed {seed})")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and eval.jsonl")
    parser.add_argument("--kind", choices=sorted(KINDS), default="sum20", help="which questions (default: sum20)")
    parser.add_argument("--seed", type=int, default=0, help="which prompts are the unseen ones, and the order")
    args = parser.parse_args()
    make(args.out, args.kind, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
