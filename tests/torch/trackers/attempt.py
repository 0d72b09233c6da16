"""One attempt of a run that has all trackers: it appends records at its own pace and may be killed at any time.

``python -m tests.torch.trackers.attempt RUN STEPS`` starts where metrics.jsonl ends, cut back a little as a resumed run
cuts it back to its checkpoint. Records depend on their step alone.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from gspo_hpc.runs.directory import RunDir
from gspo_hpc.trackers import registry
from gspo_hpc.trackers.feed import Feeds

STARTED = 1.7e9  # unix seconds


def record(step: int) -> dict[str, Any]:
    """The record of a step; some numbers are missing in some steps."""
    more = {"eval/accuracy": 0.5 + step / 1000} if step % 3 == 0 else {"grad_norm": None}
    many = {f"part/{number}": step + number / 64 for number in range(20)}
    return {"step": step, "time": STARTED + step, "attempt": 1, "reward": step / 4, "note": "text"} | more | many


def samples(step: int) -> list[dict[str, Any]]:
    """What is shown of the rollout before a step."""
    answer = {"answer": 3, "api_key": "S3CRET"}
    shown = {"completion": "<b>\ud800", "reward": 1.0, "failure": None, "answer": answer}
    return [{"step": step - 1, "phase": "train", "prompt": f"question {number}"} | shown for number in range(2)]


def main(path: str, steps: str) -> None:
    """Log until all steps are logged."""
    run = RunDir(path)
    os.environ["TRACKIO_DIR"] = str(run.path / "trackio")
    done = max((one["step"] for one in run.read_metrics()), default=-1)
    run.truncate_metrics(done - random.randrange(3))
    config = run.load_config()
    with run.lock() as lock:
        attempt = run.new_attempt(config)
        lock.describe(attempt.number)
        feeds = Feeds(
            registry.chosen(config.tracking),
            registry.tracked_run(run, config),
            warn=lambda text: print(f"WARN {text}", flush=True),
            announce=lambda text: print(text, flush=True),
        )
        first = max((one["step"] for one in run.read_metrics()), default=-1) + 1
        for step in range(first, int(steps)):
            run.append_samples(samples(step))
            run.append_metrics(record(step))
            feeds.wake()
            time.sleep(random.random() / 5)
        feeds.close(0)
        attempt.finish("done", 0)
    print("ENDED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
