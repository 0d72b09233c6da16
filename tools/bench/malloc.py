"""Measure what keeping freed memory (system/malloc.py) saves in a training step on the CPU.

    .venv/bin/python tools/bench/malloc.py > table.md          # progress goes to stderr

Each pair starts two processes, one after the other, in alternating order: one that keeps freed memory and one with
glibc's defaults. A process loads the model, makes a step that is not measured and then some that are: a log-prob pass
and an update of 32 completions in float32. Processor seconds are those of the user and of the system, which other load
on the machine affects less than the time that passes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from step import GROUP, REPO, cpu_model, environment, spread

COMPLETIONS = 32
WAYS = {"kept": "freed memory kept", "glibc": "glibc's defaults"}


def say(text: str) -> None:
    """A line of progress; stdout is for the table."""
    print(f"malloc.py: {text}", file=sys.stderr, flush=True)


def usage() -> dict[str, float]:
    """Processor seconds and page faults without a read from disk, until now, and MiB resident at most."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    seconds = {"processor": found.ru_utime + found.ru_stime, "system": found.ru_stime}
    return seconds | {"faults": found.ru_minflt, "resident": found.ru_maxrss / 1024}


def measure(args: argparse.Namespace) -> None:
    """Make steps in this process, and print a JSON line with what each took."""
    from trainer import make_policy, noise

    from gspo_hpc.algorithms import objective as algorithms
    from gspo_hpc.config.loader import from_dict
    from gspo_hpc.system import malloc
    from gspo_hpc.training import update

    if args.way == "glibc":
        malloc.keep_freed_memory = lambda: True
    tokens = max(2048, args.prompt + args.length)
    config = from_dict(
        {
            "cluster": {"platform": "cpu", "gpus_per_node": 1},
            "model": {"path": str(args.model), "dtype": "float32"},
            "batch": {"global_batch_size": COMPLETIONS, "num_generations": GROUP, "micro_batch_tokens": tokens},
            "rollout": {"max_prompt_length": args.prompt, "max_response_length": args.length},
            "run": {"max_steps": 1000},
        }
    )
    policy = make_policy(args.model, config)
    objective = algorithms.resolve(config.algorithm)
    groups = noise(policy, COMPLETIONS // GROUP, GROUP, args.prompt, args.length, 0)
    for turn in range(args.steps + 1):
        before = usage()
        update.logprob_pass(policy, groups, "old_logprobs", config)
        result = update.step(policy, groups, objective, config)
        assert result is not None and not result.skipped
        after = usage()
        if turn:
            print(json.dumps({kind: after[kind] - before[kind] * (kind != "resident") for kind in after}), flush=True)
    os._exit(0)  # gloo's threads outlive the group


def child(args: argparse.Namespace, way: str) -> Mapping[str, float]:
    """Return the medians over the steps of a process."""
    command = [sys.executable, __file__, "--way", way, "--model", str(args.model)]
    command += ["--steps", str(args.steps), "--threads", str(args.threads), "--prompt", str(args.prompt)]
    command += ["--length", str(args.length)]
    with tempfile.TemporaryFile("w+") as log:
        env = environment(OMP_NUM_THREADS=str(args.threads))
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        if done.returncode:
            log.seek(0)
            raise RuntimeError(f"{way} ended with {done.returncode}\n{log.read()[-2000:]}")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == args.steps, done.stdout
    return {kind: statistics.median(record[kind] for record in records) for kind in records[0]}


def main() -> int:
    """Measure all pairs, and print Markdown."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, default=REPO / ".cache" / "smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a process (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--length", type=int, default=24, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        measure(args)
    found: dict[str, list[Mapping[str, float]]] = {way: [] for way in WAYS}
    for pair in range(args.pairs):
        for way in WAYS if pair % 2 == 0 else reversed(WAYS):
            found[way].append(child(args, way))
            say(f"pair {pair + 1}, {way}: {json.dumps(found[way][-1])}")
    print(
        f"{args.model.name}, a log-prob pass and an update of {COMPLETIONS} completions of {args.length} tokens, "
        f"prompts of {args.prompt}, float32, threads: {args.threads}; {len(os.sched_getaffinity(0))} cores of "
        f"{cpu_model()}; load average at the end: {os.getloadavg()[0]:.1f}; {args.pairs} pairs of processes of "
        f"{args.steps} steps; medians, with least and most.\n"
    )
    print("| | processor s a step | of the system | page faults a step | MiB resident at most |")
    print("|---|---|---|---|---|")
    for way, name in WAYS.items():
        cells = [spread([one[kind] for one in found[way]], 2) for kind in ("processor", "system")]
        cells += [f"{statistics.median(one[kind] for one in found[way]):,.0f}" for kind in ("faults", "resident")]
        print(f"| {name} | {' | '.join(cells)} |")
    pairs = zip(found["kept"], found["glibc"], strict=True)
    ratios = [kept["processor"] / glibc["processor"] for kept, glibc in pairs]
    print(f"\nProcessor seconds, kept over glibc's, pair by pair: **{statistics.median(ratios):.2f}** ", end="")
    print(f"({min(ratios):.2f} to {max(ratios):.2f}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
