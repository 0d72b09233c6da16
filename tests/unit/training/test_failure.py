"""A rank tells of an error before it closes anything, and ends. About 10 seconds.

It would catch a rank that closes first, and so keeps its error to itself for as long as that blocks, and one that does
not end because something it closes never answers.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from gspo_hpc.system.control import Server

RANK = """
import sys, threading
from gspo_hpc.system.control import Client
from gspo_hpc.training.worker import Report

host, token, kind, then = sys.argv[1:]
control = Client(host, token, 0, 1, node="n1", on_stop=lambda reason: None, signal_name=lambda: None)
report = Report(control)
try:
    raise {"user": ValueError, "run": RuntimeError, "exit": SystemExit}[kind]("the planted one")
except BaseException as error:
    code = report(error)
    assert report(OSError("what follows from it")) == code
    if then == "blocks":
        threading.Event().wait()  # as a process group whose other ranks never come
    sys.exit(code)
"""


@pytest.mark.parametrize(
    ("kind", "outcome", "detail", "code", "then"),
    [
        ("run", "failed", "RuntimeError: the planted one", 1, "blocks"),
        ("user", "refused", "the planted one", 2, "ends"),
        ("exit", "failed", "SystemExit: the planted one", 1, "ends"),
    ],
)
def test_an_error_is_told_first_and_the_rank_ends(kind: str, outcome: str, detail: str, code: int, then: str) -> None:
    server = Server("127.0.0.1", 1)
    address, token = server.environment().values()
    process = subprocess.Popen([sys.executable, "-c", RANK, address, token, kind, then], stderr=subprocess.PIPE)
    try:
        while 0 not in server.ranks or server.ranks[0].outcome is None:
            server.poll(0.1)
        assert (server.ranks[0].outcome, server.ranks[0].detail) == (outcome, detail)
        if then == "blocks":
            assert process.poll() is None, "it was to be told before the end"
        _, errors = process.communicate(timeout=20)  # of the 30 seconds in which a run ends; the launcher takes others
    finally:
        process.kill()
        server.close()
    assert process.returncode == code
    assert b"the planted one" in errors and b"Traceback" in errors and b"what follows" not in errors
    assert (b"did not close" in errors) == (then == "blocks")


def test_an_error_is_told_though_the_disk_of_the_log_is_full() -> None:
    server = Server("127.0.0.1", 1)
    address, token = server.environment().values()
    with open("/dev/full", "wb") as log:
        process = subprocess.Popen([sys.executable, "-c", RANK, address, token, "run", "ends"], stderr=log)
    try:
        while 0 not in server.ranks or server.ranks[0].outcome is None:
            assert not any(state.lost for state in server.ranks.values()), "it ended without a word"
            server.poll(0.1)
        assert (server.ranks[0].outcome, server.ranks[0].detail) == ("failed", "RuntimeError: the planted one")
    finally:
        process.kill()
        process.wait()
        server.close()
