"""Whole runs in which an engine is not the trainer's: the run ends, and the error and `diagnose` name the cause.

Four short runs, two minutes. Catches a rollout behind a stale prefix cache that the probe of the sync does not see and
nobody else either; a cause that server mode, whose engines and trainer are in different processes, does not name; and
an exchange of questions between these that ends in a wait.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.run import harness

APART = ("cluster.gpus_per_node=2", "rollout.mode=server", "rollout.engines_per_node=1")
# Prompts of more than one block of 32 tokens, all of them in every rollout: what the cache keeps of one is met again.
LONG = ("rollout.max_prompt_length=128", "optimizer.lr=3e-3", "checkpoint.interval=100", "eval.interval=null")


def ended(arguments: list[str], run_dir: Path, log: Path, **variables: str) -> str:
    """Return the reason for which a run failed, on one line, once `diagnose` has repeated it."""
    process = harness.start(arguments, log, **variables)
    assert harness.finish(process, log) == 1, log.read_text()[-3000:]
    (attempt,) = (run_dir / "attempts").glob("*/attempt.json")
    reason = str(json.loads(attempt.read_text())["detail"])
    code, _ = harness.diagnose(run_dir)
    assert code == 1 and not harness.left_on_node(run_dir)
    return reason


def test_a_stale_prefix_cache_that_the_probe_does_not_see_is_found_in_the_rollout(
    tiny_config: Path, tmp_path: Path
) -> None:
    """The same run without the fault goes to its end: what the gap is without a stale cache is in its records."""
    rows = [{"prompt": f"What is {10 + n} + 22? " * 4, "answer": 32 + n} for n in range(8)]
    data, note, grader = tmp_path / "train.jsonl", tmp_path / "planted", tmp_path / "grader.py"
    grader.write_text("def noise(completion, **row):\n    return sum(map(ord, completion)) % 7 / 6\n")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = f"reward.functions=[{{function: '{grader}:noise'}}]"
    words = (f"data.train={data}", reward, "run.max_steps=4", "batch.steps_per_generation=2", *LONG, harness.ONE_RANK)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *harness.OVERRIDES, *words)
    reason = ended(command, run_dir, log, **harness.planted("stale", note, rank=0))
    assert note.exists()
    assert re.search(r"tokens of a rollout \(weights of step 2\).*logprob_gap/cached_256 .*stale prefix cache", reason)
    assert [record["step"] for record in harness.metrics(run_dir)][-1] == 2, "the first rollout has no older weights"
    healthy = tmp_path / "healthy"
    process = harness.start(harness.command(tiny_config, healthy, *harness.OVERRIDES, *words), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    gaps = [record["logprob_gap/cached_256"] for record in harness.metrics(healthy) if record["step"]]
    assert len(gaps) == 4 and max(gaps) < 2e-5, gaps


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "keys",
            "disagree on the probe.*cause: tokens with several keys differ far more than others: query or key weights",
        ),
        (
            "rope",
            "other constants.*wrong rotary embeddings: the engine computes as the trainer would with rope_theta 500",
        ),
    ],
)
def test_server_mode_names_the_cause(tiny_config: Path, tmp_path: Path, fault: str, said: str) -> None:
    run_dir, log, note = tmp_path / "run", tmp_path / "log", tmp_path / "planted"
    rope = "rollout.engine.hf_overrides={rope_parameters: {rope_type: default, rope_theta: 50000.0}}"
    words = [*harness.OVERRIDES, *APART, *([rope] if fault == "rope" else [])]
    planted = harness.planted("keys", note) if fault == "keys" else {}
    reason = ended(harness.command(tiny_config, run_dir, *words), run_dir, log, **planted)
    assert note.exists() == (fault == "keys")
    assert re.search(said, reason), reason
