"""Attempts of a program in a sandbox, which it must not manage, on every rung that this machine has.

It takes about five seconds. It would catch a hole in a rung: a file that can be read or written, a socket, a signal to
another process, a system call that the filter lets through. The last test makes the ordinary attempts without a
sandbox, where they succeed: one that fails by itself would show nothing.
"""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sandbox import attacks, rungs

WORD = "a secret of the run"
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
# Attempts that succeed on any machine where nothing refuses them, and that harm nobody. The others need root, or a
# device, or are calls whose arguments the kernel would refuse; of those the error tells that the filter did.
ORDINARY = """
reads_the_run lists_the_run reads_the_run_through_a_symbolic_link reads_the_run_through_a_link_to_its_folder
reads_the_run_through_a_hard_link reads_the_run_by_way_of_dots lists_other_sandboxes writes_over_a_file
writes_beside_a_file writes_through_a_symbolic_link moves_a_file_out links_a_library_in
makes_a_file_without_a_name_among_libraries changes_the_mode_of_a_library changes_the_owner_of_a_library
changes_the_times_of_a_library writes_to_a_library cuts_a_library_off cuts_a_library_off_when_it_reads_it
reads_the_environment_of_a_process reads_the_command_of_a_process reads_files_through_a_process lists_processes
sends_a_signal_by_a_file asks_for_a_process_by_signal sends_a_signal_to_its_parent sends_a_signal_to_a_group
has_the_kernel_send_signals limits_another_process moves_another_process_to_a_core slows_another_process
leaves_its_session leaves_its_group outlives_its_parent connects_by_tcp listens sends_a_datagram
connects_to_a_unix_socket connects_to_an_abstract_socket sends_from_a_pair_of_sockets
asks_the_kernel_by_netlink makes_a_file_in_memory reserves_the_disk
finds_a_secret_in_its_environment has_inherited_a_file makes_a_program_that_changes_the_user removes_a_library
sends_a_signal
""".split()


def numbers() -> dict[str, int]:
    """The numbers of all system calls of this machine, from the kernel's header."""
    found = re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADER.read_text())
    return {name: int(number) for name, number in found}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Put there what the attempts are directed at: a run's folder, a library, sockets, and a process."""
    run, library = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("library")
    (run / "secret").write_text(WORD)
    (library / "module.py").write_text("VALUE = 1\n")
    victim = subprocess.Popen(["sleep", "600"], env={"SECRET": WORD}, start_new_session=True)
    short = f"/tmp/s{os.getpid()}"  # paths of sockets are short
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(short)
        unix.listen()
        with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
            abstract.bind(f"\0{short}")
            abstract.listen()
            datagrams.bind(f"{short}d")
            yield {
                **{"run": str(run), "secret": str(run / "secret"), "library": str(library / "module.py")},
                **{"victim": victim.pid, "port": tcp.getsockname()[1], "socket": short, "abstract": short},
                **{"datagrams": f"{short}d", "temporary": os.environ["TMPDIR"]},
                "home": [str(path) for path in Path.home().iterdir() if path.is_file()],
                **{"calls": numbers(), "word": WORD, "attempts": list(attacks.ATTEMPTS)},
            }
    for path in (short, f"{short}d"):
        os.unlink(path)
    victim.kill()
    victim.wait()


@pytest.fixture(scope="module")
def results(facts: dict[str, object]) -> dict[str, dict[str, str]]:
    """Return what became of the attempts, by the rung."""
    program = Path(attacks.__file__).read_text()
    library = os.path.dirname(str(facts["library"]))
    found = {}
    shared = os.open(str(facts["secret"]), os.O_RDONLY)
    os.set_inheritable(shared, True)
    os.environ["RUN_SECRET"] = WORD
    try:
        for kind in rungs.KINDS:
            done = rungs.sandbox(kind, readable=[library], seconds=60.0).run(program, json.dumps(facts))
            assert done.ended_well, done
            found[kind] = json.loads(done.stdout)
    finally:
        del os.environ["RUN_SECRET"]
        os.close(shared)
    return found


@pytest.mark.parametrize("name", attacks.ATTEMPTS)
@pytest.mark.parametrize("kind", rungs.KINDS)
def test_attempts_are_refused(results: dict[str, dict[str, str]], kind: str, name: str) -> None:
    told = results[kind][name]
    assert told.startswith("refused"), told
    if name.startswith("calls_"):
        assert os.strerror(errno.ENOSYS) in told  # by the filter, and not for its arguments


@pytest.mark.parametrize("kind", rungs.KINDS)
def test_a_program_has_no_privileges(kind: str) -> None:
    name = f"p{secrets.token_hex(6)}"
    program = rungs.NAMED.replace("{name}", name) + "print('begun', flush=True)\ntime.sleep(60)"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(rungs.sandbox(kind, seconds=3.0).run, program)
        while not (found := rungs.processes(name)):
            assert not running.done(), running.result()
            time.sleep(0.02)
        lines = Path(f"/proc/{found[0]}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        assert running.result().limit == "seconds"
    assert {name: int(status[f"Cap{name}"], 16) for name in ("Eff", "Prm", "Inh", "Bnd", "Amb")} == dict.fromkeys(
        ("Eff", "Prm", "Inh", "Bnd", "Amb"), 0
    )
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_nothing_was_changed(facts: dict[str, object], results: dict[str, dict[str, str]]) -> None:
    assert results and Path(str(facts["secret"])).read_text() == WORD
    assert os.listdir(str(facts["run"])) == ["secret"]
    library = Path(str(facts["library"]))
    assert library.read_text() == "VALUE = 1\n" and not library.stat().st_mode & 0o022
    assert Path(f"/proc/{facts['victim']}/stat").read_text().split()[2] == "S"
    assert not any(Path(place, "gspo-attack").exists() for place in ("/tmp", "/dev/shm", "/var/tmp"))


def test_ordinary_attempts_succeed_without_a_sandbox(facts: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "secret").write_text(WORD)
    (tmp_path / "module.py").write_text("VALUE = 1\n")
    shared = os.open(tmp_path / "secret", os.O_RDONLY)
    with subprocess.Popen(["sleep", "600"], env={"SECRET": WORD}, start_new_session=True) as victim:
        given = facts | {"run": str(tmp_path), "secret": str(tmp_path / "secret"), "victim": victim.pid}
        given |= {"library": str(tmp_path / "module.py"), "attempts": ORDINARY}
        done = subprocess.run(
            [sys.executable, attacks.__file__],
            input=json.dumps(given),
            env=os.environ | {"RUN_SECRET": WORD},
            cwd=tmp_path / "own",
            pass_fds=(shared,),
            capture_output=True,
            text=True,
            timeout=60,
        )
        victim.kill()
    os.close(shared)
    assert done.returncode == 0, done.stderr
    assert {name: told for name, told in json.loads(done.stdout).items() if not told.startswith("succeeded")} == {}
