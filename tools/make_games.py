"""Rows for an environment that needs no question: `make_games.py --out DIR` writes DIR/train.jsonl and DIR/eval.jsonl.

Each row is a game of its own, {"prompt": "Game 7"}. What a game is about follows from the seed of its conversation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from make_arithmetic import write_jsonl

TRAIN, EVAL = 400, 256


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and eval.jsonl")
    out = parser.parse_args().out
    write_jsonl(out / "train.jsonl", [{"prompt": f"Game {number}"} for number in range(1, TRAIN + 1)])
    write_jsonl(out / "eval.jsonl", [{"prompt": f"Game {TRAIN + number}"} for number in range(1, EVAL + 1)])
    print(f"make_games: {out}: {TRAIN} games to train on, {EVAL} unseen ones")
    return 0


if __name__ == "__main__":
    sys.exit(main())
