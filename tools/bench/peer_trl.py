"""TRL's GRPOTrainer on the sequence-level objective: one JSON line a step. Runs in the peers' environment.

step.py starts it; by hand, from the root of the checkout:

    PYTHONPATH=. .venv-peers/bin/python tools/bench/peer_trl.py --model DIR --data FILE.jsonl --steps 3

A line has `step`, `seconds` (from the end of the step before to the end of this one), `cpu_seconds` (processor time in
the same interval), `generate_seconds` (the part in model.generate), `completion_tokens` (real ones, no padding),
`reward`, `zero_variance` (the share of groups with equal rewards) and `peak_mib` (resident memory, so far). Everything
else that TRL prints goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from gspo_hpc.rewards.builtin import REGISTRY


class Reporter(TrainerCallback):  # type: ignore[misc]
    """Callback that writes the line of a step when TRL logs it."""

    def __init__(self, out: TextIO, completions: int) -> None:
        self.out, self.completions = out, completions
        self.before = self.now = self.cpu_before = self.cpu_now = 0.0
        self.generate_seconds = 0.0

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """`generate`, with its time added to that of the current step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = generate(*args, **kwargs)
            self.generate_seconds += time.monotonic() - began
            return result

        return call

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first step begins."""
        self.now, self.cpu_now = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has made a step."""
        self.before, self.now = self.now, time.monotonic()
        self.cpu_before, self.cpu_now = self.cpu_now, time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """TRL's own figures of the step that has just ended."""
        if not logs or "completions/mean_length" not in logs:
            return  # the summary at the end of training
        line = {
            "step": state.global_step,
            "seconds": self.now - self.before,
            "cpu_seconds": self.cpu_now - self.cpu_before,
            "generate_seconds": self.generate_seconds,
            "completion_tokens": round(float(logs["completions/mean_length"]) * self.completions),
            "reward": float(logs["reward"]),
            "zero_variance": float(logs["frac_reward_zero_std"]),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        self.generate_seconds = 0.0
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()


def grader(name: str) -> Callable[..., float]:
    """A grader of the package's registry, or path/to/file.py:function: what the other side of the comparison uses."""
    if ":" not in name:
        return REGISTRY[name]
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("bench_grader", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result: Callable[..., float] = getattr(module, function)
    return result


def reward_function(grade: Callable[..., float]) -> Callable[..., list[float]]:
    """`grade` in the form in which TRL calls reward functions; every column of the data is a field."""

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        fields = {key: value for key, value in columns.items() if isinstance(value, list)}
        return [
            float(
                grade(
                    completion[0]["content"],
                    prompt=prompt[-1]["content"],
                    fields={key: value[row] for key, value in fields.items() if len(value) == len(completions)},
                )
            )
            for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]

    return reward


def dataset(path: Path) -> Dataset:
    """The rows of a JSONL file, each prompt as one user message."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    for row in rows:
        if isinstance(row["prompt"], str):
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    return Dataset.from_list(rows)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with prompt and the fields of the reward")
    parser.add_argument("--reward", default="number_match", help="registered name or path/to/file.py:function")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--completions", type=int, default=64, help="a step")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=24, help="tokens of a completion")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--batch", type=int, default=16, help="per_device_train_batch_size; the rest is accumulated")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.completions % args.batch:
        parser.error(f"--completions {args.completions} is no multiple of --batch {args.batch}")

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for the lines alone
    torch.set_num_threads(args.threads)
    reporter = Reporter(out, args.completions)
    folder = tempfile.TemporaryDirectory(prefix="peer_trl.")  # TRL wants one, and leaves it empty
    config = GRPOConfig(
        output_dir=folder.name,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.completions // args.batch,
        num_generations=args.num_generations,
        max_completion_length=args.max_length,
        temperature=1.0,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=[reward_function(grader(args.reward))],
        args=config,
        train_dataset=dataset(args.data),
        callbacks=[reporter],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.model.generate = reporter.timed(trainer.model.generate)
    trainer.train()
    folder.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(main())
