"""Programs that use too much, do not end, or start others to outlive them: each is ended, and nothing is left of it.

It takes about forty seconds. It would catch a limit that does not hold, a process that survives its program, a folder
that stays behind, and a program that goes on where the process that asked for it, or its supervisor, was killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.sandbox import jails
from gspo_hpc.sandbox.outcomes import Outcome
from tests.unit.sandbox import rungs

SMALL = {"seconds": 20.0, "cpu_seconds": 10.0, "memory_gb": 0.25, "processes": 8}
SMALL |= {"file_mb": 1.0, "disk_mb": 4.0, "output_kb": 64.0}
QUICK = {"seconds": 3.0}

GREEDY = {
    "fork bomb": ("while True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "processes"),
    "fork bomb of processes that sleep": ("while os.fork() >= 0:\n    pass", "processes"),
    "threads": (
        "import threading\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        "processes",
    ),
    "memory": ("kept = []\nwhile True:\n    kept.append(bytearray(1 << 20))", "memory_gb"),
    "memory at once": ("kept = bytearray(1 << 31)", "memory_gb"),
    "memory that is only reserved": ("import mmap\nkept = mmap.mmap(-1, 1 << 31)", "memory_gb"),
    "memory of several processes": (
        "for _ in range(5):\n    if os.fork() == 0:\n        kept = os.urandom(1 << 20) * 100\n        time.sleep(60)\n"
        "time.sleep(60)",
        "memory_gb",
    ),
    "mapped memory of several processes": (
        "import mmap\nfor _ in range(5):\n    if os.fork() == 0:\n"
        "        kept = mmap.mmap(-1, 100 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "        kept.write(bytes(100 << 20))\n        time.sleep(60)\ntime.sleep(60)",
        "memory_gb",
    ),
    "memory of processes whose first thread has ended": (
        "import threading\n\ndef grow():\n    time.sleep(0.1)\n    kept = os.urandom(1 << 20) * 100\n"
        "    time.sleep(60)\n\nfor _ in range(3):\n    if os.fork() == 0:\n"
        "        threading.Thread(target=grow).start()\n"
        "        ctypes.CDLL(None).pthread_exit(None)\n"
        "time.sleep(60)",
        "memory_gb",
    ),
    "output": ("while True:\n    print('x' * 1000)", "output_kb"),
    "errors": ("while True:\n    print('x' * 1000, file=sys.stderr)", "output_kb"),
    "output of a child": ("os.fork()\nwhile True:\n    os.write(1, b'x' * 4096)", "output_kb"),
    "many files": ("for n in range(10**9):\n    open(f'f{n}', 'w').write('x' * 100000)", "disk_mb"),
    "many empty files": ("for n in range(10**9):\n    open(f'f{n}', 'w')", "disk_mb"),
    "many folders": ("for n in range(10**9):\n    os.mkdir(f'd{n}')", "disk_mb"),
    "many links": ("open('f', 'w')\nfor n in range(10**9):\n    os.symlink('f', f'l{n}')", "disk_mb"),
    "files without a name": (
        "kept = []\nwhile True:\n    kept.append(open('f', 'w'))\n    os.unlink('f')\n"
        "    kept[-1].write('x' * 500000)\n    kept[-1].flush()\n    time.sleep(0.005)",
        "disk_mb",
    ),
    "files without a name that are mapped": (
        "import mmap\nkept = []\nwhile True:\n    with open('f', 'w+b') as file:\n        os.unlink('f')\n"
        "        file.write(bytes(500000))\n        file.flush()\n"
        "        libc = ctypes.CDLL(None)\n        libc.mmap.restype = ctypes.c_void_p\n"
        "        libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file.fileno(), ctypes.c_long(0))\n"
        "    time.sleep(0.005)",
        "disk_mb",
    ),
    "files without a name of another thread": (
        "import threading, traceback\nkept = []\n\ndef fill():\n    time.sleep(0.1)\n    try:\n"
        "        while True:\n            kept.append(open('f', 'w'))\n            os.unlink('f')\n"
        "            kept[-1].write('x' * 500000)\n            kept[-1].flush()\n            time.sleep(0.005)\n"
        "    except OSError:\n        traceback.print_exc()\n        os._exit(1)\n\n"
        "threading.Thread(target=fill).start()\nctypes.CDLL(None).pthread_exit(None)",
        "disk_mb",
    ),
    "files in folders that are renamed all the time": (
        "places = [os.open('.', os.O_RDONLY)]\nfor _ in range(5):\n    os.mkdir('0', dir_fd=places[-1])\n"
        "    places.append(os.open('0', os.O_RDONLY, dir_fd=places[-1]))\nfor place in places[:-1]:\n"
        "    if os.fork() == 0:\n        n = 0\n        while True:\n"
        "            os.rename(str(n), str(n + 1), src_dir_fd=place, dst_dir_fd=place)\n            n += 1\n"
        "for n in range(60):\n    file = os.open(f'f{n}', os.O_WRONLY | os.O_CREAT, dir_fd=places[-1])\n"
        "    os.write(file, bytes(500000))\n    os.close(file)\ntime.sleep(0.3)",
        "disk_mb",
    ),
    "processor time of several processes": ("os.fork(), os.fork()\nwhile True:\n    pass", "cpu_seconds"),
    "processor time of children that nobody waits for": (
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nhere, there = os.pipe()\nwhile True:\n"
        "    if os.fork() == 0:\n        end = time.process_time() + 0.3\n        while time.process_time() < end:\n"
        "            pass\n        os.write(there, b'x')\n        os._exit(0)\n    os.read(here, 1)",
        "cpu_seconds",
    ),
    "processor time of orphans": (
        "here, there = os.pipe()\nwhile True:\n    if (child := os.fork()) == 0:\n        if os.fork() == 0:\n"
        "            end = time.process_time() + 0.3\n            while time.process_time() < end:\n"
        "                pass\n            os.write(there, b'x')\n        os._exit(0)\n"
        "    os.waitpid(child, 0)\n    os.read(here, 1)",
        "cpu_seconds",
    ),
    "a power that takes long in C": ("7 ** (7 ** 9)", "cpu_seconds"),
    "a regular expression that goes back for ever": (
        "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
        "cpu_seconds",
    ),
}

ENDLESS = {
    "sleeps": "time.sleep(600)",
    "sleeps in C": "import ctypes\nctypes.CDLL(None).sleep(600)",
    "waits for input that does not come": "here, there = os.pipe()\nos.read(here, 1)",
    "ignores signals": (
        "for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    try:\n        signal.signal(number, signal.SIG_IGN)\n    except OSError:\n        pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(600)"
    ),
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stops itself where names change": (
        "open('f', 'w')\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('went on', flush=True)\ntime.sleep(600)"
    ),
    "closes its output": "os.close(1)\nos.close(2)\ntime.sleep(600)",
    "waits for a child": "if os.fork() == 0:\n    time.sleep(600)\nos.wait()",
    "stops its group": "os.fork()\nos.kill(0, signal.SIGSTOP)",
}

SURVIVORS = {
    "a child": "if os.fork() == 0:\n    time.sleep(600)",
    "a grandchild": "if os.fork() == 0:\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)",
    "a daemon": (
        "if os.fork() == 0:\n    try:\n        os.setsid()\n    except OSError:\n        pass\n    if os.fork() == 0:\n"
        "        for number in range(3):\n            os.close(number)\n        time.sleep(600)\n    os._exit(0)"
    ),
    "one that ignores signals": (
        "if os.fork() == 0:\n    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n    time.sleep(600)"
    ),
    "one that starts others for ever": (
        "if os.fork() == 0:\n    while True:\n        if os.fork() > 0:\n            os._exit(0)"
    ),
    "one that runs another program": (
        "if os.fork() == 0:\n    os.execv(sys.executable, [sys.executable, '-c', 'import ctypes, time; "
        'ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0); time.sleep(600)\'])\ntime.sleep(0.3)'
    ),
}


@pytest.fixture
def name() -> str:
    """A name for all processes of a program: the kernel keeps fifteen characters."""
    return f"g{secrets.token_hex(6)}"


@pytest.fixture(autouse=True)
def clean(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look for processes and folders that are left of a program; other tests have programs at the same time."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert rungs.processes(name) == []
    assert list(Path(os.environ["TMPDIR"]).glob("gspo-sandbox-*")) == []


def run(kind: str, code: str, name: str, **settings: float) -> Outcome:
    program = rungs.NAMED.replace("{name}", name) + code.replace("{name}", name)
    return rungs.sandbox(kind, **{**SMALL, **settings}).run(program)


@pytest.mark.parametrize("what", GREEDY)
@pytest.mark.parametrize("kind", rungs.KINDS)
def test_what_uses_too_much_is_ended(kind: str, what: str, name: str) -> None:
    code, limit = GREEDY[what]
    short = {"cpu_seconds": 1.0} if limit == "cpu_seconds" else {}
    outcome = run(kind, code, name, **short)
    assert outcome.limit == limit, outcome
    assert len(outcome.stdout) <= 64 << 10 and len(outcome.stderr) <= 64 << 10
    assert outcome.timed_out == (limit == "cpu_seconds") and outcome.out_of_memory == (limit == "memory_gb")


BOMBS = {
    "processes": "while True:\n    if os.fork() == 0:\n        os.write(1, b'x')\n        time.sleep(60)",
    "processes of processes": "while os.write(1, b'x'):\n    while os.fork():\n        pass",
    "threads": (
        "import threading\n\ndef tell():\n    os.write(1, b'x')\n    time.sleep(60)\n\n"
        "while True:\n    threading.Thread(target=tell).start()"
    ),
}


@pytest.mark.parametrize("what", BOMBS)
@pytest.mark.parametrize("kind", rungs.KINDS)
def test_few_more_are_started_than_there_may_be(kind: str, what: str, name: str) -> None:
    """Every one tells that it was there; each may be starting another when they are counted.

    A bomb that is only looked at has dozens of root's processes before the first look, and may win on a busy machine.
    """
    outcome = run(kind, BOMBS[what], name)
    allowed = SMALL["processes"] + jails.OVERHEAD[kind]
    most = 2 * allowed if os.getuid() == 0 else allowed + 256
    assert outcome.limit == "processes" and len(outcome.stdout) <= most, outcome


@pytest.mark.parametrize("kind", rungs.KINDS)
def test_many_may_be_started_one_after_the_other(kind: str, name: str) -> None:
    code = (
        "import subprocess, threading\nfor n in range(100):\n"
        "    thread = threading.Thread(target=time.sleep, args=(0.001,))\n    thread.start()\n"
        "    if (child := os.fork()) == 0:\n        os._exit(n % 7)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == n % 7\n    thread.join()\n"
        "    if n % 20 == 0:\n        assert subprocess.run(['/bin/sh', '-c', 'exit 3']).returncode == 3\n"
        "print('done')\n"
    )
    outcome = run(kind, code, name)
    assert outcome.ended_well and outcome.stdout == "done\n", outcome


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("kind", rungs.KINDS)
def test_what_does_not_end_is_ended(kind: str, what: str, name: str) -> None:
    outcome = run(kind, f"print('begun', flush=True)\n{ENDLESS[what]}", name, **QUICK)
    assert (outcome.limit, outcome.status, outcome.stdout) == ("seconds", None, "begun\n"), outcome


@pytest.mark.parametrize("what", SURVIVORS)
@pytest.mark.parametrize("kind", rungs.KINDS)
def test_what_a_program_has_started_ends_with_it(kind: str, what: str, name: str) -> None:
    outcome = run(kind, f"{SURVIVORS[what]}\nprint('done')", name)
    assert outcome.ended_well and outcome.stdout == "done\n", outcome


@pytest.mark.parametrize("kind", rungs.KINDS)
def test_folders_that_come_and_go_are_no_excess(kind: str, name: str) -> None:
    """The program is stopped for a look where names change. It must notice nothing."""
    code = (
        "import subprocess, tempfile\n"
        "end, rounds = time.monotonic() + 1.0, 0\nwhile time.monotonic() < end or rounds < 20:\n"
        "    with tempfile.TemporaryDirectory() as folder:\n        os.mkdir(folder + '/d')\n"
        "        open(folder + '/d/f', 'w').write('x' * 1000)\n"
        "    if rounds % 100 == 0:\n        assert subprocess.run(['/bin/sh', '-c', 'exit 3']).returncode == 3\n"
        "    rounds += 1\nprint('done')\n"
    )
    outcome = run(kind, code, name)
    assert outcome.ended_well and (outcome.stdout, outcome.stderr) == ("done\n", ""), outcome


@pytest.mark.parametrize("kind", rungs.KINDS)
def test_no_memory_is_shared_without_a_file(kind: str, name: str) -> None:
    """Pages of such memory count for nobody once they are let go, though they stay; with a file the disk has them."""
    code = (
        "import mmap\n\ndef attempt(call):\n    try:\n        return call()[:4]\n"
        "    except OSError as error:\n        return error.errno\n\n"
        "print(attempt(lambda: mmap.mmap(-1, 4096)))\n"
        "print(attempt(lambda: mmap.mmap(-1, 4096, flags=mmap.MAP_SHARED | 2 | mmap.MAP_ANONYMOUS)))\n"
        "print(attempt(lambda: mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)) in (2, 13))\n"
        "print(attempt(lambda: mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))\n"
        "open('f', 'wb').write(b'text' * 1024)\n"
        "print(attempt(lambda: mmap.mmap(os.open('f', os.O_RDWR), 4096)))\n"
    )
    outcome = run(kind, code, name)
    zeros = str(bytes(4))
    assert outcome.stdout.split() == ["12", "12", "True", zeros, "b'text'"], outcome


@pytest.mark.parametrize("kind", rungs.KINDS)
def test_a_file_grows_no_larger_than_it_may(kind: str, name: str) -> None:
    code = "file = open('f', 'wb', buffering=0)\ntry:\n    while True:\n        file.write(bytes(100000))\n"
    code += "except OSError as error:\n    print(error.errno, os.path.getsize('f'))\n"
    code += "try:\n    os.truncate(file.fileno(), 1 << 30)\nexcept OSError as error:\n    print(error.errno)\n"
    outcome = run(kind, code, name)
    assert outcome.stdout.split() == ["27", str(1 << 20), "27"], outcome


@pytest.mark.parametrize("kind", rungs.KINDS)
@pytest.mark.parametrize("who", ["caller", "supervisor"])
def test_it_ends_where_its_supervisor_or_its_caller_is_killed(kind: str, who: str, name: str) -> None:
    program = rungs.NAMED.replace("{name}", name) + "os.fork(), os.fork()\ntime.sleep(600)"
    code = (
        "import sys\nfrom gspo_hpc.config.schema import Sandbox as Settings\n"
        "from gspo_hpc.sandbox.runner import Sandbox\n"
        "Sandbox(Settings(kind=sys.argv[1], seconds=600.0)).run(sys.argv[2])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, kind, program], stderr=subprocess.PIPE, text=True) as caller:
        deadline = time.monotonic() + 60
        while len(rungs.processes(name)) < 4:
            assert time.monotonic() < deadline and caller.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
        os.kill(caller.pid if who == "caller" else int(children[-1]), signal.SIGKILL)
        while rungs.processes(name) or list(Path(os.environ["TMPDIR"]).glob("gspo-sandbox-*")):
            assert time.monotonic() < deadline, rungs.processes(name)
            time.sleep(0.05)
        _, said = caller.communicate(timeout=60)
    if who == "supervisor":
        assert "SandboxError: the supervisor of a program gave no answer (exit status -9)" in said
