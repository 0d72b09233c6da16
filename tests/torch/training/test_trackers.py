"""Weights & Biases and TensorBoard as they really run: offline, killed, with a server that fails or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.reading import wandb_account

pytest.importorskip("wandb")

BLOCK, HEADER = 32768, 7  # the framing of a .wandb file: blocks of chunks with checksum, length and kind

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from gspo_hpc.training.telemetry.trackers import tracker as tracking
from gspo_hpc.training.telemetry.trackers import wandb
from gspo_hpc.config.schema import Tracking

wandb.INIT_SECONDS = wandb.FINISH_SECONDS = 2.0
tracking.CLOSE_SECONDS = float(os.environ.get("CLOSE", "60"))
run, first, last, end, options = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
tracker = tracking.Tracker(
    Tracking(wandb="disabled" if "no_wandb" in options else "auto", tensorboard="tensorboard" in options),
    run, "run1d", "a name", {"model": {"path": "m"}, "rollout": {"engine": {"hf_token": "S3CRET"}}}, True,
    warn=lambda text: print("WARN " + text, flush=True),
)
def core():
    children = " ".join(p.read_text() for p in Path("/proc/self/task").glob("*/children")).split()
    return [int(p) for p in children if Path(f"/proc/{p}/comm").read_text().strip() == "wandb-core"]
if end == "hang":
    tracker.log({"step": first, "reward": 0.0})
    while not (run / "tracking.json").exists():
        time.sleep(0.02)
    os.kill(core()[0], signal.SIGSTOP)
    first += 1
start = time.monotonic()
for step in range(first, last + 1):
    tracker.log_samples([{"step": step, "phase": "train", "prompt": "p", "completion": "<b>\\ud800", "reward": 1.0,
                          "answer": {"api_key": "S3CRET", "answer": 3}}])
    tracker.log({"step": step, "reward": step / 4, "grad_norm": None, "skipped": 0, "note": "text"}
                | {f"k{i}": 0.5 for i in range(60)})
print("LOGGED", time.monotonic() - start, flush=True)
if end == "kill":
    while (tracking.read_last(run / "tracking.json").get("wandb") or 0) < last:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
tracker.close(0)
print("CLOSED", time.monotonic() - start, flush=True)
"""


def attempt(run: Path, first: int, last: int, end: str = "close", *options: str, **env: str) -> dict[str, Any]:
    """One process that logs steps first..last; what it said, and the seconds that logging and closing took."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    clean |= {"HOME": str(run), "NETRC": str(run / "no-netrc"), "OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run), str(first), str(last), end, *options],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return {
        "warnings": [rest for word, rest in lines if word == "WARN"],
        "logged": next((float(rest) for word, rest in lines if word == "LOGGED"), None),
        "closed": next((float(rest) for word, rest in lines if word == "CLOSED"), None),
        "errors": done.stderr,
    }


def chunks(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file; a torn last one is left out."""
    data, at, whole = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body = data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if len(body) < length or kind == 0:
            return
        whole = body if kind in (1, 2) else whole + body  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            yield whole


def history(run: Path) -> list[dict[str, Any]]:
    """All rows that are in the offline files of a run, in the order of the files."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made at import

    rows = []
    for path in sorted(run.glob("wandb/offline-run-*/run-run1d.wandb")):
        for chunk in chunks(path):
            record = Record.FromString(chunk)
            if record.WhichOneof("record_type") == "history":
                items = {
                    (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
                }
                rows.append(items)
    return rows


def test_a_killed_run_that_goes_on_is_one_run_with_each_step_once(tmp_path: Path) -> None:
    attempt(tmp_path, 1, 5, "kill")
    second = attempt(tmp_path, 4, 8)
    assert second["warnings"] == []
    files = sorted(tmp_path.glob("wandb/offline-run-*-run1d"))
    assert len(files) == 2
    rows = history(tmp_path)
    assert Counter(row["_step"] for row in rows) == Counter(range(1, 9))
    for row in rows:
        assert row["step"] == row["_step"] and row["reward"] == row["_step"] / 4 and row["skipped"] == 0
        assert "grad_norm" not in row and "note" not in row
        assert any("samples" in key for key in row)
    assert json.loads((tmp_path / "tracking.json").read_text()) == {"wandb": 8}
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))
    assert len(tables) == 8 and "<b>" in tables[0].read_text()
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"S3CRET" not in path.read_bytes(), path


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
def test_a_server_that_fails_costs_no_time_and_no_step(hang: bool, tmp_path: Path) -> None:
    handler = type("Handler", (_Server,), {"hang": hang, "asked": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        said = attempt(
            tmp_path,
            1,
            50,
            WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}",
            WANDB_API_KEY="0123456789abcdef" * 2 + "01234567",
            NO_PROXY="*",
        )
    finally:
        server.shutdown()
    assert handler.asked > 0  # type: ignore[attr-defined]
    assert said["logged"] < 1.0  # 50 steps
    assert len(said["warnings"]) == 1 and "wandb sync" in said["warnings"][0]
    assert [row["_step"] for row in history(tmp_path)] == list(range(1, 51))
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"0123456789abcdef0123" not in path.read_bytes(), path


def test_a_hanging_helper_process_neither_stops_the_steps_nor_the_end(tmp_path: Path) -> None:
    start = time.monotonic()
    said = attempt(tmp_path, 1, 600, "hang", CLOSE="2")
    assert said["logged"] < 1.0
    assert said["closed"] < 4.0
    assert "did not finish" in said["warnings"][0]
    assert time.monotonic() - start < 60  # the process came to its end


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    earlier = [{"step": 0, "reward": 0.0}, {"step": 1, "reward": 0.25}]  # of an attempt without this tracker
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in earlier))
    first = attempt(tmp_path, 1, 5, "close", "no_wandb", "tensorboard")
    second = attempt(tmp_path, 4, 8, "close", "no_wandb", "tensorboard")
    assert first["warnings"] == second["warnings"] == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("reward")] == [(step, step / 4) for step in range(9)]
    assert "grad_norm" not in events.Tags()["scalars"]
    assert json.loads((tmp_path / "tracking.json").read_text()) == {"tensorboard": 8}


def test_a_tracker_that_cannot_start_is_left_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    said = attempt(tmp_path, 1, 3, "close", "no_wandb", "tensorboard")
    assert said["logged"] < 1.0
    assert len(said["warnings"]) == 1 and "tensorboard did not start" in said["warnings"][0]


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
        "import json, wandb; from gspo_hpc.training.telemetry.trackers.wandb import _has_key;"
        "print(json.dumps([wandb.setup().settings.base_url, _has_key(wandb)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    given = wandb_account.settings(environment)
    found = wandb_account.server(environment, given)
    has_key = bool(wandb_account.key_source(found, environment, given))
    assert json.loads(done.stdout.splitlines()[-1]) == [found, has_key] == [server, own != "nothing"]
