"""When an attempt is ended from outside, and for whose fault: silence, hangs, slow starts. About 10 seconds.

It would catch a watchdog that ends a run because one rank loads, hashes or imports for a long time, or because an image
is fetched, and one that names another rank or another reason than the first failure.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.launch import watch
from gspo_hpc.system import progress
from gspo_hpc.system.control import RankState, Server

CONFIG = loader.from_dict({"cluster": {"gpus_per_node": 2}})  # hang_timeout 900, heartbeat_timeout 30
MINUTES = 60.0


def rank(
    number: int, *, at: float = 0.0, phase: str = "update", excuse: str | None = None, outcome: str | None = None
) -> RankState:
    """A rank that was heard of a moment before `now`, and that last moved on, or ended, at `at`."""
    state = RankState(number, f"n{number + 1}", 100 + number, "7.0", 1e9, at, phase=phase, excuse=excuse)
    state.outcome, state.ended_at = outcome, at
    return state


def problem(*states: RankState, now: float, config: Config = CONFIG) -> str | None:
    """Return what is wrong `now`, seconds after the start."""
    return watch.problem({s.rank: s for s in states}, config, now, 0.0, lambda number: f"n{number + 1}")


def test_a_rank_that_stands_still_hangs_and_the_one_that_moves_is_not_named() -> None:
    assert problem(rank(0, at=2000.0), rank(1, at=1200.0), now=2000.0) is None
    found = problem(rank(0, at=2000.0), rank(1, at=1000.0), now=2000.0)
    assert found == "rank 1 on n2 hangs in 'update' for 900 s (faults.hang_timeout)"


@pytest.mark.parametrize(
    ("phase", "excuse", "patience"),
    [
        ("update", None, 30.0),
        ("update", progress.WAITS, 30.0),
        (progress.STARTED, None, 5 * MINUTES),
        ("loading", progress.LIMITED, 5 * MINUTES),
    ],
)
def test_only_a_rank_that_imports_or_has_a_limit_of_its_own_may_be_silent_for_long(
    phase: str, excuse: str | None, patience: float
) -> None:
    silent = rank(0, at=0.0, phase=phase, excuse=excuse)
    silent.heard_at = 0.0
    assert problem(silent, rank(1), now=patience) is None
    found = problem(silent, rank(1), now=patience + 0.1)
    assert found is not None and found.startswith(f"rank 0 on n1 has not been heard of for {patience:.0f} s")


@pytest.mark.parametrize(("timeout", "patience"), [(30.0, 5 * MINUTES), (10 * MINUTES, 10 * MINUTES)])
def test_a_rank_that_imports_may_be_silent_for_as_long_as_one_that_trains(timeout: float, patience: float) -> None:
    """Who gives ranks ten minutes gives them also to those that start, which are slower."""
    config = loader.with_settings(CONFIG, [f"faults.heartbeat_timeout={timeout:g}", "faults.hang_timeout=9000"])
    silent = rank(0, at=0.0, phase=progress.STARTED)
    silent.heard_at = 0.0
    assert problem(silent, rank(1), now=patience, config=config) is None
    found = problem(silent, rank(1), now=patience + 0.1, config=config)
    assert found is not None and found.startswith(f"rank 0 on n1 has not been heard of for {patience:.0f} s")
    assert found.endswith("(faults.heartbeat_timeout)") == (timeout == patience)


def test_who_waits_for_a_rank_that_works_for_twenty_minutes_does_not_hang() -> None:
    waits = rank(0, at=0.0, phase="joined", excuse=progress.WAITS)
    assert problem(waits, rank(1, at=20 * MINUTES, phase="loading"), now=20 * MINUTES) is None
    assert problem(waits, rank(1, at=0.0, phase="loading", excuse=progress.LIMITED), now=20 * MINUTES) is None


def test_the_rank_that_is_waited_for_is_the_one_that_hangs() -> None:
    waits = rank(0, at=0.0, phase="joined", excuse=progress.WAITS)
    found = problem(waits, rank(1, at=MINUTES, phase="loading"), now=20 * MINUTES)
    assert found is not None and found.startswith("rank 1 on n2 hangs in 'loading'")


def test_ranks_that_all_wait_for_each_other_hang() -> None:
    both = [rank(number, at=0.0, phase="joined", excuse=progress.WAITS) for number in (0, 1)]
    assert problem(*both, now=10 * MINUTES) is None
    found = problem(*both, now=20 * MINUTES)
    assert found is not None and found.startswith("rank 0 on n1 hangs in 'joined'")


def test_a_rank_that_waits_for_a_moment_is_in_no_deadlock() -> None:
    """It has just finished the last group, and the reports of those that waited for it are a second old."""
    stale = rank(0, at=0.0, phase="generate", excuse=progress.WAITS)
    fresh = rank(1, at=20 * MINUTES - 0.1, phase="generate", excuse=progress.WAITS)
    assert problem(stale, fresh, now=20 * MINUTES) is None


def test_a_rank_moves_before_it_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a heartbeat between the two would tell of a rank that stands still without an excuse."""
    seen: list[str | None] = []
    monkeypatch.setattr(progress, "mark", lambda: seen.append(progress.marks()[2]))
    with progress.waiting():
        pass
    assert seen == [progress.WAITS] and progress.marks()[2] is None


def test_a_container_has_time_to_fetch_its_image() -> None:
    container = {"kind": "pyxis", "image": "nvcr.io#team/gspo:1"}
    boxed = loader.from_dict({"cluster": {"gpus_per_node": 2}, "slurm": {"container": container}})
    given = loader.from_dict({"cluster": {"gpus_per_node": 2}, "faults": {"bringup_timeout": 10}})
    first = rank(0, phase=progress.STARTED, excuse=progress.WAITS)  # on a node that has the image
    assert problem(first, now=61.0) == "not up within 60 s: rank 1 on n2 (faults.bringup_timeout)"
    assert problem(first, now=20 * MINUTES, config=boxed) is None
    assert problem(now=31 * MINUTES, config=boxed) == (
        "not up within 1800 s: rank 0 on n1, rank 1 on n2 (faults.bringup_timeout)"
    )
    assert problem(first, now=11.0, config=given) == "not up within 10 s: rank 1 on n2 (faults.bringup_timeout)"


def test_a_step_that_does_not_end_after_an_error_is_ended_with_that_error() -> None:
    """srun waits for the others, which are in a collective that the failed rank left."""
    failed = rank(1, at=100.0, outcome="failed")
    failed.detail = "RuntimeError: the planted one"
    late = rank(0, at=101.0, outcome="failed")
    late.detail = "DistBackendError: NCCL timeout"
    assert problem(late, failed, now=100.0 + watch.LINGER) is None
    assert problem(late, failed, now=101.0 + watch.LINGER) == "rank 1 on n2: RuntimeError: the planted one"


def test_who_waited_for_a_rank_that_has_just_ended_is_in_no_deadlock() -> None:
    """Its next heartbeat says that it moves on again."""
    waits = rank(0, at=0.0, phase="save", excuse=progress.WAITS)
    done = rank(1, at=20 * MINUTES, outcome="done")
    assert problem(waits, done, now=20 * MINUTES + 0.5) is None
    assert "rank 0 on" in str(problem(waits, done, now=36 * MINUTES)), "nobody is left to wait for"


def test_a_rank_that_is_lost_with_its_node_is_told_as_before() -> None:
    lost = rank(1, at=100.0)
    lost.lost, lost.ended_at = True, 100.0
    late = rank(0, at=101.0, outcome="failed")
    late.detail = "RuntimeError: [gloo] Connection closed by peer"
    assert problem(late, lost, now=115.0) == "rank 1 on n2 has gone and its step has not"


RANK = """
import ctypes, os, sys
from gspo_hpc.system.control import Client
from gspo_hpc.system.progress import mark

host, token, phase = sys.argv[1:]
client = Client(host, token, 0, 1, node="n1", on_stop=lambda reason: None, signal_name=lambda: None)
if phase:
    mark(phase)
    import time
    time.sleep(1.5)  # a heartbeat tells of it
print("holds the lock", flush=True)
ctypes.PyDLL(None).sleep(30)  # as an import does that loads a large library from a slow disk: no thread runs
"""


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server("127.0.0.1", 1)
    yield one
    one.close()


@pytest.mark.parametrize("phase", ["", "joined"])
def test_a_rank_that_imports_may_be_silent_for_longer(server: Server, phase: str) -> None:
    """A real rank whose threads stand still, because one holds the interpreter's lock."""
    address, token = server.environment().values()
    config = loader.from_dict({"faults": {"heartbeat_timeout": 2}})
    process = subprocess.Popen([sys.executable, "-c", RANK, address, token, phase], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        while 0 not in server.ranks or server.ranks[0].phase != (phase or progress.STARTED):
            server.poll(0.1)
        assert process.stdout.readline() == b"holds the lock\n"
        began = time.monotonic()
        found = None
        while found is None and time.monotonic() - server.ranks[0].heard_at < 4.0:
            server.poll(0.1)
            found = watch.problem(server.ranks, config, time.monotonic(), began, str)
        expected = "rank 0 on n1 has not been heard of for 2 s (faults.heartbeat_timeout)" if phase else None
        assert found == expected
        if not phase:
            later = server.ranks[0].heard_at + watch.COLD + 1
            found = watch.problem(server.ranks, config, later, began, str)
            assert found == f"rank 0 on n1 has not been heard of for {watch.COLD:.0f} s"
    finally:
        process.kill()
        process.wait()
