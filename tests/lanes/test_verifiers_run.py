"""A real environment of the package verifiers from PyPI, in a Python of its own, grades a run of SmolLM2.

`bash tools/lanes.sh verifiers` runs this, in about three minutes. It would catch rows that a run cannot read, rewards
that are not those of the environment's own rubric, and conversations that fail.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from gspo_hpc.config.schema import Data
from gspo_hpc.data.rows import load_rows
from gspo_hpc.rewards.environments import verifiers
from gspo_hpc.rewards.environments.verifiers import Verifiers
from tests.run import harness

PYTHON = os.environ.get("GSPO_HPC_VERIFIERS", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="bash tools/lanes.sh verifiers")
# Its own score is the same for all that an untrained model writes; with these weights its other measures count, too.
ENVIRONMENT, ARGS = "sophistry-bench-sprint", {"passage_chars": 300, "weights": [1, 0, 1, 1, 1, 1, 1, 1]}
ROWS, GROUPS, SAMPLES, STEPS = 4, 2, 4, 2


def test_a_run_with_a_real_environment(project: Path, tmp_path: Path) -> None:
    """A completion of each group has the score that the environment gives to it when it is asked alone."""
    rows = tmp_path / "rows.jsonl"
    began = time.monotonic()
    assert (
        verifiers.main([ENVIRONMENT, str(rows), "--python", PYTHON, "--rows", str(ROWS), "--args", json.dumps(ARGS)])
        == 0
    )
    ready = time.monotonic()
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(
        project / "configs/smollm2_cpu.yaml",
        run_dir,
        f"model.path={project}/.cache/smollm2-135m-instruct",
        f"run.max_steps={STEPS}",
        f"data.train={rows}",
        "data.eval=null",
        "environment.name=verifiers",
        f"environment.args={json.dumps({'id': ENVIRONMENT, 'python': PYTHON, 'args': ARGS})}",
        "environment.workers=1",
        "reward.functions=[{function: environment}]",
        f"batch.num_generations={SAMPLES}",
        f"batch.global_batch_size={GROUPS * SAMPLES}",
        "batch.steps_per_generation=1",
        "rollout.dynamic_sampling=false",
        "rollout.max_prompt_length=512",
        "rollout.max_response_length=64",
        "eval.interval=null",
        "checkpoint.interval=100",
        f"tracking.samples={GROUPS}",
    )
    process = harness.start(command, log)
    assert harness.finish(process, log, timeout=900) == 0, log.read_text()[-3000:]
    records = harness.metrics(run_dir)
    assert [record["failures"] for record in records] == [0] * STEPS, log.read_text()[-3000:]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == STEPS * GROUPS  # one of each group
    of_prompt = {}
    for row in load_rows(rows, Data()):
        of_prompt[json.dumps(row.fields[verifiers.FIELD]["prompt"])] = row.fields
    alone = Verifiers(ENVIRONMENT, PYTHON, ARGS)
    for sample in samples:
        fields = next(one for one in of_prompt.values() if text_of(one) in sample["prompt"])
        answer = alone.step(alone.reset(fields, 0), sample["completion"])
        assert answer["over"] and answer["reward"] == pytest.approx(sample["reward"], abs=1e-6)
    alone.close()
    rewards = [sample["reward"] for sample in samples]
    assert len(set(rewards)) > 1
    told = f"{ENVIRONMENT}: {STEPS * GROUPS} groups of {SAMPLES}, scores {min(rewards):.3f} to {max(rewards):.3f}"
    steps = sum(record["seconds"] for record in records)
    print(f"{told}; {ready - began:.0f} s for rows, {steps:.0f} s of steps, {time.monotonic() - ready:.0f} s in all")


def text_of(fields: dict[str, object]) -> str:
    """Return the text of the user's message of a row."""
    row = fields[verifiers.FIELD]
    assert isinstance(row, dict)
    return str(row["prompt"][-1]["content"]).strip()
