"""A run goes on with the reward model that it was started with, and with no other in its place."""

from __future__ import annotations

from pathlib import Path

from gspo_hpc.config import changes, loader
from gspo_hpc.runs import snapshot


def config_of(folder: Path, more: str = "") -> loader.Config:
    return loader.load(None, [f"reward.models=[{{name: a, path: {folder}{more}}}]"])


def test_another_model_in_the_folder_is_seen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12")
    before = snapshot.fingerprints(config_of(tmp_path))
    assert before.keys() == {str(tmp_path)} and snapshot.fingerprints(config_of(tmp_path)) == before
    (tmp_path / "config.json").write_text("[]")
    changed = snapshot.fingerprints(config_of(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert before != changed and snapshot.fingerprints(config_of(tmp_path)) not in (before, changed)
    assert snapshot.fingerprints(config_of(tmp_path / "none")) == {}


def test_its_share_of_a_gpu_may_change_and_what_it_reads_may_not(tmp_path: Path) -> None:
    old = config_of(tmp_path)
    assert changes.refused_changes(old, config_of(tmp_path, ", gpu_memory_utilization: 0.3, kv_cache_gb: 2")) == []
    (row,) = changes.refused_changes(old, config_of(tmp_path, ", gpu_memory_utilization: 0.3, too_long: cut"))
    assert row == ("reward.models[0].too_long", "fail", "cut")
    (row,) = changes.refused_changes(old, loader.load(None, [f"reward.models=[{{name: b, path: {tmp_path}}}]"]))
    assert row[0] == "reward.models"
