"""Measure what shared prompts save: one optimizer step with and without.

    .venv/bin/python tools/bench/shared_prompts.py > table.md          # progress goes to stderr

One training rank on all cores trains in float32 on the same 64 completions (8 prompts x 8) in both ways, in turns. The
time covers packed tokens, forward, backward and Adam. The first step of each way is left out. "Tokens" are those that
the transformer layers compute; the output layer runs on completion tokens only, in both ways. Loss and gradient norm
are compared: a difference beyond rounding ends the benchmark with exit code 1.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path

from step import COMPLETIONS, GROUP, MAX_LENGTH, REPO, cpu_model, spread

PROMPTS = (16, 48, 128, 384)


def main() -> int:
    """Measure, and print Markdown."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, default=REPO / ".cache" / "smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="prompt lengths (default: %(default)s)")
    parser.add_argument("--length", type=int, default=MAX_LENGTH, help="completion length (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each way (default: %(default)s)")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"no model in {args.model}: {sys.executable} tools/prepare_smollm2.py --out {args.model}")
    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(cores)  # before torch is imported
    load = os.getloadavg()[0]

    from trainer import make_policy, noise

    from gspo_hpc.algorithms import objective as algorithms
    from gspo_hpc.config.loader import from_dict
    from gspo_hpc.config.schema import replace
    from gspo_hpc.policy.process_groups import stop
    from gspo_hpc.training import update

    budget = (max(args.prompts) + args.length) * GROUP
    config = from_dict(
        {
            "cluster": {"platform": "cpu", "gpus_per_node": 1},
            "model": {"path": str(args.model), "dtype": "float32"},
            "batch": {
                "global_batch_size": COMPLETIONS,
                "num_generations": GROUP,
                "micro_batch_tokens": budget,
            },
            "run": {"max_steps": 1000},
            "optimizer": {"lr": 1e-12},  # the weights stay, so every step does the same
        }
    )
    ways = {
        "shared": config,
        "repeated": replace(config, batch=replace(config.batch, share_prompts=False)),
    }
    policy = make_policy(args.model, config)
    objective = algorithms.resolve(config.algorithm)

    print(
        f"{args.model.name}, {COMPLETIONS} completions of {args.length} tokens, {GROUP} a prompt, float32; "
        f"{cores} cores of {cpu_model()}; load average before the start: {load:.1f}; medians of {args.repeats}, with "
        "least and most.\n"
    )
    print("| prompt | tokens shared | repeated | s a step shared | repeated | repeated / shared |")
    print("|---|---|---|---|---|---|", flush=True)
    try:
        for length in args.prompts:
            chosen = noise(policy, COMPLETIONS // GROUP, GROUP, length, args.length, seed=length)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            seen: dict[str, tuple[float, float]] = {}
            for turn in range(args.repeats + 1):
                for way, options in ways.items():
                    began = time.perf_counter()
                    result = update.step(policy, chosen, objective, options)
                    if turn:
                        seconds[way].append(time.perf_counter() - began)
                    assert result is not None and not result.skipped
                    seen[way] = (result.sums["entropy"][0], result.grad_norm)
                print(f"shared_prompts.py: prompts of {length}: turn {turn}", file=sys.stderr, flush=True)
            for ours, theirs in zip(seen["shared"], seen["repeated"], strict=True):
                if not math.isclose(ours, theirs, rel_tol=1e-4):
                    print(f"shared_prompts.py: the two ways differ: {seen}", file=sys.stderr)
                    return 1
            prompts = COMPLETIONS // GROUP
            own = COMPLETIONS * (args.length - 1)  # the last token of a completion predicts nothing
            tokens = {"shared": prompts * length + own, "repeated": COMPLETIONS * length + own}
            ratio = statistics.median(seconds["repeated"]) / statistics.median(seconds["shared"])
            cells = [length, *tokens.values(), *(spread(seconds[way], 2) for way in ways), f"{ratio:.2f}"]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    finally:
        stop()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # gloo's threads outlive the group
