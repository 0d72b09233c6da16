"""What of tracking needs no library: modes, secrets, and a run without trackers. Takes a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.config import loader
from gspo_hpc.runs.directory import open_run
from gspo_hpc.system.exit_codes import DONE, FAILED, REQUEUE
from gspo_hpc.system.redact import HIDDEN, redact
from gspo_hpc.trackers import sync
from gspo_hpc.trackers.services.wandb import choose_mode


@pytest.mark.parametrize(
    ("reason", "code"), [("done", DONE), ("failed", FAILED), ("refused", FAILED), ("preempted", REQUEUE)]
)
def test_sync_tells_how_the_newest_attempt_ended(tmp_path: Path, reason: str, code: int) -> None:
    """A tracker shows a run that was refused as failed, and one that goes on later as neither done nor failed."""
    config = loader.from_dict({"run": {"dir": str(tmp_path / "r")}})
    made, _ = open_run(config)
    made.new_attempt(config).finish("failed" if reason == "done" else "done", 0)
    made.new_attempt(config).finish(reason, 0)
    assert sync._exit_code(made) == code


@pytest.mark.parametrize(
    ("asked", "has_key", "variable", "mode", "warned"),
    [
        ("auto", True, None, "online", False),
        ("auto", False, None, "offline", False),
        ("auto", True, "offline", "offline", False),
        ("auto", True, "disabled", "disabled", False),
        ("auto", False, "online", "offline", True),
        ("auto", False, "nonsense", "offline", False),
        ("online", True, "offline", "online", False),
        ("online", False, None, "offline", True),
        ("offline", True, "online", "offline", False),
    ],
)
def test_mode(
    asked: str, has_key: bool, variable: str | None, mode: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    said: list[str] = []
    assert choose_mode(asked, has_key, said.append) == mode
    assert bool(said) == warned
    if warned:
        assert "WANDB_API_KEY" in said[0]


def test_without_trackers_nothing_is_imported_started_or_written(tmp_path: Path) -> None:
    code = (
        "import sys, threading; from pathlib import Path; from gspo_hpc.config.schema import Tracking;"
        "from gspo_hpc.trackers import registry; from gspo_hpc.trackers.feed import Feeds;"
        "from gspo_hpc.trackers.protocol import TrackedRun\n"
        "services = registry.chosen(Tracking(wandb='disabled'))\n"
        "feeds = Feeds(services, TrackedRun(Path(sys.argv[1]), 'id', 'name', {}), announce=print)\n"
        "feeds.wake(); feeds.close(0)\n"
        "bad = {'wandb', 'torch', 'tensorboard', 'mlflow', 'trackio', 'swanlab'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "assert threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout == "tracker: none but metrics.jsonl\n"
    assert list(tmp_path.iterdir()) == []


def test_secrets_are_left_out_and_counts_are_not() -> None:
    given = {
        "rollout": {"engine": {"hf_token": "a", "max_num_batched_tokens": 5, "deep": [{"api_key": "b", "x": "c"}]}},
        "password": "d",
        "batch": {"micro_batch_tokens": 4096, "token": None},
        "data": {"prompt_key": "prompt"},
    }
    assert redact(given) == {
        "rollout": {
            "engine": {"hf_token": HIDDEN, "max_num_batched_tokens": 5, "deep": [{"api_key": HIDDEN, "x": "c"}]}
        },
        "password": HIDDEN,
        "batch": {"micro_batch_tokens": 4096, "token": None},
        "data": {"prompt_key": "prompt"},
    }
