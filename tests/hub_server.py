"""A server that speaks the part of the Hugging Face hub's protocol that downloads take, for the real client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Repositories by their address, models/OWNER/NAME or datasets/OWNER/NAME, with the bytes of their files."""

    asked: ClassVar[list[str]] = []
    repos: ClassVar[Mapping[str, Mapping[str, bytes]]] = {}

    def do_GET(self) -> None:
        self.asked.append(self.path)
        head, _, rest = self.path.partition("?")[0].partition("/resolve/")
        whole = head.removeprefix("/api/") if head.startswith("/api/") else ""
        address = next((one for one in self.repos if whole == one or whole.startswith(f"{one}/")), None)
        if address is not None and whole.startswith(f"{address}/tree"):
            files = self.repos[address].items()
            self._json([{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files])
        elif address is not None:
            siblings = [{"rfilename": name} for name in self.repos[address]]
            self._json({"id": address.partition("/")[2], "sha": COMMIT, "siblings": siblings})
        elif (data := self._file(head, rest.partition("/")[2])) is not None:
            etag = hashlib.sha256(data).hexdigest()
            self._answer(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _file(self, head: str, name: str) -> bytes | None:
        address = head.removeprefix("/") if head.startswith("/datasets/") else f"models{head}"
        return self.repos.get(address, {}).get(name)

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


@contextmanager
def serving(repos: Mapping[str, Mapping[str, bytes]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a hub with these repositories; the cache is empty, in `folder`, which is the current one."""
    Hub.asked, Hub.repos = [], repos
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(folder)
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()
