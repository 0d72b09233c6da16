"""A run whose conversations go on in later rollouts, and with newer weights in the middle of one: killed, and repeated.

It takes two minutes: four starts of three ranks with an engine and an environment. It would catch a conversation that
begins anew or loses its rewards when it is carried, tokens of the model under the wrong weights, tokens of the
environment that count as sampled, and a resumed run that samples or asks what it has.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gspo_hpc.data.records import UNFINISHED, Group
from tests.run import harness
from tests.run.test_environment import GAME, TURNS
from tests.run.test_in_flight import IN_FLIGHT, orders
from tests.run.test_partial_rollouts import ROLLOUTS, check_repeated, groups, journal, killed_and_resumed


@pytest.mark.timeout(900)
def test_conversations_go_on_with_newer_weights_and_are_decided_by_their_journals(
    tiny_config: Path, tmp_path: Path
) -> None:
    file, rows, asked = tmp_path / "game.py", tmp_path / "rows.jsonl", tmp_path / "asked"
    file.write_text(GAME)
    rows.write_text("".join(json.dumps({"prompt": f"Game {number}"}) + "\n" for number in range(256)))
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = killed_and_resumed(
        tiny_config,
        run_dir,
        log,
        *IN_FLIGHT,
        "rollout.unfinished=continue",
        "rollout.oversampling_factor=1.75",
        f"data.train={rows}",
        "data.eval=null",
        f"environment.name={file}:Slow",
        f"environment.args={{asked: '{asked}', low: 1, high: 3, higher: +, lower: '-'}}",
        f"environment.max_turns={TURNS}",
        "environment.workers=1",
        "reward.functions=[{function: environment}]",
        "rollout.max_response_length=32",
        **orders("middle,between", tmp_path),
    )
    records = harness.metrics(run_dir)
    assert all(record["failures"] == 0 for record in records)
    assert any(record["turns"] > 1 for record in records)
    left = [
        one
        for number in range(ROLLOUTS)
        for lines in journal(run_dir, number, "unfinished").values()
        for group in (Group.from_json(line[9:]) for line in lines)
        for one in group.completions
        if one.finish_reason == UNFINISHED
    ]
    assert any(one.standing is not None and one.standing.messages for one in left), "none was left between two messages"
    of_several = 0
    for number in range(1, ROLLOUTS):
        for group in groups(run_dir, number):
            for one in group.completions:
                assert sum(count for _, count in one.pieces) == len(one.logprobs) == len(one.sampled)
                assert one.standing is None and one.failure is None
                assert one.environment is None or not one.environment[-1]
                # An answer to each message but the last, and the environment's own rewards: a half for a right number.
                assert 1 <= one.text.count("\n> ") + 1 <= TURNS
                of_several += len(one.pieces) > 1 and bool(np.any(one.environment))
    assert of_several, "no conversation of several messages was sampled by two weights"
    check_repeated(run_dir, command, log, tmp_path)
