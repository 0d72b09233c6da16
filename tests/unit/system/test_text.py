"""Durations, sizes, the nearest name, the end of a log and its last traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.system.text import duration, from_traceback, gib, in_gib, last_traceback, nearest, tail


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5s"), (59.6, "1m00s"), (725, "12m05s"), (3600, "1h00m"), (90000, "25h00m"), (360000, "4d04h"), (1e7, "115d")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes() -> None:
    assert (gib(1.5 * 2**30), gib(2**30 - 1), gib(12 * 2**20)) == ("1.5 GiB", "1,024 MiB", "12 MiB")
    assert (in_gib(1.25 * 2**30, 2), in_gib(2**28), in_gib(2000 * 2**30, 0)) == ("1.25", "0.2", "2000")


def test_the_nearest_name_is_one_that_is_like_it() -> None:
    names = ["batch.num_generations", "batch.micro_batch_size"]
    assert nearest("batch.num_generation", names) == "batch.num_generations"
    assert nearest("xyzzy", names) is None
    assert nearest("xyzzy", names, cutoff=0.0) in names
    assert nearest("batch.num_generation", names, cutoff=0.99) is None
    assert nearest("a", []) is None
    assert nearest("time", ["partition", "time_minutes", "mem"]) == "time_minutes"
    assert nearest("max", ["max_steps", "max_epochs"]) is None


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\n\xff two\n")
    assert tail(log, 100) == "one\n\ufffd two\n"
    assert tail(log, 4) == "two\n"
    assert tail(log, 100, begin=4) == "\ufffd two\n"
    with pytest.raises(FileNotFoundError):
        tail(tmp_path / "none", 1)


TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n{}\n'


def test_the_last_traceback_ends_with_its_error() -> None:
    text = "chatter\n" + TRACE.format("KeyError: 1") + "\nDuring handling:\n\n" + TRACE.format("ValueError: 2")
    assert last_traceback(text + "afterwards\n") == TRACE.format("ValueError: 2")
    assert last_traceback("all is well\n") is None
    assert last_traceback("(EngineCore) Traceback (most recent call last):\n(EngineCore)   File\n") is None


def test_a_child_that_was_being_started_as_its_parent_was_killed_is_no_error() -> None:
    """A supervisor ends a hanging rank, for one, that was about to replace a process of its rewards."""
    spawned = (
        'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n  File "s.py", line 1, in {}\n{}\n'
    )
    orphan = spawned.format("spawn_main", "EOFError: Ran out of input")
    assert last_traceback(orphan) is None
    assert last_traceback(TRACE.format("ValueError: 2") + orphan) == TRACE.format("ValueError: 2")
    for other in (spawned.format("spawn_main", "EOFError: 3"), spawned.format("read", "EOFError: Ran out of input")):
        assert last_traceback(other) == other


def test_a_log_from_its_last_traceback_on() -> None:
    head = "Traceback (most recent call last):\n"
    assert from_traceback(f"warning\n{head}  a\nnoise\n{head}  b\nerror: c\n") == f"{head}  b\nerror: c\n"
    assert from_traceback("no error\n") == "no error\n"
