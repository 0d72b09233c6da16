"""A server that answers what SwanLab asks, for tests: it keeps the numbers of runs by their ids."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

API_KEY = "swanlab-key-made-up-for-tests"
USER = "tests"


class SwanlabServer(ThreadingHTTPServer):
    """A SwanLab server on this machine; `fails` lets it answer everything with an error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.fails = False
        self.lock = threading.Lock()
        self.points: defaultdict[str, list[tuple[int, str, float]]] = defaultdict(list)  # by run: step, key, number
        self.states: dict[str, str] = {}
        self._runs: dict[str, dict[str, str]] = {}

    def __enter__(self) -> SwanlabServer:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def environment(self) -> dict[str, str]:
        """What makes SwanLab use this server."""
        return {"SWANLAB_API_HOST": self.url, "SWANLAB_WEB_HOST": self.url, "SWANLAB_API_KEY": API_KEY}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """The status and the content of an answer; the request is taken in."""
        path = path.partition("?")[0].removeprefix("/api")
        if path == "/login/api_key":
            return 200, {"sid": "s", "expiredAt": "2999-01-01T00:00:00.000Z", "userInfo": {"username": USER}}
        if found := re.fullmatch(r"/project/(\w+)/([\w-]+)", path):
            counts = {"experiments": len(self._runs), "contributors": 1, "collaborators": 0, "clones": 0}
            name = found[2]
            return 200, {
                "cuid": name,
                "name": name,
                "version": 1,
                "path": f"/{USER}/{name}",
                "visibility": "PRIVATE",
                "group": {"username": USER},
                "_count": counts,
            }
        if path.endswith("/experiment") and method == "POST":
            run_id = body["cuid"]
            new = run_id not in self._runs
            self._runs.setdefault(run_id, {"cuid": run_id, "slug": run_id, "name": body["name"]})
            return (201 if new else 200), self._runs[run_id] | {"createdAt": "2026-01-01T00:00:00.000Z"}
        if found := re.fullmatch(r"/house/metrics/summaries/[\w-]+/(\w+)", path):
            last: dict[str, int] = {}
            for step, key, _ in self.points[found[1]]:
                last[key] = max(step, last.get(key, -1))
            return 200, {"log": [], "media": [], "scalar": [{"key": key, "step": at} for key, at in last.items()]}
        if path == "/house/metrics" and body["type"] == "scalar":
            new_points = [(one["index"], one["key"], one["data"]) for one in body["metrics"]]
            self.points[body["experimentId"]] += new_points
        if found := re.fullmatch(rf"/project/{USER}/[\w-]+/runs/(\w+)/state", path):
            self.states[found[1]] = body["state"]
        return 200, {}


class _Handler(BaseHTTPRequestHandler):
    def _serve(self) -> None:
        server = cast(SwanlabServer, self.server)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.lock:
            body = json.loads(raw) if raw else None
            status, content = (500, {}) if server.fails else server.answer(self.command, self.path, body)
            server.fails = server.fails or self.path == "/fail"  # from the next request on
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = _serve

    def log_message(self, *_: object) -> None:
        """Nothing: stderr belongs to the tests."""
