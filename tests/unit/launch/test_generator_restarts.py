"""Which deaths of ranks start those that generate again, with real processes that sleep.

It takes a second. It would catch a restart after an error that would come again, after a trainer's death or end, beyond
the limit, or of half of the ranks, and ranks that are not told how often it has happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.rank_process import GeneratorRestarts, RankProcess, end_all
from gspo_hpc.system.environment import GENERATOR_DEATHS

LIMIT = 2


def server(**more: object) -> Config:
    cluster = {"gpus_per_node": 4, "platform": "cpu"}
    rollout = {"mode": "server", "engines_per_node": 2}
    return from_dict({"rollout": rollout, "cluster": cluster, "faults": {"max_engine_restarts": LIMIT}, **more})


class Ranks:
    """Two ranks that train and two that generate."""

    def __init__(self, config: Config) -> None:
        self.said: list[str] = []
        self.every = [self.start(number, {}) for number in range(4)]
        self._restarts = GeneratorRestarts(config, self.every, self.start, 5.0)

    def start(self, number: int, more: Mapping[str, str]) -> RankProcess:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        return RankProcess(number, command, more, None)

    def pids(self) -> list[int]:
        return [rank._process.pid for rank in self.every]

    def end(self, *numbers: int, by: int = signal.SIGKILL) -> dict[int, int]:
        """End ranks, and return their exit codes."""
        for number in numbers:
            self.every[number].send(by)
        while any(self.every[number].exit_code() is None for number in numbers):
            time.sleep(0.01)
        return {number: self.every[number].exit_code() or 0 for number in numbers}

    def make(self, failed: Mapping[int, int]) -> bool:
        return self._restarts.make(min(failed), failed, self.said.append)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(server())
    yield made
    end_all(made.every, 5.0)


def test_all_that_generate_start_again_and_are_told_why(ranks: Ranks) -> None:
    before = ranks.pids()
    for count in range(1, LIMIT + 1):
        assert ranks.make(ranks.end(3))
        death = "rank 3, which generates, was killed by SIGKILL (by hand, or because memory ran out)"
        for rank in ranks.every[2:]:
            told = Path(f"/proc/{rank._process.pid}/environ").read_bytes().split(b"\0")
            own = next(one for one in told if one.startswith(GENERATOR_DEATHS.encode()))
            assert json.loads(own.split(b"=", 1)[1]) == [death] * count
    after = ranks.pids()
    assert after[:2] == before[:2] and not {*after[2:]} & {*before[2:]}
    assert not any(psutil.pid_exists(pid) for pid in before[2:])
    assert "restart 2 of at most 2" in ranks.said[-1]
    assert not ranks.make(ranks.end(3))
    assert "faults.max_engine_restarts 2" in ranks.said[-1] and ranks.pids() == after


@pytest.mark.parametrize(
    ("failed", "also"),
    [({3: 1}, None), ({0: -9}, None), ({1: -9, 3: -9}, None), ({3: -9}, 1)],
    ids=["an error", "a trainer", "one of each", "a trainer has ended"],
)
def test_other_failures_end_the_attempt(ranks: Ranks, failed: dict[int, int], also: int | None) -> None:
    if also is not None:
        ranks.end(also, by=signal.SIGTERM)
    before = ranks.pids()
    assert not ranks.make(failed)
    assert ranks.pids() == before and not ranks.said
    assert all(psutil.pid_exists(pid) for pid in before)


def test_in_colocate_mode_no_rank_starts_again() -> None:
    made = Ranks(from_dict({"cluster": {"gpus_per_node": 4, "platform": "cpu"}}))
    try:
        assert not made.make({3: -9})
    finally:
        end_all(made.every, 5.0)
    assert os.getpid() not in made.pids()
