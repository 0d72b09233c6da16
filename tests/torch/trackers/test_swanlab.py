"""SwanLab with a server: attempts online and offline are one run, and `sync` sends what is missing.

Takes about half a minute. It would catch numbers that are lost or sent twice, a server that keeps `sync` from ending,
and a key that is written down.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspo_hpc.runs.directory import RunDir
from tests.swanlab_server import API_KEY, SwanlabServer
from tests.torch.trackers.stores import by_step
from tests.torch.trackers.test_once import environment, expected, make_run, sync

STEPS = 12
TRACKING = {"wandb": "disabled", "swanlab": "online"}


def attempt(run: RunDir, steps: int, server: SwanlabServer) -> subprocess.Popen[str]:
    """An attempt that goes on to so many steps, online."""
    command = [sys.executable, "-m", "tests.torch.trackers.attempt", str(run.path), str(steps)]
    own = environment(run, **server.environment())
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_there_once(run: RunDir, server: SwanlabServer) -> None:
    rows = by_step(server.points[run.read_info()["run_id"]])
    assert sorted(step for step, _ in rows) == list(range(STEPS))
    for step, values in rows:
        assert values == pytest.approx(expected(step, "step", "time"), rel=1e-6)


def test_a_killed_run_is_one_run_on_the_server(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TRACKING)
    with SwanlabServer() as server:
        killed, deadline = attempt(run, STEPS, server), time.monotonic() + 60
        while len(server.points[run.read_info()["run_id"]]) < 30 and time.monotonic() < deadline:
            time.sleep(0.02)
        killed.kill()
        killed.communicate()
        assert killed.returncode == -signal.SIGKILL
        last = attempt(run, STEPS, server)
        out, errors = last.communicate(timeout=120)
        assert last.returncode == 0 and "WARN" not in out, out + errors
        assert f"tracker: SwanLab: {server.url}/" in out
        assert_there_once(run, server)
        assert server.states == {run.read_info()["run_id"]: "FINISHED"}
    for path in run.path.rglob("*"):
        assert not path.is_file() or API_KEY.encode() not in path.read_bytes(), path


def test_what_was_offline_is_sent_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TRACKING | {"swanlab": "offline"})
    with SwanlabServer() as server:
        attempt(run, STEPS, server).communicate(timeout=120)
        assert server.points == {} and list(run.path.glob("swanlab/run-*"))
        assert f"sent {STEPS} records" in sync(run, **server.environment()).stdout
        assert "nothing to send" in sync(run, **server.environment()).stdout
        assert_there_once(run, server)


def test_a_server_that_fails_later_ends_sync(tmp_path: Path) -> None:
    """It is away once the run is open: what it did not take is said, and sent by the next call."""
    run = make_run(tmp_path / "run", TRACKING)
    (run.path / "metrics.jsonl").write_text('{"step": 0, "time": 1.7e9, "reward": 0.5}\n')
    code = (
        "import sys, urllib.request; from gspo_hpc.trackers import sync, reader; sync.CLOSE_SECONDS = 2.0\n"
        "read = reader.MetricsReader.read\n"
        "def later(self):\n"
        "    reader.MetricsReader.read = read\n"
        "    urllib.request.urlopen(sys.argv[2])\n"
        "    return read(self)\n"
        "reader.MetricsReader.read = later\n"
        "from gspo_hpc.cli.main import main; sys.exit(main(['sync', sys.argv[1]]))"
    )
    with SwanlabServer() as server:
        own = environment(run, **server.environment())
        command = [sys.executable, "-c", code, str(run.path), f"{server.url}/fail"]
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1, done.stderr
        assert "SwanLab: it did not take everything within 2 s; the same command sends the rest" in done.stderr
        server.fails = False
        assert "sent 1 record, steps 0 to 0" in sync(run, **server.environment()).stdout
