"""A run that was killed in its first rollout takes another config, and equals a run that never had the old one.

It would catch groups that the old settings sampled: their journal names the weights, which are the same. A minute.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.run import harness

SHORT = (
    harness.ONE_RANK,
    "run.max_steps=2",
    "batch.steps_per_generation=2",
    "checkpoint.interval=2",
    "eval.max_prompts=16",
)
NEW = (*SHORT, "rollout.temperature=0.6", "eval.interval=null")


def test_nothing_that_the_old_settings_sampled_is_trained_on(tiny_config: Path, tmp_path: Path) -> None:
    run_dir, fresh, log = tmp_path / "run", tmp_path / "fresh", tmp_path / "log"
    process = harness.start(harness.command(tiny_config, run_dir, *SHORT, "eval.before=true"), log)
    harness.wait_for(lambda: harness.journal_lines(run_dir, 0) > 0, process, log)
    harness.kill(process)
    assert harness.last_step(run_dir) == 0 and harness.journal_lines(run_dir, 0) > 0
    for path in (run_dir, fresh):
        process = harness.start(harness.command(tiny_config, path, *NEW, "eval.before=false"), log)
        assert harness.finish(process, log) == 0, log.read_text()
    assert [record["step"] for record in harness.metrics(run_dir)] == [1, 2]
    kept = [{file.name: file.read_bytes() for file in (path / "evaluations").iterdir()} for path in (run_dir, fresh)]
    assert kept[0] == kept[1] and [*kept[0]] == ["000002.jsonl"]
    assert harness.comparable(run_dir) == harness.comparable(fresh)
    ours, theirs = (harness.export(path, tmp_path / f"{path.name}-out") for path in (run_dir, fresh))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
