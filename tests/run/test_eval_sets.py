"""A run with several evaluation sets, in turns and in server mode: each is asked in its own way, and a kill changes
nothing.

It costs five starts of ranks with an engine and two commands, two minutes. It would catch a set that is sampled or
graded as another is, answers that are longer than a set allows, scores of a run that are not those of `eval`, and a run
whose training depends on how it is evaluated, or that a kill between evaluations changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.evaluation import stored
from tests.run import harness

STEPS, TOKENS = 6, 3
GRADER = """
def long(completion, *, response_length, **row):
    return float(response_length >= 3)
"""
SERVER = ("cluster.gpus_per_node=2", "rollout.mode=server", "rollout.engines_per_node=1")


def sets(folder: Path, data: Path) -> list[dict[str, Any]]:
    """A set as the others are asked, and one with other answers, graders and prompts."""
    rows = [json.loads(line) for line in data.read_text().splitlines()[:12]]
    (folder / "other.csv").write_text("\n".join(["sum,answer", *(f"{one['prompt']},{one['answer']}" for one in rows)]))
    short = {"columns": {"sum": "prompt"}, "samples": 3, "temperature": 1.5, "top_p": 0.9, "max_tokens": TOKENS}
    return [
        {"name": "alike", "files": f"{data}#8"},
        {"name": "short", "files": f"{folder}/other.csv", "rewards": {f"{folder}/own.py:long": 1}, **short},
    ]


def command(*words: object) -> str:
    """Return what a command of gspo-hpc prints."""
    line = [sys.executable, "-m", "gspo_hpc", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_sets_are_asked_each_in_its_own_way(tiny_folder: Path, tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(GRADER)
    given, log = sets(tmp_path, tiny_folder / "data" / "eval.jsonl"), tmp_path / "log"
    functions = [{"function": "number_match"}, {"function": f"{tmp_path}/own.py:long", "only_named": True}]
    common = (
        f"reward.functions={json.dumps(functions)}",
        f"run.max_steps={STEPS}",
        "batch.steps_per_generation=2",
        "optimizer.lr=3e-4",
        "checkpoint.interval=2",
        "eval.interval=2",
        "eval.max_prompts=10",
        "eval.samples=2",
    )

    def run(name: str, *more: str, kill: bool = False) -> Path:
        process = harness.start(harness.command(tiny_config, tmp_path / name, *common, *more), log)
        if kill:
            harness.wait_for(lambda: harness.last_step(tmp_path / name) in (3, 4), process, log)
            harness.kill(process)
        else:
            assert harness.finish(process, log) == 0, log.read_text()[-3000:]
        return tmp_path / name

    with_sets = (harness.ONE_RANK, f"data.eval_sets={json.dumps(given)}")
    alone = run("alone", *with_sets)
    evaluated = [record for record in harness.metrics(alone) if "eval/accuracy" in record]
    assert [record["step"] for record in evaluated] == [0, 2, 4, 6]
    last = evaluated[-1]
    assert {"eval/avg@2", "eval/avg@3", "eval/alike/avg@2", "eval/short/avg@3"} < last.keys()
    assert last["eval/short/response_length"] <= TOKENS < last["eval/alike/response_length"]
    assert last["eval/short/accuracy"] > 0.5, "most answers have more than three tokens"
    (line,) = [one for one in log.read_text().splitlines() if f"step {STEPS}: accuracy" in one]
    assert f"on 28 unseen prompts (alike {last['eval/alike/accuracy']:.3f}, short " in line

    found = stored.read(alone / "evaluations" / f"{STEPS:06d}.jsonl")
    parts = {part: [one for one in found.prompts if one.part == part] for part in ("", *found.parts)}
    assert {part: len(own) for part, own in parts.items()} == {"": 10, "alike": 8, "short": 10}, (
        "eval.max_prompts is for each set"
    )
    assert {len(one.samples) for one in parts["short"]} == {3} and {one.decides for one in parts["short"]} == {
        f"{tmp_path}/own.py:long"
    }
    assert all(each.sampled <= TOKENS for one in parts["short"] for each in one.answers)
    assert {len(one.samples) for one in (*parts[""], *parts["alike"])} == {2}
    assert found.scores() == {name: last[name] for name in found.scores()}

    told = json.loads(command("eval", alone, "--json"))
    assert {name: told[name] for name in found.scores()} == found.scores()
    again = json.loads(command("rescore", alone, "--json"))
    assert again["old"] == again["new"] == found.scores()

    killed = run("killed", *with_sets, kill=True)
    run("killed", *with_sets)
    assert harness.comparable(killed) == harness.comparable(alone)

    assert not any(name.endswith("long") for name in last), "it grades no training prompts"

    plain = run("plain", harness.ONE_RANK, 'reward.functions=[{"function": "number_match"}]')
    trained = [
        [{key: value for key, value in record.items() if not key.startswith("eval/")} for record in one]
        for one in (harness.comparable(plain), harness.comparable(alone))
    ]
    assert trained[0] == trained[1], "the same steps, however they are evaluated"

    apart = run("apart", *SERVER, f"data.eval_sets={json.dumps(given)}")
    first = harness.metrics(apart)[0]
    assert {key: first[key] for key in first if key.startswith("eval/")} == {
        key: evaluated[0][key] for key in evaluated[0] if key.startswith("eval/")
    }
