"""What of tracking needs neither wandb nor TensorBoard: modes, secrets, and a rank without trackers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.system.redact import HIDDEN, redact
from gspo_hpc.training.telemetry.trackers.tracker import read_last
from gspo_hpc.training.telemetry.trackers.wandb import choose_mode


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


@pytest.mark.parametrize("on_rank", [True, False])
def test_without_trackers_nothing_is_imported_started_or_written(on_rank: bool, tmp_path: Path) -> None:
    code = (
        "import sys, threading; from pathlib import Path; from gspo_hpc.config.schema import Tracking;"
        "from gspo_hpc.training.telemetry.trackers.tracker import Tracker\n"
        f"asked = Tracking(wandb='disabled') if {on_rank} else Tracking(wandb='offline', tensorboard=True)\n"
        f"t = Tracker(asked, Path(sys.argv[1]), 'id', 'name', {{}}, {on_rank})\n"
        "t.log({'step': 1, 'reward': 0.5}); t.log_samples([{'step': 1}]); t.close(0)\n"
        "bad = {'wandb', 'torch', 'tensorboard'} & set(sys.modules); assert not bad, bad\n"
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
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


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"wandb": "7"}', '{"wandb": 1, "wandb": 2}', "\x00"])
def test_a_broken_memory_is_no_memory(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tracking.json"
    assert read_last(path) == {}
    path.write_text(text)
    assert read_last(path) == {}
    path.write_text('{"wandb": 7, "tensorboard": 5}')
    assert read_last(path) == {"wandb": 7, "tensorboard": 5}
