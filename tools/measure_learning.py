"""Measure what a configuration learns, over several seeds: `measure_learning.py configs/tiny_cpu.yaml --seeds 1 2 3`.

Trains once for each seed (an existing run is resumed, or only read if it is done) and prints a Markdown section with
the accuracy by greedy decoding on unseen prompts before and after, the mean reward of each fifth of the steps, how much
of the later updates of rollouts was clipped, and the time that training took. With `--cost` it prints what steps cost,
too: the mean of the seconds of a step, since only some of them generate, medians of those of an update and of a weight
sync, and the most memory of a rank in an update.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

COLUMNS = (
    *("seed", "before", "after", "gain", "between", "reward by fifths", "clipped", "no gradient", "steps"),
    *("minutes of training", "largest probe gap"),
)
COST = ("s a step", "s an update", "s a sync", "GiB of a rank")


def train(config: Path, seed: int, run_dir: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The records of a finished run."""
    command = [sys.executable, "-P", "-m", "gspo_hpc", "train", str(config), f"run.seed={seed}", f"run.dir={run_dir}"]
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([*command, *overrides], stdout=sys.stderr, env=os.environ | {"PYTHONPATH": path})
    if done.returncode != 0:
        sys.exit(f"seed {seed}: exit code {done.returncode}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def row(seed: int, records: list[dict[str, Any]]) -> str:
    """One line of the table. Training time is the wall time of all steps, without start-up and evaluation."""
    scores = [
        (record["step"], record["eval/accuracy"]) for record in records if record.get("eval/accuracy") is not None
    ]
    steps = [record for record in records if record["step"] > 0]
    minutes = sum(record["seconds"] + record.get("seconds/save", 0.0) for record in steps) / 60
    before, after = scores[0][1], scores[-1][1]
    between = ", ".join(f"{accuracy:.3f} at {step}" for step, accuracy in scores[1:-1])
    fifths = [steps[len(steps) * i // 5 : len(steps) * (i + 1) // 5] for i in range(5)]
    rewards = " ".join(f"{statistics.fmean(record['reward'] for record in part):.2f}" for part in fifths if part)
    later = [record for record in steps if record["update"] and not record["empty"]]
    clipped = f"{statistics.fmean(record['clip_fraction'] for record in later):.2f}" if later else "-"
    lost = f"{sum(record['grad_norm'] == 0.0 for record in later)} of {len(later)}"
    gap = max(record["probe_logprob_gap_max"] for record in steps if "probe_logprob_gap_max" in record)
    cells = (
        seed,
        f"{before:.3f}",
        f"{after:.3f}",
        f"{after - before:+.3f}",
        between,
        rewards,
        clipped,
        lost,
        steps[-1]["step"],
        f"{minutes:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} | {gap:.1e} |"


def cost(records: list[dict[str, Any]]) -> str:
    """The cells of a run's line that say what its steps cost. A step with a sync begins with a new rollout."""
    steps = [record for record in records if record["step"] > 0]
    syncs = [record["seconds/sync"] for record in steps if record["seconds/sync"] > 0]
    cells = (
        f"{statistics.fmean(record['seconds'] for record in steps):.1f}",
        f"{statistics.median(record['seconds/update'] for record in steps):.1f}",
        f"{statistics.median(syncs):.1f}" if syncs else "-",
        f"{max(record['runtime_memory_gib'] for record in steps):.1f}",
    )
    return f" {' | '.join(cells)} |"


def main() -> None:
    """Print the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the run directories")
    parser.add_argument("--cost", action="store_true", help="print what steps cost, too")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    name = arguments.config.stem
    rows = []
    for seed in arguments.seeds:
        records = train(arguments.config, seed, arguments.runs / f"{name}-seed{seed}", arguments.overrides)
        rows.append(row(seed, records) + (cost(records) if arguments.cost else ""))
    seeds = " ".join(map(str, arguments.seeds))
    line = " ".join(["python tools/measure_learning.py", str(arguments.config), *arguments.overrides, "--seeds", seeds])
    line += " --cost" * arguments.cost
    print(f"## {arguments.config}\n\n`{line}`, {date.today()}, {len(os.sched_getaffinity(0))} CPU cores")
    print(f"({platform.machine()}), Python {platform.python_version()}.\n")
    columns = COLUMNS + (COST if arguments.cost else ())
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
