"""Ordinary programs in the sandbox, on every rung and behind a service: what they get, and what comes back.

It takes about ten seconds. It would catch a rung that refuses what programs need (modules with libraries in C, threads,
asyncio, other programs, files of their own), an output that is lost or garbled, and an exit status that is another one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from gspo_hpc.sandbox.outcomes import Outcome
from gspo_hpc.sandbox.runner import Sandbox
from tests.unit.sandbox import rungs

KINDS = (*rungs.KINDS, "http")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with rungs.service(rungs.sandbox(rungs.KINDS[-1])) as address:
        yield address


@pytest.fixture(params=KINDS)
def box(request: pytest.FixtureRequest, url: str) -> Sandbox:
    """The sandbox on a rung."""
    return rungs.sandbox(request.param, url=url)


ORDINARY = {
    "standard input": ("print(input()[::-1]); print(input())", "cba\n2\n"),
    "input without an end of line": ("import sys; print(repr(sys.stdin.read()))", "'abc\\n2'\n"),
    "Unicode": ("print('é 中 \\U0001f600')", "é 中 \U0001f600\n"),
    "bytes that are no text": ("import os; os.write(1, b'a\\xffb')", "a\ufffdb"),
    "no newline": ("print('x', end='')", "x"),
    "much output": ("print('x' * 200000)", "x" * 200000 + "\n"),
    "a library in C": ("import numpy; print(int(numpy.arange(4) @ numpy.arange(4)))", "14\n"),
    "threads": (
        "import threading\nthreading.stack_size(1 << 27)\nfound = []\n"
        "thread = threading.Thread(target=found.append, args=(1,))\nthread.start()\nthread.join()\nprint(found)",
        "[1]\n",
    ),
    "asyncio": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    print('slept')\nasyncio.run(main())",
        "slept\n",
    ),
    "a process": ("import os\nif os.fork() == 0:\n    os._exit(3)\nprint(os.wait()[1] >> 8)", "3\n"),
    "another program": ("import subprocess; subprocess.run(['/bin/sh', '-c', 'echo $((6 * 7))'])", "42\n"),
    "files": (
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    path = folder + '/f'\n"
        "    open(path, 'w').write('text')\n    os.rename(path, path + '2')\n    print(open(path + '2').read())\n"
        "print(os.listdir('.'))",
        "text\n['main.py']\n",
    ),
    "room for a file": (
        "import os\nwith open('f', 'wb') as file:\n    os.posix_fallocate(file.fileno(), 0, 5000)\n"
        "print(os.path.getsize('f'))",
        "5000\n",
    ),
    "a recursion": (
        "import sys\nsys.setrecursionlimit(100000)\ndef f(n):\n    return n and 1 + f(n - 1)\nprint(f(20000))",
        "20000\n",
    ),
    "its own module": ("import sys; print(__name__, sys.argv, __file__[-8:])", "__main__ ['main.py'] /main.py\n"),
    "the order of sets": ("print(hash('a') == hash('a'), list({'a', 'b', 'c', 'd'}))", None),
    "time": ("import time; time.sleep(0.01); print(time.time() > 1e9, time.process_time() < 60)", "True True\n"),
    "chance": ("import random, secrets, uuid; print(len(secrets.token_bytes(8)), len(str(uuid.uuid4())))", "8 36\n"),
    "halves of characters": ("print(len('" + "\ud83d" + "'))", "1\n"),
}


@pytest.mark.parametrize("what", ORDINARY)
def test_programs_run(box: Sandbox, what: str) -> None:
    program, expected = ORDINARY[what]
    outcome = box.run(program, "abc\n2")
    assert outcome.ended_well and outcome.stderr == "", outcome
    if expected is None:  # not known beforehand, but the same each time: a resumed run grades alike
        expected = box.run(program).stdout
    assert outcome.stdout == expected and outcome.seconds > 0


ENDS: dict[str, tuple[str, dict[str, object]]] = {
    "an exit status": ("import sys; print('x'); sys.exit(7)", {"status": 7, "stdout": "x\n"}),
    "an error": ("1 / 0", {"status": 1, "does_not_compile": False}),
    "a syntax error": ("print('never')\ndef f(:", {"status": 1, "does_not_compile": True, "stdout": ""}),
    "an indentation": ("if 1:\nprint('never')", {"status": 1, "does_not_compile": True}),
    "a syntax error of its own": ("raise SyntaxError('mine')", {"status": 1, "does_not_compile": False}),
    "a syntax error of another text": ("eval('1 +')", {"status": 1, "does_not_compile": False}),
    "no memory": ("kept = [0] * 10**10", {"out_of_memory": True, "timed_out": False, "limit": "memory_gb"}),
    "a signal": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", {"status": -9}),
    "a crash": ("import ctypes; ctypes.string_at(0)", {"status": -11}),
    "a stop in C": ("import os; os.abort()", {"status": -6}),
}


@pytest.mark.parametrize("what", ENDS)
def test_how_programs_end(box: Sandbox, what: str) -> None:
    program, expected = ENDS[what]
    outcome = box.run(program)
    assert {name: getattr(outcome, name) for name in expected} == expected, outcome
    assert not outcome.ended_well


def test_time_that_a_call_shortens(box: Sandbox) -> None:
    outcome = box.run("import time; print('begun', flush=True); time.sleep(60)", seconds=3.0)
    assert outcome.timed_out and outcome.status is None and outcome.stdout == "begun\n", outcome


def test_programs_side_by_side_do_not_meet(box: Sandbox) -> None:
    import concurrent.futures

    program = "import os, time\nopen(f'f{input()}', 'w')\ntime.sleep(0.5)\nprint(sorted(os.listdir('.')))"
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        outcomes: list[Outcome] = list(pool.map(functools.partial(box.run, program), "012"))
    assert [one.stdout for one in outcomes] == [f"['f{n}', 'main.py']\n" for n in range(3)]
