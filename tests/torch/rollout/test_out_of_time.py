"""Conversations that take longer than environment.max_seconds (4 s), by a clock that only the model's messages move.

It would catch a conversation that goes on for ever, one that loses its rewards or ends where it had time left, and a
resume that gives a conversation its time again, that decides anew what was decided, or that goes on behind a message
which is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import OUT_OF_TIME, Completion
from gspo_hpc.data.table import LATE, TRUNCATED, GroupTable
from gspo_hpc.rewards.environments.turns import turn_pool
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rollout import conversation, conversations
from gspo_hpc.runs.journal import Journal
from tests.torch.rollout.scripted import talk

FILE = """
class Asks:
    def step(self, state, message):
        return {"reply": "Go on.", "reward": 0.25, "over": message == "I am done."}
"""
EACH = 10.0  # seconds of a message


class Clock:
    """Time that passes by EACH with every message of the model."""

    def __init__(self, start: float = 5000.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def says(self, seen: str, seed: int) -> str:
        self.now += EACH
        return f"Message {seen.count('<|assistant|>')}."


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    file = tmp_path_factory.mktemp("asks") / "own.py"
    file.write_text(FILE)
    settings = [f"environment.name={file}:Asks", "environment.workers=1", "environment.max_seconds=25"]
    return loader.load(None, settings, run_code=True)


@pytest.fixture(scope="module")
def pool(config: Config) -> Iterator[RewardPool]:
    with turn_pool(config, 1) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (conversation, conversations):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def one_of(config: Config, pool: RewardPool, clock: Clock, journal: Journal | None = None) -> Completion:
    groups, _ = talk(config, pool, clock.says, journal=journal)
    (one,) = groups[0].completions
    return one


def test_it_ends_with_the_first_answer_after_its_time_and_keeps_its_rewards(
    config: Config, pool: RewardPool, clock: Clock
) -> None:
    one = one_of(config, pool, clock)
    assert (one.turns, one.finish_reason, one.failure) == (3, OUT_OF_TIME, None)
    assert one.reward == pytest.approx(0.75)
    assert one.text.endswith("Message 3.") and one.environment is not None and not one.environment[-1]


def test_without_a_limit_and_within_it_nothing_ends_early(config: Config, pool: RewardPool, clock: Clock) -> None:
    for limit in (None, 100 * EACH):
        free = loader.with_settings(config, [f"environment.max_seconds={'null' if limit is None else limit}"])
        one = one_of(free, pool, clock)
        assert (one.turns, one.finish_reason) == (config.environment.max_turns, "stop")


def test_what_the_environment_ends_within_the_last_answer_has_ended_by_itself(
    config: Config, pool: RewardPool, clock: Clock
) -> None:
    def says(seen: str, seed: int) -> str:
        clock.now += 100.0
        return "I am done."

    groups, _ = talk(config, pool, says)
    (one,) = groups[0].completions
    assert (one.turns, one.finish_reason) == (1, "stop")


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_resume_counts_the_time_before_the_kill_and_none_between(
    turns: int, config: Config, pool: RewardPool, clock: Clock, tmp_path: Path
) -> None:
    """After `turns` messages the process is killed, and the next one has another clock."""
    with_all = Journal(tmp_path / "all", 0, fingerprint="f", rollout=0)
    whole = one_of(config, pool, clock, with_all)
    with_all.close()
    (file,) = (path for path in (tmp_path / "all").rglob("*turns*") if path.is_file())
    lines = file.read_bytes().splitlines(keepends=True)
    copy = tmp_path / "killed" / file.relative_to(tmp_path / "all")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"".join(lines[: len(lines) - whole.turns + turns]))
    clock.now = 17.0
    journal = Journal(tmp_path / "killed", 0, fingerprint="f", rollout=0)
    again = one_of(config, pool, clock, journal)
    journal.close()
    assert clock.now == 17.0 + EACH * (whole.turns - turns), "messages that the journal has are not sampled again"
    assert np.array_equal(again.tokens, whole.tokens) and again.finish_reason == OUT_OF_TIME
    assert (again.reward, again.text) == (whole.reward, whole.text)


def test_a_turn_that_follows_another_message_is_not_taken(
    config: Config, pool: RewardPool, clock: Clock, tmp_path: Path
) -> None:
    """The second line was damaged when a first resume came, which sampled otherwise and was killed before the third."""

    def otherwise(seen: str, seed: int) -> str:
        said = clock.says(seen, seed)
        return said if said == "Message 1." else f"Otherwise: {said}"

    turns = list[list[bytes]]()
    for says in (clock.says, otherwise):
        journal = Journal(tmp_path / says.__name__, 0, fingerprint="f", rollout=0)
        talk(config, pool, says, journal=journal)
        journal.close()
        (file,) = (path for path in (tmp_path / says.__name__).rglob("*turns*") if path.is_file())
        turns.append(file.read_bytes().splitlines(keepends=True)[-3:])
    (first, second, third), (_, other, _) = turns
    data = file.read_bytes().split(first)[0]
    file.write_bytes(data + first + second[: len(second) // 2] + b"\n" + third + other)
    clock.now = 5000.0
    journal = Journal(tmp_path / "otherwise", 0, fingerprint="f", rollout=0)
    again = one_of(config, pool, clock, journal)
    journal.close()
    assert clock.now == 5000.0 + EACH, "of three messages the journal has two that follow each other"
    assert [line for line in again.text.split("\n") if ">" not in line] == [
        "Message 1.",
        "Otherwise: Message 2.",
        "Message 3.",
    ]


def test_the_table_tells_it_from_a_completion_that_was_cut_off(config: Config, pool: RewardPool, clock: Clock) -> None:
    groups, _ = talk(config, pool, clock.says)
    table = GroupTable.of(list(groups.values()), 0)
    assert table.flagged(LATE).all() and not table.flagged(TRUNCATED).any()
    assert GroupTable.from_bytes(table.to_bytes()).flagged(LATE).all()
