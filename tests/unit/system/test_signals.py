"""Signals raise the flag at once, are never lost, and mean in children what they always mean. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

HEAD = """
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
from gspo_hpc.system.signals import SIGNALS, StopFlag, signals_default_in_children
flag = StopFlag().start()
def wait(seconds=10.0):
    end = time.monotonic() + seconds
    while flag.requested is None and time.monotonic() < end:
        time.sleep(0.01)
    return flag.requested
"""


def start(body: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HEAD + body],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def finish(child: subprocess.Popen[str]) -> tuple[int, list[str]]:
    out, _ = child.communicate(timeout=30)
    return child.returncode, out.split()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_each_signal_raises_the_flag_with_its_name_and_time(name: str) -> None:
    child = start("print('ready', flush=True)\nprint(wait(), flag.requested_at, flag.forced)")
    before = time.time()
    child.send_signal(signal.Signals[name])
    code, (told, at, forced) = finish(child)
    assert (code, told, forced) == (0, name, "False")
    assert before - 0.1 <= float(at) <= time.time()


def test_without_a_signal_nothing_is_requested() -> None:
    child = start("print('ready', flush=True)\nsys.stdin.readline()\nprint(flag.requested, flag.requested_at)")
    assert finish(child) == (0, ["None", "None"])


def test_the_flag_rises_while_the_main_thread_is_inside_c_code() -> None:
    """As in a collective: no Python handler runs there before it returns."""
    body = """
times = []
def look():
    while flag.requested is None:
        time.sleep(0.01)
    times.append(time.monotonic())
threading.Thread(target=look).start()
print('ready', flush=True)
end = time.monotonic() + 2.0
libc = ctypes.CDLL(None)
while (left := end - time.monotonic()) > 0:
    libc.usleep(int(left * 1e6))
print(time.monotonic() - times[0])
"""
    child = start(body)
    time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    code, (ahead,) = finish(child)
    assert code == 0 and float(ahead) > 1.0


def test_the_first_signal_names_the_reason() -> None:
    child = start("print('ready', flush=True)\nwait()\nsys.stdin.readline()\nprint(flag.requested)")
    child.send_signal(signal.SIGUSR2)
    time.sleep(0.5)
    child.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert finish(child) == (0, ["SIGUSR2"])


def test_a_second_interrupt_ends_at_once_and_a_second_term_does_not() -> None:
    child = start("print('ready', flush=True)\ntime.sleep(60)")
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        child.send_signal(number)
        time.sleep(0.5)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=5)
    assert child.returncode == 130 and "interrupted twice" in errors


def test_a_second_interrupt_can_be_only_told() -> None:
    body = """
flag.close()
flag = StopFlag(exit_on_second_interrupt=False).start()
print('ready', flush=True)
end = time.monotonic() + 10
while not flag.forced and time.monotonic() < end:
    time.sleep(0.01)
print(flag.requested, flag.forced)
"""
    child = start(body)
    child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    assert finish(child) == (0, ["SIGINT", "True"])


def test_children_have_default_signals_and_do_not_swallow_term() -> None:
    body = """
with signals_default_in_children():
    good = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
                            stdout=subprocess.PIPE)
    spawned = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    spawned.start()
good.stdout.readline()
for pid in (good.pid, spawned.pid):
    fields = dict(line.split(":\\t", 1) for line in open(f"/proc/{pid}/status").read().splitlines())
    print(int(fields["SigBlk"], 16) & sum(1 << (int(s) - 1) for s in SIGNALS))
good.terminate()
spawned.terminate()
spawned.join(10)
print(good.wait(10), spawned.exitcode)
print(len(set(SIGNALS) - signal.pthread_sigmask(signal.SIG_BLOCK, [])), flag.requested)
"""
    child = start(
        f"print('ready', flush=True)\nif __name__ == '__main__':\n    {body.strip().replace(chr(10), chr(10) + '    ')}"
    )
    assert finish(child) == (0, ["0", "0", "-15", "-15", "0", "None"])


def test_a_signal_while_children_are_started_is_not_lost() -> None:
    body = """
with signals_default_in_children():
    print('ready', flush=True)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        time.sleep(0.01)
print(flag.requested)
"""
    child = start(body)
    time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    assert finish(child) == (0, ["SIGTERM"])


def test_the_resource_tracker_unblocking_signals_does_not_end_the_process() -> None:
    body = """
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
print('ready', flush=True)
sys.stdin.readline()
print(flag.requested)
print(len(set(SIGNALS) - signal.pthread_sigmask(signal.SIG_BLOCK, [])))
"""
    child = start(body)
    child.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert finish(child) == (0, ["SIGTERM", "0"])


def test_close_puts_everything_back() -> None:
    body = """
flag.close()
print('ready', flush=True)
time.sleep(60)
"""
    child = start(body)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == -signal.SIGTERM


def test_a_flag_that_was_not_started_leaves_the_mask_alone() -> None:
    """Signals stayed blocked in the process, and in every child that it started later."""
    from gspo_hpc.system.signals import SIGNALS, StopFlag

    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        assert StopFlag().requested is None
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {*SIGNALS}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_close_in_this_process_leaves_mask_and_handlers() -> None:
    from gspo_hpc.system.signals import SIGNALS, StopFlag

    before = signal.pthread_sigmask(signal.SIG_BLOCK, []), [signal.getsignal(number) for number in SIGNALS]
    flag = StopFlag().start()
    os.kill(os.getpid(), signal.SIGUSR1)
    end = time.monotonic() + 10
    while flag.requested is None and time.monotonic() < end:
        time.sleep(0.01)
    flag.close()
    assert flag.requested == "SIGUSR1"
    assert (signal.pthread_sigmask(signal.SIG_BLOCK, []), [signal.getsignal(number) for number in SIGNALS]) == before
