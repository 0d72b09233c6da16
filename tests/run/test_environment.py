"""A run whose model talks with an environment: killed between two turns, it equals the one left alone, and it learns.

It costs three starts of a rank with an engine, a minute and a half. It would catch a turn that a resume asks for again
or takes for another's, rewards of a conversation that get lost or go to other conversations, and updates that train on
what the environment said.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from gspo_hpc.runs.journal import read_turns
from tests.run import harness

GAME = '''
import time

from gspo_hpc.rewards.environments.tasks import GuessNumber


class Slow(GuessNumber):
    """Takes its time, notes what it is asked, and is in a mood of its own about a right guess."""

    def __init__(self, asked, **arguments):
        super().__init__(**arguments)
        self.asked = asked

    def reset(self, fields, seed):
        return super().reset(fields, seed) | {"turn": 0, "seed": seed}

    def step(self, state, message):
        with open(self.asked, "a") as file:
            file.write("asked\\n")
        time.sleep(0.01)
        answer = super().step(state, message)
        return answer | {"state": state | answer.get("state", {}) | {"turn": state["turn"] + 1}}
'''
STEPS, UPDATES, TURNS, WORKERS = 20, 4, 2, 4
GROUPS = 64  # of a rollout
# What the last rollout finds more often than the first, which the untrained model samples: with the seeds 42, 1 and 2,
# 0.24, 0.35 and 0.22 of the games more. Half of the least is asked for.
LEARNT = 0.1


def test_a_killed_run_equals_the_one_left_alone_and_asks_for_no_turn_again(tiny_config: Path, tmp_path: Path) -> None:
    file, rows, asked = tmp_path / "game.py", tmp_path / "rows.jsonl", tmp_path / "asked"
    file.write_text(GAME)
    rows.write_text("".join(json.dumps({"prompt": f"Game {number}"}) + "\n" for number in range(256)))
    arguments = f"{{asked: '{asked}', low: 1, high: 3, higher: +, lower: '-'}}"
    overrides = (
        harness.ONE_RANK,
        f"data.train={rows}",
        "data.eval=null",
        f"environment.name={file}:Slow",
        f"environment.args={arguments}",
        f"environment.max_turns={TURNS}",
        f"environment.workers={WORKERS}",
        "reward.functions=[{function: environment}]",
        "rollout.max_response_length=32",
        f"run.max_steps={STEPS}",
        f"batch.steps_per_generation={UPDATES}",
        f"batch.global_batch_size={GROUPS * 8 // UPDATES}",
        "algorithm.clip_low=0.2",
        "algorithm.clip_high=0.25",
        "optimizer.lr=5e-4",
        "optimizer.lr_warmup_steps=0",
        "checkpoint.interval=4",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
        "tracking.samples=64",
    )
    alone, log = tmp_path / "alone", tmp_path / "log"
    assert harness.finish(harness.start(harness.command(tiny_config, alone, *overrides), log), log) == 0, (
        log.read_text()
    )
    records = harness.metrics(alone)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(0 < record["reward"] < 1 and record["grad_norm"] > 0 for record in records), records
    found = [statistics.fmean(record["reward"] for record in part) for part in (records[:UPDATES], records[-UPDATES:])]
    assert found[1] > found[0] + LEARNT, f"{found[0]:.3f} of the numbers were found at first, {found[1]:.3f} at last"
    # Engine and trainer agree on the tokens of the model behind those of the environment.
    assert all(record["failures"] == 0 and record["logprob_gap_mean"] < 1e-4 for record in records)
    assert any("\n> " in completion for completion in harness.samples(alone).values())
    assert all(1 < record["turns"] <= record["turns_max"] <= TURNS for record in records)

    once = asked.read_text().count("\n")  # those of the trial before ranks start, too; a resume makes none
    asked.unlink()
    run_dir = tmp_path / "killed"
    command = harness.command(tiny_config, run_dir, *overrides)
    process = harness.start(command, log)
    turns = run_dir / "rollouts" / "000001" / "rank-0000.turns"
    harness.wait_for(lambda: turns.exists() and turns.read_bytes().count(b"\n") > 100, process, log)
    harness.kill(process)
    fingerprint = json.loads(turns.read_text().partition("\n")[0].partition(" ")[2])["fingerprint"]
    open_turns = {key: found for key, found in read_turns(turns.parent, fingerprint).items() if not found[-1].over}
    assert open_turns and harness.journal_lines(run_dir, 1) < GROUPS, (
        "killed between turns of groups that are not finished"
    )
    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    assert harness.comparable(run_dir) == harness.comparable(alone)
    assert harness.samples(run_dir) == harness.samples(alone)
    again = asked.read_text().count("\n") - once
    # Those that were being answered when the run was killed, and those whose answers had just come: of more than 100.
    assert again <= 4 * WORKERS, f"{again} turns came again"
