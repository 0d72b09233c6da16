"""Observers of a user's own: whatever one does, the run that it watches goes on, and says once what happened.

Takes 4 s, mostly starts of Python. It would catch an observer whose error, exit or hang reaches the rank, one that
loses records although it is quick, and one that is called with something else than metrics.jsonl has.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.reading import own_code
from gspo_hpc.training.observers.process import WAITING, ObserverProcess

RECORDS: list[dict[str, Any]] = [{"step": step, "reward": step / 4, "loss": math.nan} for step in range(1, 41)]


def watched(folder: Path, body: str, records: list[dict[str, Any]], patience: float = 20.0) -> list[str]:
    """Give records to an observer with this file; return what the run was told."""
    (folder / "watch.py").write_text(body)
    told: list[str] = []
    process = ObserverProcess(f"{folder / 'watch.py'}:watch", folder, told.append)
    for record in records:
        process.give(record)
    process.close(patience)
    return [text.removeprefix(f"observer {folder / 'watch.py'}:watch ") for text in told]


def test_it_gets_every_record_in_order_and_the_run_directory(tmp_path: Path) -> None:
    body = """
import json
def watch(record, *, run_dir):
    with open(run_dir / "seen", "a") as file:
        file.write(json.dumps(record) + "\\n")
"""
    assert watched(tmp_path, body, RECORDS) == []
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert seen == [record | {"loss": None} for record in RECORDS]  # as metrics.jsonl has them


def test_a_long_record_arrives_whole(tmp_path: Path) -> None:
    body = "def watch(record, *, run_dir):\n    (run_dir / 'length').write_text(str(len(record['text'])))"
    assert watched(tmp_path, body, [{"step": 1, "text": "x" * (WAITING // 2)}]) == []
    assert (tmp_path / "length").read_text() == str(WAITING // 2)


GOES_ON = "; training goes on without regard to it"


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("def watch(record):\n    1 / 0", "failed at step 1: ZeroDivisionError: division by zero"),
        ("def watch(record):\n    raise SystemExit(3)", "failed at step 1: SystemExit: 3"),
        ("import no_such_module\ndef watch(record): ...", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("import os\ndef watch(record):\n    os._exit(3)", "ended its process with exit code 3"),
        ("import ctypes\ndef watch(record):\n    ctypes.string_at(0)", "ended its process with signal 11"),
        ("raise SystemExit\ndef watch(record): ...", "cannot be loaded: SystemExit"),
    ],
)
def test_a_failure_is_told_once(tmp_path: Path, body: str, failure: str) -> None:
    (text,) = watched(tmp_path, body, RECORDS)
    assert text.startswith(failure) and text.endswith(GOES_ON)


def test_it_is_called_again_after_a_failure(tmp_path: Path) -> None:
    body = """
def watch(record, *, run_dir):
    if record["step"] == 2:
        raise ValueError("two")
    with open(run_dir / "seen", "a") as file:
        file.write(f"{record['step']} ")
"""
    assert watched(tmp_path, body, RECORDS[:4]) == [f"failed at step 2: ValueError: two{GOES_ON}"]
    assert (tmp_path / "seen").read_text() == "1 3 4 "


def test_nobody_waits_for_one_that_hangs(tmp_path: Path) -> None:
    """Twice as much is given to it as can wait: what does not fit is dropped, and giving never blocks."""
    (tmp_path / "watch.py").write_text("import time\ndef watch(record):\n    time.sleep(1000)")
    told: list[str] = []
    process = ObserverProcess(f"{tmp_path / 'watch.py'}:watch", tmp_path, told.append)
    for step in range(1, 21):
        process.give({"step": step, "text": "x" * (WAITING // 10)})
    assert len(process._waiting) <= WAITING
    (text,) = told
    assert text.endswith(f"is too slow: it does not get every record{GOES_ON}")
    process.close(0.2)
    assert process._process.returncode == -9 and len(told) == 1


def test_one_that_hangs_with_little_to_read_is_ended_too(tmp_path: Path) -> None:
    (text,) = watched(tmp_path, "import time\ndef watch(record):\n    time.sleep(1000)", RECORDS[:1], patience=0.5)
    assert text == f"did not end within 0.5 s of the last record, and was ended{GOES_ON}"


def test_signals_of_a_job_do_not_end_it(tmp_path: Path) -> None:
    body = """
def watch(record, *, run_dir):
    (run_dir / f"seen-{record['step']}").touch()
"""
    (tmp_path / "watch.py").write_text(body)
    told: list[str] = []
    process = ObserverProcess(f"{tmp_path / 'watch.py'}:watch", tmp_path, told.append)
    process.give({"step": 1})
    wait_for((tmp_path / "seen-1").exists)
    process._process.terminate()
    process.give({"step": 2})
    process.close(20.0)
    assert (tmp_path / "seen-2").exists() and told == []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("watch.py", "an observer of your own must be given as path/to/file.py:function"),
        ("gone.py:watch", "gone.py is not there"),
        ("watch.py:wach", "has no function 'wach' at its top level; nearest: watch"),
        ("watch.py:needs_more", "cannot be called: missing a required argument: 'more'"),
        ("watch.py:takes_none", "cannot be called: too many positional arguments"),
    ],
)
def test_what_cannot_be_called_is_refused_without_running_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, mistake: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("watch.py").write_text(
        "open('ran', 'w')\ndef watch(record): ...\ndef needs_more(record, more): ...\ndef takes_none(): ...\n"
        "def named(record, *, run_dir): ...\n"
    )
    with pytest.raises(ValueError, match=re.escape(mistake)):
        own_code.check_observer(text)
    for name in ("watch", "named"):
        own_code.check_observer(f"watch.py:{name}")
    assert not Path("ran").exists()
