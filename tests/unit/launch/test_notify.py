"""Messages about runs, sent by apprise to a receiver on this machine. Takes about a minute.

Real launchers watch a small script that stands where the worker is. It would catch a message that is not sent, or sent
for an attempt that others follow, an end that waits for a receiver, and an address that is written down.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from gspo_hpc.config import loader
from gspo_hpc.launch.notify.notices import Notices
from gspo_hpc.runs.directory import RunDir, open_run
from tests.unit.launch.test_local import LAUNCHER, ROOT, make_config

SECRET = "S3CRET"  # in the path of the address, as services have it
WORKER = """
import json, os, sys
from gspo_hpc.runs.directory import RunDir

run, end = RunDir(sys.argv[3]), sys.argv[1]
os.dup2(os.open(run.path / "attempts/0001/rank-0.log", os.O_WRONLY | os.O_CREAT), 2)
for step in range(1, 5):
    empty = {"empty": 1} if (end == "empty" and step > 2) or (end == "half" and step % 2 == 0) else {}
    run.append_metrics({"step": step, "rollout": (step - 1) // 2, "reward": step / 4, "eval/accuracy": 0.5} | empty)
if end == "gap":
    raise RuntimeError("GapMismatch: engine and trainer disagree on the tokens of a rollout")
sys.exit({"fails": 1, "stops": 75}.get(end, 0))
"""


class Receiver(ThreadingHTTPServer):
    """A service to which apprise posts JSON; one that hangs takes a request and does not answer."""

    daemon_threads = True

    def __init__(self, hangs: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hangs, self.asked = hangs, threading.Event()
        self.messages: list[dict[str, Any]] = []
        self.address = f"json://127.0.0.1:{self.server_port}/{SECRET}"

    def __enter__(self) -> Receiver:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = cast(Receiver, self.server)
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path.strip("/") == SECRET
        server.asked.set()
        if server.hangs:
            time.sleep(100)
        server.messages.append(message)
        with contextlib.suppress(ConnectionError):
            self.send_response(200)
            self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: stderr belongs to the tests."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        yield server


def run(folder: Path, end: str, address: str | None, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of one rank that ends so; the address of its messages is in the variable NOTES."""
    patience = "notify.timeout=60"  # a machine may be slow to import apprise
    config = make_config(folder, "notify.urls=[env:NOTES]", patience, *overrides, ranks=1)
    (folder / "config.yaml").write_text(loader.dump(config))
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-c", LAUNCHER, str(folder / "config.yaml"), sys.executable, str(folder / "worker.py")]
    own = os.environ | {"PYTHONPATH": str(ROOT)} | ({} if address is None else {"NOTES": address})
    return subprocess.run([*command, end], cwd=ROOT, env=own, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("end", "titles"),
    [
        ("done", ["is done"]),
        ("fails", ["failed"]),
        ("stops", []),
        ("gap", ["stopped: engine and trainer disagree"]),
        ("empty", ["is done", "learns nothing"]),
        ("half", ["is done"]),  # each rollout has an update with a signal
    ],
)
def test_what_is_told(end: str, titles: list[str], receiver: Receiver, tmp_path: Path) -> None:
    done = run(tmp_path, end, receiver.address)
    got = {message["title"]: message["message"] for message in receiver.messages}
    assert sorted(got) == [f"gspo-hpc: run {title}" for title in sorted(titles)], done.stderr
    assert len(receiver.messages) == len(titles)
    for text in got.values():
        assert "step 4 of 4, reward 1.000, accuracy 0.500" in text and str(tmp_path / "r") in text
    if end == "fails":
        assert "rank 0 ended with exit code 1" in got["gspo-hpc: run failed"]
    if end == "empty":
        assert "steps 3 to 4: all completions of each group had the same reward" in got["gspo-hpc: run learns nothing"]
    assert SECRET not in done.stdout + done.stderr
    for path in (tmp_path / "r").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_receiver_that_hangs_delays_no_end(tmp_path: Path) -> None:
    """The attempt is recorded while it hangs, and the launcher ends although nothing was answered."""
    with Receiver(hangs=True) as receiver:
        done = run(tmp_path, "done", receiver.address, "notify.timeout=3")
        assert receiver.asked.is_set() and receiver.messages == []
    assert done.returncode == 0, done.stderr
    (attempt,) = RunDir(tmp_path / "r").read_attempts()
    assert attempt["reason"] == "done"
    assert "notification was not delivered" in done.stderr and SECRET not in done.stderr


def test_one_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    with Receiver() as receiver:
        address = receiver.address
    done = run(tmp_path, "empty", address)
    assert done.returncode == 0
    assert done.stderr.count("a notification was not delivered to 1 of 1 services") == 1 and SECRET not in done.stderr


def test_only_chosen_events_and_every_third_preemption(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES", receiver.address)
    config = make_config(tmp_path, "notify.urls=[env:NOTES]", "notify.events=[preempted]", ranks=1)
    made, _ = open_run(config)
    said: list[str] = []
    with Notices(config, made, said.append) as notices:
        for number in range(7):
            attempt = made.new_attempt(config)
            attempt.finish("preempted", 75)
            notices.ended("preempted", "")
            if number == 1:
                made.new_attempt(config).finish("time limit", 75)  # no preemption
        notices.ended("failed", "GapMismatch")
        notices.over(1)
    assert said == []
    assert [message["title"] for message in receiver.messages] == ["gspo-hpc: run was preempted"] * 2
    assert [message["message"].split()[0] for message in receiver.messages] == ["3", "6"]


def test_addresses_that_are_not_there_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "done", None)
    assert done.returncode != 0 and not (tmp_path / "r").exists()
    assert "notify.urls: env:NOTES: the variable NOTES is not set: export it in the shell that starts" in done.stderr
    path = tmp_path / "addresses"
    path.write_text("# mine\njson://127.0.0.1:1/x\n")
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"others may read the file \(mode 644\): chmod 600"):
        loader_checks(tmp_path, f"file:{path}")
    path.chmod(0o600)
    loader_checks(tmp_path, f"file:{path}")
    with pytest.raises(ValueError, match="file:nowhere: No such file"):
        loader_checks(tmp_path, "file:nowhere")


def loader_checks(folder: Path, place: str) -> None:
    """What refuses a run before it starts."""
    from gspo_hpc.launch.checks import require

    require(make_config(folder, f"notify.urls=[{place}]", ranks=1))


def test_an_address_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must say where an address stands, for it may hold a password: env:NAME"):
        make_config(tmp_path, "notify.urls=[https://user:pw@host]", ranks=1)
