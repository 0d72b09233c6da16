"""A run whose engines get newer weights while they generate: killed, resumed, and repeated from its journals.

It takes two minutes: eleven starts of three ranks with an engine. Which tokens newer weights sample is the clock's
choice, so two runs differ; but what is in the journals decides everything. It would catch weights that wait for the end
of a rollout, tokens under the wrong version, keys and values of older weights behind which an engine goes on, and a
resumed run that samples what was sampled.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run import harness
from tests.run.test_partial_rollouts import (
    OVERRIDES,
    PROMPTS,
    ROLLOUTS,
    SERVER,
    STEPS,
    check_repeated,
    groups,
    journal,
    killed_and_resumed,
)

IN_FLIGHT = (
    *(one for one in OVERRIDES if "oversampling" not in one and "max_num_seqs" not in one),
    *SERVER,
    "rollout.engine={max_num_seqs: 4}",  # so that completions wait for others, and newer weights find some at work
    "rollout.in_flight_updates=true",
)
GENERATES = 2  # the rank


def orders(names: str, tmp_path: Path) -> dict[str, str]:
    """Variables with which the rank that generates keeps to an order of events (tests/run/planted)."""
    return harness.planted(names, tmp_path / "no fault", rank=GENERATES)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("unfinished", ["wait", "continue"])
def test_engines_take_newer_weights_in_the_middle_of_a_rollout(
    unfinished: str, tiny_config: Path, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = () if unfinished == "wait" else ("rollout.unfinished=continue", "rollout.oversampling_factor=1.75")
    command = killed_and_resumed(tiny_config, run_dir, log, *IN_FLIGHT, *more, **orders("middle", tmp_path))
    firsts = [record for record in harness.metrics(run_dir) if record["update"] == 0]
    assert len(firsts) == ROLLOUTS
    within = 0
    for number in range(1, ROLLOUTS):
        for group in groups(run_dir, number):
            for one in group.completions:
                versions = [version for version, _ in one.pieces]
                assert versions == sorted(set(versions)) and set(versions) <= {0, 2, 4}
                assert sum(count for _, count in one.pieces) == len(one.tokens) == len(one.logprobs)
                within += len(versions) > 1
    assert within, "no completion was sampled by two weights"
    assert any(record["rollout/older_token_fraction"] > 0 for record in firsts)
    assert STEPS == 6
    check_repeated(run_dir, command, log, tmp_path)


def test_a_prefix_cache_that_an_in_flight_update_leaves_ends_the_run(tiny_config: Path, tmp_path: Path) -> None:
    """Else completions would be continued behind keys and values of older weights."""
    run_dir, log, note = tmp_path / "run", tmp_path / "log", tmp_path / "planted"
    command = harness.command(tiny_config, run_dir, *IN_FLIGHT)
    process = harness.start(command, log, **harness.planted("kept,middle", note, rank=GENERATES))
    assert harness.finish(process, log) == 1, log.read_text()[-3000:]
    assert note.exists() and "stale prefix cache: after the weight sync an engine still took" in log.read_text()
    assert 0 < sum(map(len, journal(run_dir, 1).values())) < PROMPTS, "it is seen in the middle of a rollout"
