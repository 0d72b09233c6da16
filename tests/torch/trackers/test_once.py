"""Each step is in each tracker exactly once, with the numbers of metrics.jsonl, whatever is killed when.

Real libraries write to real stores, which are read back. Takes about a minute. It would catch a record that is lost or
sent twice around a kill, an attempt that becomes a run of its own, a number that is changed on its way, and a secret.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.runs.directory import RunDir, open_run
from tests.torch.trackers import stores
from tests.torch.trackers.attempt import record
from tests.unit.house.test_bare import HOOK, MAIN
from tests.wandb_server import API_KEY, WandbServer

STEPS, KILLS = 30, 4
TRACKING = {"wandb": "offline", "tensorboard": True, "mlflow": True, "trackio": True, "swanlab": "offline"}


def make_run(folder: Path, tracking: dict[str, object]) -> RunDir:
    """A run without attempts; its config holds a secret."""
    engine = {"hf_token": "S3CRET"}
    run, _ = open_run(
        from_dict({"run": {"dir": str(folder), "name": "a-name"}, "tracking": tracking, "rollout": {"engine": engine}})
    )
    return run


def environment(run: RunDir, **variables: str) -> dict[str, str]:
    """The variables of this process without anybody's accounts."""
    private = ("WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(private)}
    home = {"HOME": str(run.path), "NETRC": str(run.path / "no-netrc"), "TRACKIO_DIR": str(run.path / "trackio")}
    return clean | home | {"OMP_NUM_THREADS": "1"} | variables


def sync(run: RunDir, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`gspo-hpc sync` of a run."""
    command = [sys.executable, "-m", "gspo_hpc", "sync", str(run.path), *overrides]
    return subprocess.run(command, env=environment(run, **variables), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunDir, str]]:
    """A run with all trackers, ended after several kills; and what its last attempt said."""
    run = make_run(tmp_path_factory.mktemp("trackers") / "run", TRACKING)
    command = [sys.executable, "-m", "tests.torch.trackers.attempt", str(run.path), str(STEPS)]
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # shown where a test fails
    delays = random.Random(seed)
    for kill in range(KILLS):
        process = subprocess.Popen(command, env=environment(run), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(len(TRACKING) if kill % 2 else delays.randrange(len(TRACKING))):  # so many trackers are open
            process.stdout.readline()
        time.sleep(delays.random() * 1.5)
        process.kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
    done = subprocess.run(command, env=environment(run), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    yield run, done.stdout


def expected(step: int, *left_out: str) -> dict[str, float]:
    """The numbers of a record."""
    return {key: one for key, one in record(step).items() if isinstance(one, (int, float)) and key not in left_out}


@pytest.mark.parametrize("name", stores.READERS)
def test_every_step_is_there_once(killed: tuple[RunDir, str], name: str) -> None:
    run, said = killed
    assert "WARN" not in said and said.endswith("ENDED\n")
    rows = stores.READERS[name](run.path, run.read_info()["run_id"])
    assert sorted(step for step, _ in rows) == list(range(STEPS))
    assert [one["step"] for one in run.read_metrics()] == list(range(STEPS))
    for step, values in rows:
        assert values == pytest.approx(expected(step, *(() if name == "W&B" else ("step", "time"))), rel=1e-6)


def test_what_was_killed_is_one_run(killed: tuple[RunDir, str]) -> None:
    """The readers assert it of MLflow and Trackio; the files of the others carry the id."""
    run, _ = killed
    run_id = run.read_info()["run_id"]
    assert KILLS // 2 < len(list(run.path.glob("attempts/*"))) <= KILLS + 1  # some may be killed before they begin
    for pattern in ("wandb/offline-run-*", "swanlab/run-*"):
        folders = list(run.path.glob(pattern))
        assert folders and {path.name.rsplit("-", 1)[1] for path in folders} == {run_id}


def test_no_secret_is_written(killed: tuple[RunDir, str]) -> None:
    run, _ = killed
    own = {run.config, run.samples, *(path for path in run.path.glob("attempts/*/config.yaml"))}
    read = [path for path in run.path.rglob("*") if path.is_file() and not path.is_symlink() and path not in own]
    assert len(read) > 20
    for path in read:
        assert b"S3CRET" not in path.read_bytes(), path


def test_samples_go_with_their_step(killed: tuple[RunDir, str]) -> None:
    run, _ = killed
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    for row in stores.wandb_history(run.path, run.read_info()["run_id"]):
        assert any("samples" in key for key in row), row
    tables = list(run.path.glob("wandb/offline-run-*/files/media/table/*.json"))
    assert tables and all(len(json.loads(path.read_text())["data"]) == 2 for path in tables)
    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={TENSORS: 0})
    events.Reload()
    assert [one.step for one in events.Tensors("samples/train/text_summary")] == list(range(STEPS))


def test_sync_has_nothing_to_send(killed: tuple[RunDir, str]) -> None:
    """W&B's server, which has seen nothing of the run, gets all of it, once; all others have it already."""
    run, _ = killed
    with WandbServer() as server:
        for sent in (True, False):
            done = sync(run, "tracking.swanlab=disabled", **server.environment())
            assert done.returncode == 0, done.stdout + done.stderr
            lines = {line.split(":")[0]: line for line in done.stdout.splitlines()}
            assert set(lines) == {"W&B", "TensorBoard", "MLflow", "Trackio"}
            for name, line in lines.items():
                wanted = (
                    f"sent {STEPS} records, steps 0 to {STEPS - 1}" if sent and name == "W&B" else "nothing to send"
                )
                assert wanted in line
            rows = server.rows(run.read_info()["run_id"])
            assert [row["_step"] for row in rows] == list(range(STEPS))
            assert [row["reward"] for row in rows] == [expected(step)["reward"] for step in range(STEPS)]
    assert API_KEY.encode() not in b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["TensorBoard", "MLflow", "Trackio"])
def test_a_tracker_that_is_new_to_a_run_gets_all_of_it(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"wandb": "disabled"})
    refused = sync(run)
    assert refused.returncode == 2 and "this run has no tracker to send to: name one, such as" in refused.stderr
    for step in range(4):
        run.append_metrics(record(step))
    for _ in range(2):
        done = sync(run, f"tracking.{name.lower()}=true")
        assert done.returncode == 0, done.stderr
        rows = stores.READERS[name](run.path, run.read_info()["run_id"])
        assert sorted(step for step, _ in rows) == [0, 1, 2, 3]
    run.append_metrics(record(4))
    assert "sent 1 record, steps 4 to 4" in sync(run, f"tracking.{name.lower()}=true").stdout


PATHS = ("/abs/r.py:f", "./r.py:f", "r.py:f", "../r.py:f", "r.py:f#2", "my (new)/é, r.py:f", f"{'deep/' * 60}r.py:f")


@pytest.mark.parametrize("name", ["TensorBoard", "MLflow", "Trackio"])
def test_reward_functions_may_be_given_by_any_path(name: str, tmp_path: Path) -> None:
    """The name of a number has the path in it, and MLflow takes few names: a run with others had no record there."""
    run = make_run(tmp_path / "run", {"wandb": "disabled"})
    for step in range(2):
        run.append_metrics(record(step) | {f"reward/{path}": at + step for at, path in enumerate(PATHS)})
    done = sync(run, f"tracking.{name.lower()}=true")
    assert done.returncode == 0, done.stderr
    rows = stores.READERS[name](run.path, run.read_info()["run_id"])
    assert sorted(step for step, _ in rows) == [0, 1]
    for step, values in rows:
        parts = [value for key, value in values.items() if key.startswith("reward/")]
        assert sorted(parts) == [at + step for at in range(len(PATHS))], values.keys()


def test_a_server_that_is_down_is_said_without_its_password(tmp_path: Path) -> None:
    """The other trackers get their records all the same."""
    run = make_run(tmp_path / "run", {"wandb": "disabled", "mlflow": True, "tensorboard": True})
    run.append_metrics(record(0))
    away = {"MLFLOW_TRACKING_URI": "http://user:S3CRET@127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = sync(run, **away)
    assert done.returncode == 1 and "error: MLflow: MlflowException: API request" in done.stderr
    assert "S3CRET" not in done.stdout + done.stderr
    assert "TensorBoard: tensorboard --logdir" in done.stdout and "sent 1 record" in done.stdout
    elsewhere = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'elsewhere.db'}"}
    assert "sent 1 record" in sync(run, **elsewhere).stdout.split("MLflow")[1]
    assert (tmp_path / "elsewhere.db").exists() and not (run.path / "mlflow.db").exists()


def test_prometheus_is_said_to_lack_nothing(tmp_path: Path) -> None:
    """It was passed over in silence, as if it had been sent what was missing."""
    run = make_run(tmp_path / "run", {"wandb": "disabled"})
    run.append_metrics(record(0))
    given, why = f"tracking.prometheus={tmp_path}", "for its file has only the newest step"
    done = sync(run, given)
    assert done.returncode == 2 and f"tracking.prometheus: there is nothing to send, {why}" in done.stderr
    done = sync(run, given, "tracking.tensorboard=true")
    assert done.returncode == 0 and "sent 1 record" in done.stdout
    assert f"Prometheus: nothing to send, {why}" in done.stdout and not list(tmp_path.glob("*.prom"))


def test_a_run_that_goes_on_is_not_synced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"wandb": "disabled", "tensorboard": True})
    with run.lock():
        done = sync(run)
    assert done.returncode == 2 and "is running already" in done.stderr and not (run.path / "tensorboard").exists()


def test_sync_works_on_a_login_node(tmp_path: Path) -> None:
    """Without torch and all that trains, every tracker gets its records."""
    run = make_run(tmp_path / "run", TRACKING | {"wandb": "disabled", "swanlab": "disabled"})
    run.append_metrics(record(0))
    absent = ("torch", "vllm", "megatron", "transformers")
    command = [sys.executable, "-c", HOOK.format(absent=absent) + MAIN, "sync", str(run.path)]
    done = subprocess.run(command, env=environment(run), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sent 1 record, steps 0 to 0") == 3
