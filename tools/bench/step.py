"""Compare whole GSPO steps with TRL's GRPOTrainer: seconds per step and completion tokens per second, in turns.

    bash tools/bench/setup_peers.sh
    .venv/bin/python tools/bench/step.py > table.md          # progress goes to stderr

Each round starts both sides, one after the other and each in processes of its own, on the same model, the same prompts
in the same order, 64 completions a step (8 prompts x 8) of at most 24 tokens, float32, temperature 1, one optimizer
step per rollout, Adam at the same learning rate, the same reward function, all cores. The side that goes first changes
every round, so that a machine that grows warm or busy favours neither. The first two steps of every process are left
out on both sides, because engines start, kernels compile and heaps grow in them. The time of a step is the time from
the end of the step before to its own end.

What to know when reading the figures:

- TRL generates with transformers and trains with torch; there is no vLLM for it in its CPU environment. It gets the
  settings that make it fast: no gradient checkpointing, and the fastest number of completions per pass, which the
  script finds first by measuring one step at each of 8, 16, 32 and 64 (--trl-batch skips this search).
- Both sample, so lengths differ a little. Tokens are those of completions, up to and including the end token; padding
  is counted on neither side. For this reason the table has both seconds per step and tokens per second.
- A completion whose advantage is zero, because its whole group got the same reward, has no gradient. Our side does not
  compute it, TRL's does; the objective is the same. So that both sides compute every completion, rewards are random
  unless `--rewards task` asks for the real ones, which are equal in most groups of an untrained model.
- Our side computes a prompt once for its completions (batch.share_prompts); TRL repeats the prompt for each of them.
- The ratio of a round is that of its two processes; the last lines give the median of the rounds and their range.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
BENCH = REPO / "tools" / "bench"
COMPLETIONS, GROUP, MAX_LENGTH, LEARNING_RATE = 64, 8, 24, 1e-6
TRL_BATCHES = (8, 16, 32, 64)
REWARDS = {"task": "number_match", "random": f"{BENCH / 'graders.py'}:random_reward"}
SIDES = ("TRL", "gspo_hpc")
WARM_UP = 2  # steps that are not measured


@dataclass(frozen=True)
class Step:
    """One measured step."""

    seconds: float
    generate_seconds: float
    completion_tokens: int
    reward: float
    zero_variance: float  # share of its groups in which all rewards are equal


@dataclass(frozen=True)
class Sample:
    """The steps of one process, without its first ones."""

    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Median of its steps."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens of all its steps over their time."""
        return sum(step.completion_tokens for step in self.steps) / sum(step.seconds for step in self.steps)


def say(text: str) -> None:
    """A line of progress; stdout is for the tables."""
    print(f"step.py: {text}", file=sys.stderr, flush=True)


def run(command: Sequence[str], log: Path, stdout: Path, env: dict[str, str]) -> None:
    """Run to the end with stderr in `log`. Raises RuntimeError with the end of the log if it fails."""
    with stdout.open("wb") as out, log.open("wb") as err:
        nothing = subprocess.DEVNULL
        code = subprocess.run(command, check=False, cwd=REPO, env=env, stdin=nothing, stdout=out, stderr=err).returncode
    if code:
        tail = b"\n".join(log.read_bytes().splitlines()[-15:]).decode("utf-8", "replace")
        raise RuntimeError(f"{' '.join(command[:4])} … ended with {code}; all of it is in {log}\n{tail}")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def environment(**extra: str) -> dict[str, str]:
    """This one without settings of threads, which each side makes itself; the package importable, no hub asked."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "VLLM_", "KMP_"))}
    return kept | {"PYTHONPATH": str(REPO), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"} | extra


def fastest_batch(args: argparse.Namespace, work: Path, reward: str) -> int:
    """Completions per pass at which TRL makes a step in the least time."""
    seconds = {}
    for batch in TRL_BATCHES:
        trial = argparse.Namespace(**vars(args) | {"steps": 1, "trl_batch": batch})
        seconds[batch] = measure_trl(trial, work, reward).seconds
        say(f"TRL at {batch} completions per pass: {seconds[batch]:.1f} s a step")
    return min(seconds, key=lambda batch: seconds[batch])


def measure_trl(args: argparse.Namespace, work: Path, reward: str) -> Sample:
    """One process of TRL."""
    cores = str(len(os.sched_getaffinity(0)))
    command = [str(args.peers_venv / "bin" / "python"), str(BENCH / "peer_trl.py")]
    command += ["--model", str(args.model), "--data", str(args.data), "--reward", reward]
    command += ["--steps", str(args.steps + WARM_UP), "--completions", str(COMPLETIONS)]
    command += ["--num-generations", str(GROUP), "--max-length", str(MAX_LENGTH), "--lr", str(LEARNING_RATE)]
    command += ["--batch", str(args.trl_batch), "--threads", cores]
    run(command, work / "trl.log", work / "trl.jsonl", environment(OMP_NUM_THREADS=cores))
    records = json_lines(work / "trl.jsonl")
    assert [record["step"] for record in records] == list(range(1, args.steps + WARM_UP + 1)), records
    keys = ("seconds", "generate_seconds", "completion_tokens", "reward", "zero_variance")
    return Sample(tuple(Step(*(record[key] for key in keys)) for record in records[WARM_UP:]))


def our_config(args: argparse.Namespace, run_dir: Path, reward: str) -> dict[str, Any]:
    """The run that is measured on our side; nothing is saved or evaluated between its steps, as on the other's."""
    return {
        "run": {"name": "bench", "dir": str(run_dir), "max_steps": args.steps + WARM_UP},
        "cluster": {"platform": "cpu"},
        "model": {"path": str(args.model), "dtype": "float32"},
        "batch": {"micro_batch_tokens": 4096, "global_batch_size": COMPLETIONS, "num_generations": GROUP},
        "data": {"train": str(args.data), "shuffle": False},
        "rollout": {"max_prompt_length": 128, "max_response_length": MAX_LENGTH},
        "reward": {"functions": [{"function": reward}]},
        "optimizer": {"lr": LEARNING_RATE},
        "checkpoint": {"interval": args.steps + WARM_UP},
        "tracking": {"wandb": "disabled"},
    }


def measure_ours(args: argparse.Namespace, work: Path, reward: str) -> Sample:
    """One process of ours: `gspo-hpc train` as a person starts it."""
    run_dir, config = work / "run", work / "config.yaml"
    shutil.rmtree(run_dir, ignore_errors=True)
    config.write_text(json.dumps(our_config(args, run_dir, reward), indent=1), "utf-8")  # JSON is YAML
    command = [sys.executable, "-P", "-m", "gspo_hpc", "train", str(config), *args.overrides]
    run(command, work / "ours.log", work / "ours.out", environment())
    records = [record for record in json_lines(run_dir / "metrics.jsonl") if record["step"] > 0]
    assert [record["step"] for record in records] == list(range(1, args.steps + WARM_UP + 1)), records
    steps = []
    for before, record in itertools.pairwise(records[WARM_UP - 1 :]):
        steps.append(
            Step(
                seconds=record["time"] - before["time"],  # with whatever happens between two steps
                generate_seconds=record["seconds/generate"],
                completion_tokens=record["tokens"] - before["tokens"],
                reward=record["reward"],
                zero_variance=record["zero_variance_groups"] / (COMPLETIONS // GROUP),
            )
        )
    return Sample(tuple(steps))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median (least - most)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"


def table(samples: dict[str, list[Sample]]) -> str:
    """Markdown: a row for each side, then a row for each pair."""
    lines = [
        "| | seconds a step | of these generating | tokens a step | tokens/s | reward | groups of equal rewards |",
        "|---|---|---|---|---|---|---|",
    ]
    for side in SIDES:
        steps = [step for sample in samples[side] for step in sample.steps]
        cells = (
            side,
            spread([step.seconds for step in steps]),
            spread([step.generate_seconds for step in steps]),
            f"{statistics.mean(step.completion_tokens for step in steps):.0f}",
            spread([sample.tokens_per_second for sample in samples[side]]),
            f"{statistics.mean(step.reward for step in steps):.3f}",
            f"{statistics.mean(step.zero_variance for step in steps):.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| round | s/step TRL / ours | tokens/s ours / TRL |", "|---|---|---|"]
    faster, denser = [], []
    for number, (theirs, ours) in enumerate(zip(*(samples[side] for side in SIDES), strict=True), 1):
        faster.append(theirs.seconds / ours.seconds)
        denser.append(ours.tokens_per_second / theirs.tokens_per_second)
        lines.append(f"| {number} | {faster[-1]:.2f} | {denser[-1]:.2f} |")
    lines.append(f"| **median (range)** | **{spread(faster, 2)}** | **{spread(denser, 2)}** |")
    return "\n".join(lines)


def cpu_model() -> str:
    """Return the name of the processor."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def check(args: argparse.Namespace) -> None:
    """Make the files that are cheap to make; raise ValueError, with the fix, for others that are missing."""
    if not (args.peers_venv / "bin" / "python").exists():
        raise ValueError(f"no peers in {args.peers_venv}: bash tools/bench/setup_peers.sh")
    if not (args.model / "config.json").is_file():
        raise ValueError(f"no model in {args.model}: {sys.executable} tools/prepare_smollm2.py --out {args.model}")
    if args.data is not None and not args.data.is_file():
        raise ValueError(f"no file {args.data}: leave --data out, or make it with tools/make_arithmetic.py")
    if min(args.rounds, args.steps) < 1:
        raise ValueError(f"--rounds {args.rounds} and --steps {args.steps}: at least 1 each")
    if args.trl_batch is not None and (args.trl_batch < 1 or COMPLETIONS % args.trl_batch):
        raise ValueError(f"--trl-batch {args.trl_batch} must divide the {COMPLETIONS} completions of a step")


def parse() -> argparse.Namespace:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    peers = os.environ.get("GSPO_HPC_PEERS_VENV") or REPO / ".venv-peers"
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="pairs of processes (default: %(default)s)")
    add("--steps", type=int, default=4, help="measured steps of a process (default: %(default)s)")
    add("--rewards", choices=sorted(REWARDS), default="random", help="(default: random)")
    add("--model", type=Path, default=REPO / ".cache" / "smollm2-135m-instruct", help="Hugging Face folder")
    add("--data", type=Path, help="JSONL with prompt and answer (default: sums of numbers up to 20, made here)")
    add("--peers-venv", type=Path, default=Path(peers), help="made by setup_peers.sh")
    add("--trl-batch", type=int, help="completions per pass of TRL (default: the fastest, found first)")
    add("overrides", metavar="key=value", nargs="*", help="settings that override the config of our side")
    args = parser.parse_args()
    args.model = args.model.absolute()
    return args


def main() -> int:
    """Measure, and print Markdown; 0 when all rounds were measured."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    try:
        check(args)
        work = Path(tempfile.mkdtemp(prefix="gspo_hpc.bench."))  # kept when something fails: the logs are there
        if args.data is None:
            maker = [sys.executable, str(REPO / "tools" / "make_arithmetic.py"), "--kind", "sum20"]
            subprocess.run([*maker, "--out", str(work / "data")], check=True, stdout=sys.stderr)
            args.data = work / "data" / "train.jsonl"
        args.data = args.data.absolute()
        load = os.getloadavg()[0]
        if load > 0.5:
            say(f"load average {load:.1f}: something else is running, and these figures will be off")
        if args.trl_batch is None:
            args.trl_batch = fastest_batch(args, work, REWARDS[args.rewards])
        samples: dict[str, list[Sample]] = {side: [] for side in SIDES}
        measure = {"TRL": measure_trl, "gspo_hpc": measure_ours}
        for number in range(args.rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                began = time.monotonic()
                samples[side].append(measure[side](args, work, REWARDS[args.rewards]))
                step = samples[side][-1]
                took = time.monotonic() - began
                say(
                    f"round {number + 1}: {side} {step.seconds:.1f} s a step, {step.tokens_per_second:.1f} tokens/s "
                    f"(process {took:.0f} s)"
                )
    except (ValueError, RuntimeError) as error:
        say(str(error))
        return 1
    cores, counted = len(os.sched_getaffinity(0)), f"{args.rounds} rounds of {args.steps} steps"
    print(
        f"{args.model.name}, {COMPLETIONS} completions a step of at most {MAX_LENGTH} tokens, float32, rewards: "
        f"{args.rewards}; TRL with {args.trl_batch} completions per pass; {counted}; {cores} cores of {cpu_model()}; "
        f"load average before the start: {load:.1f}; "
        f"medians, with least and most.\n\n{table(samples)}"
    )
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
