"""A server that answers what wandb asks, for tests: it takes runs, fails, or stays silent."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import unquote

API_KEY = "0123456789abcdef0123456789abcdef01234567"  # made up
ENTITY = "tests"


class WandbServer(ThreadingHTTPServer):
    """A W&B server on this machine, which keeps the history of runs by their ids, whatever the project.

    Uploaded files are dropped. Once it is no longer silent, it answers those who still wait.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = "ok"  # or "error": 500 to everything; "silence": no answer
        self.requests = 0  # how many came, whatever the behaviour
        self.closed = False
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        self._configs: dict[str, str] = {}
        self._streams: defaultdict[str, defaultdict[str, dict[int, str]]]  # lines by run, file and offset
        self._streams = defaultdict(lambda: defaultdict(dict))

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        self.shutdown()
        self.server_close()

    def environment(self) -> dict[str, str]:
        """What makes wandb use this server."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": API_KEY}

    def run_ids(self) -> set[str]:
        """The runs that were started here."""
        with self.lock:
            return set(self._configs)

    def rows(self, run_id: str) -> list[dict[str, Any]]:
        """The history of a run as it came, in its order; what came twice at one place counts once."""
        with self.lock:
            return [json.loads(line) for line in self._lines(run_id, "wandb-history.jsonl")]

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer to a request, which is taken in."""
        if path == "/graphql":
            query = json.loads(body)
            return {"data": self._graphql(query["query"], query.get("variables") or {})}
        if path.endswith("/file_stream"):
            files = self._streams[unquote(path.split("/")[-2])]
            for name, chunk in (json.loads(body).get("files") or {}).items():
                files[name].update(enumerate(chunk["content"], chunk["offset"]))
        return {}

    def _lines(self, run_id: str, file: str) -> list[str]:
        return [line for _, line in sorted(self._streams[run_id][file].items())]

    def _graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """By the first field that is asked for; what is not known here is null."""
        field = cast(re.Match[str], re.search(r"\{\s*(\w+)", query))[1]
        upload = {"uploadUrl": f"{self.url}/upload", "uploadHeaders": []}
        artifact = {"id": "artifact", "state": "PENDING", "digest": ""}
        answer: dict[str, Any] | None = None
        match field:
            case "viewer":
                answer = {"id": "viewer", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}
            case "serverInfo":
                answer = {"features": []}
            case "model":
                answer = self._project(given) | {"bucket": self._run(given) if given["name"] in self._configs else None}
            case "upsertBucket":
                inserted = given["name"] not in self._configs
                self._configs[given["name"]] = given.get("config") or self._configs.get(given["name"], "{}")
                answer = {"bucket": self._run(given), "inserted": inserted}
            case "createRunFiles":
                answer = {"runID": given["run"], "files": [{"name": name} | upload for name in given["files"]]}
            case "createArtifact":
                answer = {"artifact": artifact | {"artifactSequence": {"latestArtifact": None}}}
            case "createArtifactManifest":
                answer = {"artifactManifest": {"id": "manifest", "file": {"id": "file"} | upload}}
            case "createArtifactFiles":
                names = [file["name"] for file in given["input"]["artifactFiles"]]
                nodes = [{"storagePath": name, "artifact": artifact} | upload for name in names]
                answer = {"files": {"edges": [{"node": node} for node in nodes]}}
            case "commitArtifact":
                answer = {"artifact": artifact}
        return {field: answer}

    def _project(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given.get("project") or "project"
        return {"id": name, "name": name, "entity": {"id": ENTITY, "name": ENTITY}}

    def _run(self, given: dict[str, Any]) -> dict[str, Any]:
        """What is known of a run: wandb goes on from there when it resumes one."""
        run_id = given["name"]
        history = self._lines(run_id, "wandb-history.jsonl")
        events = self._lines(run_id, "wandb-events.jsonl")
        return {
            "id": run_id,
            "name": run_id,
            "displayName": given.get("displayName") or run_id,
            "project": self._project(given),
            "config": self._configs[run_id],
            "summaryMetrics": (["{}"] + self._lines(run_id, "wandb-summary.json"))[-1],
            "historyLineCount": len(history),
            "historyTail": json.dumps(history[-1:]),
            "eventsLineCount": len(events),
            "eventsTail": json.dumps(events[-1:]),
            "logLineCount": 0,
            "tags": [],
            "wandbConfig": json.dumps({"t": {}}),  # a run without "t" counts as one that never started
        }


class _Handler(BaseHTTPRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # who asked did not wait for the answer
            super().handle()

    def _serve(self) -> None:
        server = cast(WandbServer, self.server)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.lock:
            server.requests += 1
        while server.behaviour == "silence":
            time.sleep(0.05)
            if server.closed or self._is_alone():
                return
        failed = server.behaviour == "error"
        with server.lock:
            answer = b"" if failed else json.dumps(server.answer(self.path, body)).encode()
        self.send_response(500 if failed else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _is_alone(self) -> bool:
        """Whether who asked has hung up: then wandb takes the request for lost, and it must be."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    do_GET = do_POST = do_PUT = _serve

    def log_message(self, *_: object) -> None:
        """Nothing: stderr belongs to the tests."""
