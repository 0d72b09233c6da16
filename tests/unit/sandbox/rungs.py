"""The rungs of the sandbox that tests of this machine run on, and a service that has one of them behind it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gspo_hpc.config.schema import Sandbox as Settings
from gspo_hpc.sandbox import runner
from gspo_hpc.sandbox.runner import Sandbox

HERE = "GSPO_HPC_RUNGS"  # names the rungs of a machine that cannot have both, such as a container without namespaces
KINDS = tuple(os.environ.get(HERE, "bubblewrap landlock").split())

# Every process of a program has a name of its own, by which a test finds them.
NAMED = """
import ctypes, os, signal, sys, time
ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
"""


def processes(name: str) -> list[int]:
    """Return the processes of that name that have not ended; in a container perhaps nobody buries those that have."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdecimal() and (path / "comm").read_text().strip() == name:
                if (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(path.name))
        except OSError:
            continue
    return found


def sandbox(kind: str, **settings: object) -> Sandbox:
    """The sandbox of a kind, which must work here: no test is left out where it does not."""
    made = Settings.model_validate({"kind": kind, **settings})
    why = runner.obstacle(kind, made)
    assert not why, f"{kind}: {why}. bash tools/setup_env.sh --dev installs bubblewrap; {HERE} names the rungs here"
    return Sandbox(made)


@contextmanager
def service(behind: Sandbox) -> Iterator[str]:
    """A server with the interface of SandboxFusion that runs programs in a sandbox; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/run_code" or asked["language"] != "python":
                self.send_error(404)
                return
            outcome = behind.run(asked["code"], asked["stdin"], seconds=asked["run_timeout"])
            result = {
                "status": "TimeLimitExceeded" if outcome.timed_out else "Finished",
                "execution_time": outcome.seconds,
                "return_code": -9 if outcome.status is None else outcome.status,
                "stdout": outcome.stdout,
                "stderr": outcome.stderr,
            }
            status = "Success" if outcome.ended_well else "Failed"
            answer = {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}
            data = json.dumps(answer | {"executor_pod_name": None}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing on the console."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
