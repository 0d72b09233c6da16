"""Models by their names on the hub, with the real client against a server that speaks the hub's protocol.

Takes 5 s. It would catch a name that is taken for a folder, half a model that counts as whole, and a download that a
plan begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture, hub
from gspo_hpc.planning.plan import make_plan
from tests.hub_server import COMMIT, Hub, serving

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model-00001-of-00002.safetensors": b"one" * 1000,
    "model-00002-of-00002.safetensors": b"two" * 1000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "tokenizer.json": b"{}",
    "README.md": b"not needed",
    "pytorch_model.bin": b"a pickle, which is never fetched",
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a hub, and an empty cache."""
    with serving({"models/acme/tiny": FILES}, tmp_path, monkeypatch) as address:
        yield address


def fetched(endpoint: str, name: str) -> subprocess.CompletedProcess[str]:
    """hub.folder in a process of its own: the client reads its environment once."""
    code = "import sys\nfrom gspo_hpc.models import hub\nprint(hub.folder(sys.argv[1]))"
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=60, env=environment
    )


def test_a_model_is_downloaded_once(server: str) -> None:
    config = from_dict({"model": {"path": "acme/tiny"}})
    assert hub.cached("acme/tiny") is None and hub.with_cached_folder(config) is config
    done = fetched(server, "acme/tiny")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert {path.name for path in folder.iterdir()} == set(FILES) - {"README.md", "pytorch_model.bin"}
    assert hub.cached("acme/tiny") == folder == hub.cached(f"acme/tiny@{COMMIT}")

    asked = len(Hub.asked)
    assert hub.folder("acme/tiny") == folder and len(Hub.asked) == asked, "what is in the cache needs no network"
    assert hub.with_folder(config).model.path == hub.with_cached_folder(config).model.path == str(folder)
    found = architecture.find(config)
    assert found is not None and found.num_layers == 3, "a plan reads the config in the cache"

    (folder / "model-00002-of-00002.safetensors").unlink()
    assert hub.with_cached_folder(config) is config, "half a model is none"
    assert fetched(server, "acme/tiny").returncode == 0 and hub.with_cached_folder(config) is not config


def test_a_plan_and_doctor_download_nothing(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server)
    make_plan(from_dict({"model": {"path": "acme/tiny"}}))
    hub.with_cached_folder(from_dict({"model": {"path": "acme/tiny"}}))
    assert Hub.asked == []


@pytest.mark.parametrize(
    ("name", "endpoint", "reason"),
    [
        ("acme/none", None, "Repository"),
        ("acme/tiny", "http://127.0.0.1:9", "onnect"),  # nobody listens there
    ],
)
def test_what_cannot_be_had_says_how(server: str, name: str, endpoint: str | None, reason: str) -> None:
    done = fetched(endpoint or server, name)
    assert done.returncode == 1 and f"ValueError: model.path {name}: there is no such folder" in done.stderr
    assert reason in done.stderr
    assert f"hf download {name} --local-dir models/{name.split('/')[1]}" in done.stderr


def test_a_machine_without_the_library_is_told_what_brings_it(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node has neither the library nor its command, which the message would name in vain."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setenv("HF_ENDPOINT", server)
    with pytest.raises(ValueError, match=r"pip install 'gspo-hpc\[hub\]'"):
        hub.folder("acme/none")


def test_offline(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE is set\)\nwhere .*: hf download a/b --revision v2 --local"):
        hub.folder("a/b@v2")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("Qwen/Qwen3-0.6B@main", True),
        ("models/Qwen3-0.6B", False),
        ("data/Qwen3-0.6B", False),
        ("here/model", False),
        ("Qwen3-0.6B", False),
        ("/data/Qwen/Qwen3", False),
        ("a/b/c", False),
        ("./a", False),
        ("../a", False),
    ],
)
def test_which_paths_are_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: bool) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.is_name(path) is name
    if not name:
        with pytest.raises(ValueError, match="does not exist: give a Hugging Face model folder, or"):
            hub.with_folder(from_dict({"model": {"path": path}}))


def test_a_teacher_comes_from_the_cache_as_the_model_does(server: str) -> None:
    """Commands that do not train need none."""
    given = {"model": {"path": "acme/tiny"}, "algorithm": {"teacher": "acme/tiny", "kl_beta": 1.0}}
    config = from_dict(given)
    assert fetched(server, "acme/tiny").returncode == 0
    folder = str(hub.cached("acme/tiny"))
    for found in (hub.with_cached_folder(config), hub.with_folder(config)):
        assert (found.model.path, found.algorithm.teacher) == (folder, folder)
    assert hub.with_folder(config, teacher=False).algorithm.teacher is None
    nowhere = from_dict({"model": {"path": folder}, "algorithm": {"teacher": "./nowhere", "kl_beta": 1.0}})
    with pytest.raises(
        ValueError, match=r"^algorithm.teacher ./nowhere does not exist: give a Hugging Face model folder"
    ):
        hub.with_folder(nowhere)
