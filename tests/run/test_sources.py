"""Runs on two sources with rewards of their own and a curriculum, killed and resumed.

It costs six starts of one training rank with an engine, at most four minutes. It would catch a resumed run that draws
other prompts than the one left alone, a source without its share, a reward function that grades the other source, pass
rates that a kill loses, and metrics of one source that are those of the other.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run import harness

# A number that stands for chance and follows from the completion: groups are right in part, and so pass rates differ.
GRADER = """
import hashlib
import time


def marked(completion, *, fields, **row):
    assert fields["data_source"] == "sums", fields
    time.sleep(0.02)  # so that groups are finished one after the other, and a kill finds a rollout half done
    drawn = int.from_bytes(hashlib.sha256(completion.encode()).digest()[:2], "big") / 65536
    return float(drawn >= (0.0, 0.3, 0.6)[fields["level"]])


def short(completion, *, fields, response_length, **row):
    assert fields["data_source"] == "table" and fields["kind"] == "easy", fields
    return float(response_length % 2)
"""
PROMPTS = 6  # of a rollout
OVERRIDES = (
    "data.train=null",
    "data.eval=null",
    "data.curriculum_floor=0.2",
    "rollout.temperature=2",
    "batch.num_generations=4",
    "batch.global_batch_size=12",
    "batch.steps_per_generation=2",
    "optimizer.lr=3e-4",
    "checkpoint.interval=2",
    "eval.before=false",
    "eval.interval=null",
    "tracking.samples=64",
    "run.max_steps=16",
)
IN_TURNS = ("cluster.gpus_per_node=1",)
AHEAD = (
    *("cluster.gpus_per_node=2", "rollout.mode=server", "rollout.engines_per_node=1", "rollout.max_staleness=1"),
    *("rollout.dynamic_sampling=true", "rollout.max_num_gen_batches=4"),
)


def sources(folder: Path, rows: list[dict[str, Any]]) -> str:
    """The two sources: 14 rows of JSONL under other names, and a table of which a filter leaves 8."""
    sums = [{"question": row["prompt"], "gold": row["answer"], "level": i % 3} for i, row in enumerate(rows[:15])]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums))
    table = [f"{row['prompt']},{row['answer']},{('easy', 'hard')[i % 2]}" for i, row in enumerate(rows[15:31])]
    (folder / "table.csv").write_text("\n".join(["prompt,answer,kind", *table]) + "\n")
    (folder / "unseen.jsonl").write_text(f"{json.dumps({'question': rows[40]['prompt'], 'gold': 1, 'level': 0})}\n")
    graders = folder / "graders.py"
    given = [
        {
            "name": "sums",
            "files": f"{folder}/sums.jsonl#14",
            "eval": f"{folder}/unseen.jsonl",
            "weight": 2,
            "columns": {"question": "prompt", "gold": "answer"},
            "rewards": {f"{graders}:marked": 1},
        },
        {
            "name": "table",
            "files": f"{folder}/table.csv",
            "weight": 1,
            "filter": {"kind": "easy"},
            "rewards": {f"{graders}:short": 0.5},
        },
    ]
    return f"data.sources={json.dumps(given)}"


def asked(run_dir: Path) -> dict[tuple[int, str], list[str]]:
    """The prompts that a run showed, by step and phase, each with its source."""
    found: dict[tuple[int, str], list[str]] = {}
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        one = json.loads(line)
        found.setdefault((one["step"], one["phase"]), []).append(f"{one['answer']['data_source']} {one['prompt']}")
    return {key: sorted(set(prompts)) for key, prompts in found.items()}


def sampled_from_what_a_checkpoint_weighs(run_dir: Path) -> bool:
    """Tell whether a rollout is being sampled behind a checkpoint that has pass rates and positions of sources."""
    saved = [path for path in run_dir.glob("checkpoints/0*/pass_rates.json") if (path.parent / "COMMITTED").exists()]
    return any((path.parent / "sources.json").exists() for path in saved) and harness.last_step(run_dir) in range(7, 13)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", [IN_TURNS, AHEAD], ids=["in turns", "a rollout ahead, with dynamic sampling"])
def test_a_killed_run_draws_the_same_of_two_sources(
    tiny_folder: Path, tiny_config: Path, tmp_path: Path, where: tuple[str, ...]
) -> None:
    (tmp_path / "graders.py").write_text(GRADER)
    rows = [json.loads(line) for line in (tiny_folder / "data" / "train.jsonl").read_text().splitlines()[:41]]
    functions = ", ".join(f"{{function: '{tmp_path}/graders.py:{name}'}}" for name in ("marked", "short"))
    own, log = (sources(tmp_path, rows), f"reward.functions=[{functions}]"), tmp_path / "log"

    def start(run_dir: Path, *, kill: bool = False) -> None:
        process = harness.start(harness.command(tiny_config, run_dir, *OVERRIDES, *where, *own), log)
        if kill:
            harness.wait_for(lambda: sampled_from_what_a_checkpoint_weighs(run_dir), process, log)
            harness.kill(process)
        else:
            assert harness.finish(process, log) == 0, log.read_text()[-3000:]

    alone, killed = tmp_path / "alone", tmp_path / "killed"
    start(alone)
    steps = harness.metrics(alone)
    assert steps[-1]["step"] == 16 and all(record["failures"] == 0 for record in steps)
    firsts = [record for record in steps if record.get("source/sums/epoch")]
    assert len(firsts) == 8, "the first step of every rollout says how far the sources are"
    of_table, of_sums = firsts[-1]["source/table/epoch"] * 8, firsts[-1]["source/sums/epoch"] * 14
    assert abs(of_sums - 2 * of_table) <= 2 and of_sums + of_table >= 8 * PROMPTS
    pairs = zip(steps[::2], steps[1::2], strict=True)
    drawn = [
        {name: sum(one.get(f"source/{name}/groups", 0) for one in pair) for name in ("sums", "table")} for pair in pairs
    ]
    if where is IN_TURNS:
        assert drawn == [{"sums": 4, "table": 2}] * 8
    assert any(0 < one.get("source/sums/accuracy", 0) < 1 for one in steps), "nothing for a curriculum to weigh"
    assert firsts[-1]["data/known_pass_rates"] <= 22 and 0 < firsts[-1]["data/pass_rate"] < 1
    counts = Counter(prompt for (_, phase), prompts in asked(alone).items() if phase == "train" for prompt in prompts)
    assert {prompt.split()[0] for prompt in counts} == {"sums", "table"}
    assert asked(alone)[16, "after"][0].startswith("sums"), "the source's own unseen prompts"
    assert all(record.get("source/table/reward", 0) <= 0.5 for record in steps), "the weight of the source counts"

    start(killed, kill=True)
    start(killed)
    assert harness.comparable(killed) == harness.comparable(alone)
    assert asked(killed) == asked(alone)
    assert "from the beginning" not in log.read_text().rpartition("attempt 2,")[2][:40], "it resumed from no checkpoint"
    ours, theirs = (harness.export(run, tmp_path / f"{run.name}-weights") for run in (killed, alone))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in theirs)
