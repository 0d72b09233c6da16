"""Models by their names on the hub, with the real client against a server that speaks the hub's protocol.

Takes 5 s. It would catch a name that is taken for a folder, half a model that counts as whole, and a download that a
plan begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture, hub
from gspo_hpc.planning.plan import make_plan

COMMIT = "0123456789abcdef0123456789abcdef01234567"
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


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download of a model takes."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        head, _, rest = self.path.partition("?")[0].partition("/resolve/")
        if head.startswith("/api/models/acme/tiny/tree"):
            self._json(
                [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in FILES.items()]
            )
        elif head.startswith("/api/models/acme/tiny"):
            self._json({"id": "acme/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        elif head == "/acme/tiny" and (data := FILES.get(rest.partition("/")[2])) is not None:
            etag = hashlib.sha256(data).hexdigest()
            self._answer(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json", "X-Repo-Commit": COMMIT})

    def _answer(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a hub, and an empty cache."""
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


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
