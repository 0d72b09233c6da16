"""Measure what imports without garbage collection (system/malloc.py) save a rank and an engine.

    .venv/bin/python tools/bench/imports.py > table.md          # progress goes to stderr

Each pair starts two processes, one after the other, in alternating order: one that imports as the package does and one
with Python's collector at work. Processor seconds are those of the user and of the system, which other load on the
machine affects less than the time that passes. A full collection after the imports is measured, too.

"With torch's compiler" is a rank that imports Megatron past the package, which has Megatron's functions compiled at
their first call (gspo_hpc/policy/platform/lazy_compile.py) and not at their decoration; that imports W&B and
TensorBoard, too. "With Megatron's trackers" is a rank without gspo_hpc/policy/platform/left_out.py alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from step import cpu_model, environment, spread

PARTS = {
    "a rank": "gspo_hpc.training.jobs.train",
    "a rank with torch's compiler": "megatron.core, gspo_hpc.training.jobs.train",
    "a rank with Megatron's trackers": "wandb, torch.utils.tensorboard, gspo_hpc.training.jobs.train",
    "an engine": "vllm.entrypoints.llm, gspo_hpc.engine.plugin",
}
WAYS = ("collected", "uncollected")
_PROGRAM = """
import gc, json, sys, time
from contextlib import nullcontext
from gspo_hpc.system.malloc import uncollected
began = time.process_time()
with uncollected() if sys.argv[1] == "uncollected" else nullcontext():
    import {modules}
imported = time.process_time()
gc.collect()
print(json.dumps([imported - began, time.process_time() - imported]))
"""


def child(modules: str, way: str) -> list[float]:
    """Return the processor seconds of the imports and of one full collection after them."""
    command = [sys.executable, "-P", "-c", _PROGRAM.format(modules=modules), way]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure all pairs, and print Markdown."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes (default: %(default)s)")
    args = parser.parse_args()
    print(f"{cpu_model()}, {args.pairs} pairs of processes; processor seconds; medians, with least and most.\n")
    print(
        "| imports of | collected | uncollected | ratio, pair by pair | a full collection after | after, uncollected |"
    )
    print("|---|---|---|---|---|---|")
    for part, modules in PARTS.items():
        found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for pair in range(args.pairs):
            for way in WAYS if pair % 2 == 0 else reversed(WAYS):
                found[way].append(child(modules, way))
                print(f"imports.py: pair {pair + 1}, {part}, {way}: {found[way][-1]}", file=sys.stderr, flush=True)
        seconds = {way: [one[0] for one in found[way]] for way in WAYS}
        ratios = [new / old for old, new in zip(seconds["collected"], seconds["uncollected"], strict=True)]
        cells = [spread(seconds[way], 2) for way in WAYS] + [spread(ratios, 2)]
        cells += [f"{statistics.median(one[1] for one in found[way]):.3f}" for way in WAYS]
        print(f"| {part} | {' | '.join(cells)} |", flush=True)
    print(f"\nLoad average at the end: {os.getloadavg()[0]:.1f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
