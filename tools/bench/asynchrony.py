"""Compare ways to generate: in turns, side by side, and with rollouts that end early, on lengths with a long tail.

    python tools/bench/asynchrony.py [--rounds 2] [--rollouts 8] [--only NAME]

Each mode is a run of `gspo-hpc train` with one trainer and one engine on a CPU core each, whatever the mode: where they
take turns, one of the cores waits. The model is random, so that each token ends a completion with a small probability:
lengths are nearly exponential, cut at the longest. Rewards are random. Modes run in turns, in rounds. The first rollout
of a run is left out, in which engines and functions are used for the first time.

Printed are medians over the rounds. The ratio is that of seconds a step to those of the first mode in the same round.
Busy is the share of the time in which an engine made steps, and in which the trainer computed. The gap is the probe's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]
SERVER = ("cluster.gpus_per_node=2", "rollout.mode=server")
EARLY = ("rollout.oversampling_factor=1.5",)
MODES: dict[str, tuple[str, ...]] = {
    "colocate": (),
    "colocate, `unfinished: drop`": ("rollout.unfinished=drop", *EARLY),
    "colocate, `unfinished: continue`": ("rollout.unfinished=continue", *EARLY),
    "server, in turns": SERVER,
    "server, one rollout ahead": (*SERVER, "rollout.max_staleness=1"),
    "server, one rollout ahead, `unfinished: continue`": (
        *SERVER,
        "rollout.max_staleness=1",
        "rollout.unfinished=continue",
        *EARLY,
    ),
}
REWARD = """
import random


def noise(completion, *, prompt, fields, response_tokens):
    return random.Random(str(response_tokens)).random()
"""
TRAINER = ("seconds/update", "seconds/old_logprobs", "seconds/sync")


def command(folder: Path, run: Path, rollouts: int, settings: tuple[str, ...]) -> list[str]:
    """Return the command of a run."""
    return [
        *(sys.executable, "-P", "-m", "gspo_hpc", "train", str(REPO / "configs" / "tiny_cpu.yaml")),
        f"run.dir={run}",
        f"run.max_steps={2 * rollouts}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        "data.eval=null",
        "data.chat_template=false",
        "cluster.gpus_per_node=1",
        "rollout.engines_per_node=1",
        "rollout.max_prompt_length=64",
        "rollout.max_response_length=448",
        "rollout.kv_cache_gb=1",
        "batch.global_batch_size=64",
        "batch.steps_per_generation=2",
        "batch.micro_batch_tokens=4096",
        f"reward.functions=[{{function: {folder / 'reward.py'}:noise}}]",
        "optimizer.lr=1e-6",
        "checkpoint.interval=1000",
        "eval.interval=null",
        "eval.before=false",
        "eval.after=false",
        "tracking.wandb=disabled",
        *settings,
    ]


def pin(parent: psutil.Process, server: bool) -> None:
    """Give engines, and ranks that only generate, one core, and all else that the run has the other."""
    for process in parent.children(recursive=True):
        try:
            line, rank = process.cmdline(), process.environ().get("RANK")
            generates = "gspo_hpc.engine.host" in line or (server and rank == "1")
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {int(generates)})
        except (psutil.Error, OSError):
            continue


def measure(folder: Path, name: str, rollouts: int) -> dict[str, float]:
    """Return the measures of one run."""
    run = folder / f"run-{time.monotonic_ns()}"
    settings = MODES[name]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command(folder, run, rollouts, settings), env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            pin(psutil.Process(process.pid), "rollout.mode=server" in settings)
            time.sleep(0.5)
    if process.returncode != 0:
        raise SystemExit(f"{name}: {(folder / 'log').read_text()[-2000:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return summary([record for record in records if record["rollout"] > 0])


def summary(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the measures of the records of a run's steps."""
    wall = sum(record["seconds"] for record in records)
    engine = sum(record.get("seconds/engine_most", 0.0) for record in records)
    trainer = sum(record[key] for record in records for key in TRAINER)
    gaps = [record["probe_logprob_gap_mean"] for record in records if "probe_logprob_gap_mean" in record]
    return {
        "step": wall / len(records),
        "tokens": sum(record["completion_tokens"] for record in records) / wall,
        "engine": engine / wall,
        "trainer": trainer / wall,
        "length": statistics.mean(record["response_length"] for record in records),
        "gap": max(gaps),
        "older": statistics.mean(record.get("rollout/older_token_fraction", 0.0) for record in records),
    }


def prepare(folder: Path) -> None:
    """Write the model, the data and the reward function."""
    sizes = "--hidden 192 --layers 4 --heads 4 --kv-heads 2 --head-dim 48 --intermediate 576 --vocab 128 --std 0.05"
    script = REPO / "tools" / "make_random_model.py"
    subprocess.run([sys.executable, str(script), "--out", str(folder / "model"), *sizes.split()], check=True)
    rows = [{"prompt": f"{number} and {number * 7 % 89}"} for number in range(512)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--only", help="modes whose names have this in them")
    args = parser.parse_args()
    names = [name for name in MODES if args.only is None or args.only in name]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="gspo_hpc.asynchrony.") as place:
        prepare(Path(place))
        for number in range(args.rounds):
            for name in names:
                print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                found[name].append(measure(Path(place), name, args.rollouts))
    print("| mode | seconds a step | ratio | tokens/s | engine busy | trainer busy | length | older tokens | gap |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, rounds in found.items():
        middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        ratio = statistics.median(a["step"] / b["step"] for a, b in zip(rounds, found[names[0]], strict=True))
        print(
            f"| {name} | {middle['step']:.2f} | {ratio:.2f} | {middle['tokens']:,.0f} | {middle['engine']:.0%} | "
            f"{middle['trainer']:.0%} | {middle['length']:.0f} | {middle['older']:.0%} | {middle['gap']:.1e} |"
        )
    print(f"\nLoad average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
