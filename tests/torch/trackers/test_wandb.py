"""W&B as it really runs: with a server that is killed with the run, fails or hangs, and with a helper that hangs.

Takes about a minute. It would catch steps that wait for W&B, steps that are lost or sent twice where attempts go
online, offline and online again, an import of W&B Launch, and settings that `doctor` reads differently.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.reading import wandb_account
from gspo_hpc.runs.directory import RunDir
from tests.torch.trackers import stores
from tests.torch.trackers.test_once import environment, make_run, sync
from tests.wandb_server import WandbServer

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.trackers import feed, registry
from gspo_hpc.trackers.services import wandb

wandb.INIT_SECONDS = 2.0
wandb.FINISH_SECONDS = float(os.environ.get("FINISH", "2"))
feed.CLOSE_SECONDS = float(os.environ.get("CLOSE", "60"))
run, first, last, end = RunDir(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = run.load_config()
told = []
feeds = feed.Feeds(
    registry.chosen(config.tracking), registry.tracked_run(run, config),
    warn=lambda text: print("WARN " + text, flush=True), announce=told.append,
)
def core():
    children = " ".join(p.read_text() for p in Path("/proc/self/task").glob("*/children")).split()
    return [int(p) for p in children if Path(f"/proc/{p}/comm").read_text().strip() == "wandb-core"]
def log(step):
    run.append_metrics({"step": step, "reward": step / 4} | {f"k{i}": 0.5 for i in range(60)})
    feeds.wake()
if end == "hang":
    log(first)
    while not told:
        time.sleep(0.02)
    os.kill(core()[0], signal.SIGSTOP)
    first += 1
for step in range(first, last + 1):
    log(step)
if end == "kill":
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
feeds.close(0)
assert "wandb.sdk.launch" not in sys.modules, "in a rank the import of W&B Launch takes a second"
print("CLOSED", flush=True)
"""


def start(run: RunDir, first: int, last: int, end: str = "close", **variables: str) -> subprocess.Popen[str]:
    """A process that logs steps first..last; with "kill" it then waits for a line, and kills itself."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run.path), str(first), str(last), end],
        env=environment(run, **variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def attempt(run: RunDir, first: int, last: int, end: str = "close", **variables: str) -> list[str]:
    """The warnings of such a process, which came to its end."""
    process = start(run, first, last, end, **variables)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "CLOSED" in out, errors
    return [line.removeprefix("WARN ") for line in out.splitlines() if line.startswith("WARN ")]


def steps(run: RunDir) -> list[int]:
    """The steps in the offline files."""
    return [row["_step"] for row in stores.wandb_history(run.path, run.read_info()["run_id"])]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with W&B."""
    return make_run(tmp_path / "run", {})


def test_attempts_online_and_offline_are_one_run_on_the_server(run: RunDir) -> None:
    """Killed online; then the server is down, and the attempt logs offline; `sync` sends what is missing; then online
    again."""
    with WandbServer() as server:
        own = server.environment()
        run_id = run.read_info()["run_id"]
        first = start(run, 0, 4, "kill", **own)
        deadline = time.monotonic() + 60
        while len(server.rows(run_id)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        first.communicate("now\n", timeout=60)
        assert first.returncode == -signal.SIGKILL and 3 <= len(server.rows(run_id)) <= 5

        server.behaviour = "error"
        (warning,) = attempt(run, 5, 7, **own)
        assert "W&B does not answer" in warning and "gspo-hpc sync" in warning
        server.behaviour = "ok"
        done = sync(run, **own)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [row["_step"] for row in server.rows(run_id)] == list(range(8))
        assert "nothing to send, it has everything up to step 7" in sync(run, **own).stdout
        assert attempt(run, 8, 9, FINISH="30", **own) == []
        assert server.run_ids() == {run_id}
        rows = server.rows(run_id)
        assert [row["_step"] for row in rows] == list(range(10))
        assert [row["reward"] for row in rows] == [step / 4 for step in range(10)]


def test_sync_says_what_is_missing(run: RunDir) -> None:
    run.append_metrics({"step": 1, "reward": 0.5})
    done = sync(run)
    assert done.returncode == 2 and "W&B has no key: set WANDB_API_KEY or run `wandb login`" in done.stderr
    assert "error: there is no tracker that anything could be sent to" in done.stderr
    done = sync(run, "tracking.tensorboard=true")
    assert done.returncode == 0 and "sent 1 record" in done.stdout, "auto without a key is no reason to fail"
    done = sync(run, "tracking.wandb=online", "tracking.tensorboard=true")
    assert done.returncode == 1 and "error: W&B: W&B has no key" in done.stderr
    with WandbServer() as server:
        server.behaviour = "error"
        done = sync(run, **server.environment())
    assert done.returncode == 1 and "error: W&B: W&B does not answer" in done.stderr and "Traceback" not in done.stderr


class _Server(BaseHTTPRequestHandler):
    hang = False
    asked = 0

    def answer(self) -> None:
        type(self).asked += 1
        if type(self).hang:
            time.sleep(60)
        self.send_response(500)
        self.end_headers()

    do_GET = do_POST = do_PUT = answer

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("hang", [False, True])
def test_a_server_that_fails_costs_no_time_and_no_step(hang: bool, run: RunDir) -> None:
    handler = type("Handler", (_Server,), {"hang": hang, "asked": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "*"}
    try:
        (warning,) = attempt(run, 1, 50, WANDB_API_KEY="0123456789abcdef" * 2 + "01234567", **address)
    finally:
        server.shutdown()
    assert handler.asked > 0  # type: ignore[attr-defined]
    assert "gspo-hpc sync" in warning
    assert steps(run) == list(range(1, 51))
    for path in run.path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"0123456789abcdef0123" not in path.read_bytes(), path


def test_a_hanging_helper_process_neither_stops_the_steps_nor_the_end(run: RunDir) -> None:
    """All steps are logged while it hangs, and the process ends although it still does."""
    (warning,) = attempt(run, 1, 600, "hang", CLOSE="2")
    assert "W&B did not finish within 2 s" in warning and "gspo-hpc sync" in warning
    assert [record["step"] for record in run.read_metrics()] == list(range(1, 601))


def test_a_tracker_that_cannot_start_is_left_with_one_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"wandb": "disabled", "tensorboard": True})
    (run.path / "tensorboard").write_text("in the way")
    (warning,) = attempt(run, 1, 3)
    assert "TensorBoard did not start (" in warning and f"`gspo-hpc sync {run.path}` sends what is missing" in warning


@pytest.mark.parametrize(
    ("own", "server"),
    [
        ("wandb", "http://folder.example"),
        (".wandb", "http://folder.example"),
        ("variable", "http://variable.example"),
        ("nothing", "http://user.example:8080"),
    ],
)
def test_doctor_reads_the_settings_that_wandb_takes(
    own: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same server, and a key in the same cases: from the folder's file before the user's, and the environment."""
    user, folder, key = tmp_path / "user", tmp_path / "folder", "0123456789" * 4
    for place, name in ((user, "user.example:8080"), (folder / own, "folder.example")):
        place.mkdir(parents=True)
        (place / "settings").write_text(f"[default]\nbase_url = http://{name}\napi_key = {key * (place != user)}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_CONFIG_DIR": str(user), "WANDB_DIR": str(user), "NETRC": str(tmp_path / "netrc")}
    environment |= {"WANDB_BASE_URL": server, "WANDB_API_KEY": key} if own == "variable" else {}
    monkeypatch.chdir(folder)
    code = (
        "import json, wandb; from gspo_hpc.trackers.services.wandb import _has_key;"
        "print(json.dumps([wandb.setup().settings.base_url, _has_key(wandb)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    given = wandb_account.settings(environment)
    found = wandb_account.server(environment, given)
    has_key = bool(wandb_account.key_source(found, environment, given))
    assert json.loads(done.stdout.splitlines()[-1]) == [found, has_key] == [server, own != "nothing"]
