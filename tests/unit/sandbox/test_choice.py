"""The choice of a rung: the first that works and confines, and none where there is none.

It takes about ten seconds. It would catch a program that runs without a sandbox because a rung is missing, broken, or
does not confine: a `bwrap` that only runs programs must be found out before any of a model's does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gspo_hpc.config.schema import Sandbox as Settings
from gspo_hpc.sandbox import kernel, runner, service
from gspo_hpc.sandbox.outcomes import Limits, Outcome, SandboxError
from gspo_hpc.sandbox.runner import Sandbox
from tests.unit.sandbox import rungs

# It takes the words of bubblewrap, and confines nothing.
OPEN = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
shift
cd "$TMP" && cat <&4 >main.py && "$@" <&0
echo "{\\"exit-code\\": $?}" >&5
"""
FAILS = "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget which rungs work: these tests change what is there."""
    runner.obstacle.cache_clear()
    yield
    runner.obstacle.cache_clear()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put(folder: Path, text: str, tmp_path: Path) -> None:
    text = text.replace('"$TMP"', f"'{tmp_path}'").replace("cat ", "/bin/cat ")
    (folder / "bwrap").write_text(text)
    (folder / "bwrap").chmod(0o755)


def test_the_first_that_works_is_taken() -> None:
    rungs.sandbox(rungs.KINDS[0])
    assert Sandbox().kind == rungs.KINDS[0]


def test_without_bubblewrap_the_next_is_taken(path: Path) -> None:
    assert Sandbox().kind == "landlock"
    assert runner.obstacle("bubblewrap", Settings()) == "there is no bwrap on PATH"


def test_one_that_fails_is_passed_over_with_its_reason(path: Path, tmp_path: Path) -> None:
    put(path, FAILS, tmp_path)
    assert Sandbox().kind == "landlock"
    assert "No permissions to create a new namespace" in runner.obstacle("bubblewrap", Settings())


def test_one_that_confines_nothing_is_found_out(path: Path, tmp_path: Path) -> None:
    put(path, OPEN, tmp_path)
    why = runner.obstacle("bubblewrap", Settings())
    for what in ("reads files of others", "writes beside files of others", "connects to this machine"):
        assert what in why
    assert Sandbox().kind == "landlock"
    with pytest.raises(SandboxError, match="no sandbox can be used here, so no program is run"):
        Sandbox(Settings(kind="bubblewrap")).run("print(1)")


@pytest.mark.parametrize("kind", ["bubblewrap", "apptainer", "http"])
def test_one_that_is_named_is_not_replaced(path: Path, kind: str) -> None:
    with pytest.raises(SandboxError, match=f"so no program is run \\({kind}: "):
        Sandbox(Settings.model_validate({"kind": kind})).run("print(1)")


def test_without_any_nothing_is_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    with pytest.raises(SandboxError) as caught:
        Sandbox().run(f"open({str(tmp_path / 'mark')!r}, 'w')")
    said = str(caught.value)
    for reason in ("no bwrap on PATH", "has no Landlock", "no apptainer on PATH", "sandbox.url is not set"):
        assert reason in said
    assert not (tmp_path / "mark").exists()


def test_a_kernel_that_refuses_to_confine_runs_nothing(tmp_path: Path) -> None:
    """The supervisor is told to confine on a machine without a filter: the program must not run."""
    rungs.sandbox("landlock")
    made = runner._job("landlock", Settings(), f"open({str(tmp_path / 'mark')!r}, 'w')", "", runner._limits(Settings()))
    code = (
        "import os\nfrom gspo_hpc.sandbox import supervisor\nhere = os.uname()\n"
        "os.uname = lambda: os.uname_result((*here[:4], 'riscv64'))\nsupervisor.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(dataclasses.asdict(made)) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.read())
    assert "was not run: cannot confine it: no filter of system calls for riscv64" in answer["error"]
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("wide", ["/", "home", "here"])
def test_folders_that_hold_the_run_are_not_shown(wide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    (tmp_path / "here" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "runs")
    folder = "/" if wide == "/" else str(tmp_path / wide)
    with pytest.raises(SandboxError, match=f"programs would read {folder}, which holds the home or the current folder"):
        Sandbox(Settings(kind="landlock", readable=(folder,))).run("print(1)")


def test_another_python_runs_programs() -> None:
    rungs.sandbox("landlock")
    box = Sandbox(Settings(python=os.path.realpath(sys.executable)))
    assert box.run("import sys; print(sys.prefix == sys.base_prefix)").stdout == "True\n"
    with pytest.raises(SandboxError, match="sandbox.python /no/such/python does not start"):
        Sandbox(Settings(python="/no/such/python")).run("print(1)")


ANSWERS = {
    "an error": (500, "", "refused with 500"),
    "no JSON": (200, "<html>", "gave no result of a program: b'<html>'"),
    "another JSON": (200, '{"status": "Success"}', "gave no result of a program"),
    "a list": (200, "[1]", "gave no result of a program"),
    "a failure of the service": (
        200,
        '{"status": "SandboxError", "message": "no room", "run_result": null}',
        "the service did not run the program: no room",
    ),
}

RESULT = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "x", "stderr": ""}


def said(status: str = "Success", **result: object) -> str:
    return json.dumps({"status": status, "message": "why", "run_result": {**RESULT, **result}})


ANSWERS |= {
    "an exit status that is no number": (200, said(return_code="0"), "gave no result of a program"),
    "an exit status that is false": (200, said(return_code=False), "gave no result of a program"),
    "an exit status below one": (200, said(return_code=0.9), "gave no result of a program"),
    "an endless exit status": (200, said().replace(": 0,", ": 1e999,"), "gave no result of a program"),
    "output that is no text": (200, said(stdout=["x"]), "gave no result of a program"),
    "a time that is too long": (200, said(execution_time=10**400), "gave no result of a program"),
    "a result that is a text": (200, '{"status": "Success", "run_result": "x"}', "gave no result of a program"),
    "brackets": (200, "[" * 200000, "gave no result of a program"),
    "a time without end": (200, said(execution_time=math.inf), "gave no result of a program"),
    "no time": (200, said(execution_time=math.nan), "gave no result of a program"),
    "an exit status without end": (200, said(return_code=math.inf), "gave no result of a program"),
    "an error of the run": (200, said().replace("Finished", "Error"), "did not run"),
    "a status that nobody knows": (200, said("banana"), "did not run the program: why"),
    "a failure that ended with 0": (200, said("Failed"), "calls a program failed that ended with 0: why"),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_a_service_that_answers_nonsense_is_no_result(what: str) -> None:
    status, text, why = ANSWERS[what]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing on the console."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = Settings(kind="http", url=f"http://127.0.0.1:{server.server_address[1]}/")
        assert why in runner.obstacle("http", settings)
        with pytest.raises(SandboxError, match="no sandbox can be used here"):
            Sandbox(settings).run("print(1)")
        server.shutdown()


def test_half_a_character_from_a_service_is_text() -> None:
    answer = json.loads(said(stdout="\ud800"))
    assert service._outcome(answer, Limits()).stdout == "\ud800"


@contextlib.contextmanager
def speaking(*parts: bytes, pause: float = 0.0) -> Iterator[str]:
    """A server that answers anything with these bytes, one part after the other; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(1 << 20)
                        for part in parts:
                            connection.sendall(part)
                            if over.wait(pause):
                                return

        threading.Thread(target=speak, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        over.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


OK = b"HTTP/1.1 200 OK\r\n"
NO_HTTP = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "nothing": b"",
    "half": OK + b"Content-Length: 5000\r\n\r\n{}",
    "half, of which all is JSON": OK + b"Content-Length: 5000\r\n\r\n" + said().encode(),
    "half a chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "no chunk": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "a long status": b"HTTP/1.1 200 " + b"x" * 70000 + b"\r\n\r\n",
    "many headers": OK + b"a: b\r\n" * 200 + b"\r\n",
}


@pytest.mark.parametrize("what", NO_HTTP)
def test_a_service_that_speaks_no_http_is_no_result(what: str) -> None:
    with speaking(NO_HTTP[what]) as url:
        with pytest.raises(SandboxError, match="cannot be reached|gave no result"):
            service.run(url, "print(1)", "", Limits())
        assert runner.obstacle("http", Settings(kind="http", url=url))


@pytest.mark.parametrize(
    "url", ["file:///etc", "ftp://x", "nowhere", "http://", "http://127.0.0.1:99999", "http://a b"]
)
def test_what_is_no_address_of_a_service_is_no_result(url: str) -> None:
    with pytest.raises(SandboxError):
        service.run(url, "print(1)", "", Limits())


@pytest.mark.parametrize("status", [b"301", b"302", b"303", b"307", b"308"])
def test_a_service_does_not_send_programs_elsewhere(status: bytes) -> None:
    """Another host would answer in its place, and a program would be graded by what that one says."""
    body = said().encode()
    with speaking(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as other:
        assert service.run(other, "print(1)", "", Limits()).stdout == "x"
        moved = b"HTTP/1.1 %s Moved\r\nLocation: %s/\r\nContent-Length: 0\r\n\r\n" % (status, other.encode())
        with speaking(moved) as url, pytest.raises(SandboxError, match=f"refused with {status.decode()}"):
            service.run(url, "print(1)", "", Limits())


@pytest.mark.parametrize("where", ["headers", "body"])
def test_a_service_that_answers_drop_by_drop_meets_the_deadline(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PATIENCE", 0.5)
    begin = (OK + b"Content-Length: 600\r\n\r\n",) if where == "body" else (b"HTTP/1.1 ",)
    with speaking(*begin, *[b"2"] * 600, pause=0.1) as url:
        with pytest.raises(SandboxError, match="gave no answer within 1 s"):
            service.run(url, "print(1)", "", Limits(seconds=0.5))


def test_a_service_need_not_hide_what_it_has_from_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may run programs in containers that show processes of theirs."""

    class Shows(Sandbox):
        def run(self, program: str, stdin: str = "", *, seconds: float | None = None) -> Outcome:
            done = subprocess.run([sys.executable, "-c", program], input=stdin, capture_output=True, text=True)
            return Outcome(done.stdout, done.stderr, done.returncode)

    with rungs.service(Shows()) as url:
        monkeypatch.chdir(tmp_path)
        assert runner.obstacle("http", Settings(kind="http", url=url)) == ""


def test_a_service_that_is_not_there() -> None:
    assert "cannot be reached" in runner.obstacle("http", Settings(kind="http", url="http://127.0.0.1:9"))
