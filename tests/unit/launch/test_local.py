"""The local launcher with real processes and signals; a small script stands where the worker is."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.launch import local
from gspo_hpc.launch.local import WORKER, evaluate, export, train
from gspo_hpc.planning.plan import PlanError
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.system import processes
from gspo_hpc.system.signals import StopFlag
from gspo_hpc.training import worker as rank_of_run
from tests.folders import model_folder
from tests.immortal import immortal

ROOT = Path(__file__).parents[3]

SCRIPT = '''
import ctypes, json, os, signal, socket, subprocess, sys, time
from pathlib import Path
from gspo_hpc.system.processes import die_with_parent
from gspo_hpc.system.signals import StopFlag, signals_default_in_children

die_with_parent()
mode, command, target, *rest = sys.argv[1:]
out = Path(os.environ["TEST_OUT"])
rank = int(os.environ["RANK"])

def tell(name, value):
    temporary = out / f".{name}-{rank}"
    temporary.write_text(json.dumps(value))
    temporary.rename(out / f"{name}-{rank}")

def sleep():
    time.sleep(100)

def grandchildren():
    """One in the rank's own session, one that left it and lives under another title."""
    sleeper = [sys.executable, "-c", "import setproctitle, time; setproctitle.setproctitle('VLLM::EngineCore' * 9); "
               "print('up', flush=True); time.sleep(100)"]
    with signals_default_in_children():
        made = [subprocess.Popen(sleeper, start_new_session=own, stdout=subprocess.PIPE) for own in (False, True)]
    for child in made:
        child.stdout.readline()
    tell("children", [child.pid for child in made])
    return made

def until_stopped():
    flag = StopFlag().start()
    made = grandchildren()
    tell("up", os.getpid())
    while flag.requested is None:
        time.sleep(0.02)
    tell("stopped", flag.requested)
    sys.exit(75)

print(f"hello of rank {rank}", flush=True)
if mode == "store":
    found, kept = os.environ.get("GSPO_HPC_STORE"), ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    tell("inherited", found)
    if rank:
        tell("sockets", [str(one) for one in Path("/proc/self/fd").iterdir() if one.is_socket()])
        socket.create_connection(kept, 20).recv(1)  # nothing comes before rank 0 takes the connection
    else:
        with socket.socket() as other:
            tell("in use", other.connect_ex(kept))
            try:
                other.bind(kept)
            except OSError as error:
                tell("refused", error.errno)
        listener = socket.socket(fileno=int(found))
        tell("address", listener.getsockname()[0])
        for _ in range(2):  # its own, and that of the other rank
            listener.accept()[0].close()
elif mode == "environment":
    tell("environment", dict(os.environ) | {"argv": sys.argv[2:], "sid": os.getsid(0), "pid": os.getpid()})
elif mode == "stop":
    until_stopped()
elif mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchildren()
    tell("up", os.getpid())
    sleep()
elif mode == "early":
    tell("up", os.getpid())
    sleep()
elif mode in ("raise", "killed", "blame", "deaf", "held"):
    if rank == 0:
        if mode == "blame":
            log = os.open(Path(target) / "attempts/0001/rank-0.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 2)
            while not (out / "up-1").exists():
                time.sleep(0.01)
            raise RuntimeError("[gloo] Connection closed by peer")
        if mode == "held":
            ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: anybody may trace this process
            tell("up", os.getpid())
            sleep()
        if mode == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell("up", os.getpid())
            sleep()
        until_stopped()
    while mode != "blame" and not (out / "up-0").exists():
        time.sleep(0.02)
    while mode == "held" and not (out / "held").exists():
        time.sleep(0.02)
    if mode == "killed":
        os.kill(os.getpid(), 9)
    if mode == "blame":
        tell("up", os.getpid())
        time.sleep(0.1)  # it ends after the other one
    try:
        {}["inner"]
    except KeyError as error:
        raise ValueError("the reward file is empty\\nsecond line") from error
elif mode == "requeue":
    sys.exit(75 if rank == 0 else 0)
elif mode == "short":  # of memory, in the first attempt
    sys.exit(0 if os.environ["GSPO_HPC_ATTEMPT"] == "2" else 76 if rank == 0 else 75)
elif mode == "refused":
    if rank == 0:
        log = os.open(Path(target) / "attempts/0001/rank-0.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
    print("Traceback (most recent call last):\\n  x\\nValueError: one", file=sys.stderr)
    print("error: data.jsonl:3: no prompt\\ndata.jsonl:4: no prompt", file=sys.stderr)
    sys.exit(2)
elif mode == "code":
    sys.exit(int(os.environ["TEST_CODE"]))
else:
    sys.exit(f"unknown mode {mode}")
'''

LAUNCHER = """
import sys
from gspo_hpc.config import loader as config_file
from gspo_hpc.launch.local import train
sys.exit(train(config_file.load(sys.argv[1]), worker=sys.argv[2:]))
"""


def make_config(tmp_path: Path, *overrides: str, ranks: int = 2) -> Config:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n' * 8)
    if not (tmp_path / "model").exists():
        model_folder(tmp_path / "model")
    given = [
        f"run.dir={tmp_path / 'r'}",
        "run.max_steps=4",
        f"model.path={tmp_path / 'model'}",
        f"data.train={data}",
        "cluster.platform=cpu",
        f"cluster.gpus_per_node={ranks}",
        "batch.micro_batch_size=2",
        "batch.global_batch_size=16",
        "batch.steps_per_generation=2",
        "batch.num_generations=4",
        "reward.functions=[{function: number_match}]",
    ]
    return loader.load(None, [*given, *overrides])


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks tell what they saw."""
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "worker.py").write_text(SCRIPT)
    monkeypatch.setenv("TEST_OUT", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def worker(out: Path, mode: str) -> list[str]:
    return [sys.executable, str(out.parent / "worker.py"), mode]


def told(out: Path, name: str, rank: int) -> Any:
    return json.loads((out / f"{name}-{rank}").read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def start_launcher(tmp_path: Path, out: Path, mode: str, ranks: int = 2) -> subprocess.Popen[str]:
    path = tmp_path / "config.yaml"
    path.write_text(loader.dump(make_config(tmp_path, ranks=ranks)))
    command = [sys.executable, "-c", LAUNCHER, str(path), *worker(out, mode)]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: all((out / f"up-{rank}").exists() for rank in range(ranks)))
    return child


def family(out: Path, ranks: int = 2) -> list[int]:
    """Process ids of the ranks and of all they started."""
    pids = [told(out, "up", rank) for rank in range(ranks)]
    for rank in range(ranks):
        pids += told(out, "children", rank)
    return pids


# A run that ends by itself --------------------------------------------------------------------------------------------


def test_ranks_get_their_environment_and_the_run_is_recorded(
    tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, "cluster.threads_per_rank=3")
    assert train(config, worker=worker(out, "environment")) == 0
    seen = [told(out, "environment", rank) for rank in range(2)]
    run = RunDir(tmp_path / "r")
    for rank, environment in enumerate(seen):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1" and 1024 < int(environment["MASTER_PORT"]) < 65536
        assert environment["OMP_NUM_THREADS"] == "3" and environment["GSPO_HPC_ATTEMPT"] == "1"
        assert environment["argv"] == ["train", str(run.path)]
        assert environment["sid"] == environment["pid"]
        assert ("GSPO_HPC_STORE" in environment) == (rank == 0)
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert "hello of rank 0" in capfd.readouterr().out
    log = run.attempt(1).log_path(1)
    assert log.read_text() == "hello of rank 1\n" and log.stat().st_mode & 0o777 == 0o600
    assert json.loads(run.plan.read_text())["quantities"]["num_train_prompts"] == 4
    (record,) = run.read_attempts()
    assert (record["reason"], record["exit_code"], record["pid"]) == ("done", 0, os.getpid())
    assert run.holder() is None
    assert train(config, worker=worker(out, "environment")) == 0
    assert told(out, "environment", 1)["GSPO_HPC_ATTEMPT"] == "2"
    assert [r["reason"] for r in run.read_attempts()] == ["done", "done"]


def test_threads_default_to_the_share_of_the_cores(tmp_path: Path, out: Path) -> None:
    assert train(make_config(tmp_path), worker=worker(out, "environment")) == 0
    assert told(out, "environment", 0)["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_a_rank_that_stopped_to_be_requeued_makes_75(tmp_path: Path, out: Path) -> None:
    assert train(make_config(tmp_path), worker=worker(out, "requeue")) == 75
    assert RunDir(tmp_path / "r").read_attempts()[0]["reason"] == "stopped"


def test_ranks_that_stop_because_memory_runs_short_are_started_again(tmp_path: Path, out: Path) -> None:
    config = make_config(tmp_path, "faults.restart_above_memory=0.9")
    assert train(config, worker=worker(out, "short")) == 0
    first, second = RunDir(tmp_path / "r").read_attempts()
    assert (first["reason"], second["reason"]) == ("memory", "done")
    assert "faults.restart_above_memory (0.9)" in first["detail"]


def test_a_mistake_found_by_the_ranks_is_told_whole_and_alone(
    tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(make_config(tmp_path), worker=worker(out, "refused")) == 2
    assert capfd.readouterr().err == "gspo-hpc: data.jsonl:3: no prompt\ndata.jsonl:4: no prompt\n"
    assert RunDir(tmp_path / "r").read_attempts()[0]["reason"] == "refused"


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_takes_the_others_and_says_why(
    tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(make_config(tmp_path), worker=worker(out, "raise")) == 1
    assert told(out, "stopped", 0) == "SIGTERM"  # rank 0 could end in its own way
    assert not any(alive(pid) for pid in [told(out, "up", 0), *told(out, "children", 0)])
    line, following = capfd.readouterr().err.splitlines()
    log = tmp_path / "r" / "attempts" / "0001" / "rank-1.log"
    run = RunDir(tmp_path / "r")
    assert f"diagnose {run.path} says what to change" in following and f"logs {run.path} --errors" in following
    assert run.attempt(1).console.read_text().splitlines()[-2:] == [line, following], "logs RUN shows it"
    assert line == f"gspo-hpc: rank 1 ended with exit code 1: ValueError: the reward file is empty  (log: {log})"
    record = RunDir(tmp_path / "r").read_attempts()[0]
    assert (record["reason"], record["exit_code"]) == ("failed", 1)
    assert record["detail"] == "rank 1 ended with exit code 1: ValueError: the reward file is empty"


def test_a_rank_that_is_killed_is_named_with_the_signal(
    tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(make_config(tmp_path), worker=worker(out, "killed")) == 1
    assert "rank 1 was killed by SIGKILL (by hand, or because memory ran out)" in capfd.readouterr().err


def test_a_rank_that_fails_because_another_went_is_not_blamed(
    tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(make_config(tmp_path), worker=worker(out, "blame")) == 1
    error = capfd.readouterr().err
    assert "rank 1 ended with exit code 1: ValueError" in error and "rank 0" not in error.splitlines()[-2]


def test_a_rank_that_does_not_listen_is_killed_after_the_grace(tmp_path: Path, out: Path) -> None:
    began = time.monotonic()
    assert train(make_config(tmp_path), worker=worker(out, "deaf"), grace=0.5) == 1
    assert time.monotonic() - began < 10
    assert not alive(told(out, "up", 0))


def test_a_rank_that_not_even_a_kill_ends_is_named_and_left(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one that waits for a driver that hangs. The error of the rank that failed comes first all the same."""
    monkeypatch.setattr(local, "_REAP", 0.5)
    ended = threading.Event()

    def hold() -> None:
        wait_for((out / "up-0").exists)
        with immortal(told(out, "up", 0)):
            (out / "held").touch()
            ended.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        code = train(make_config(tmp_path), worker=worker(out, "held"), grace=0.5)
    finally:
        ended.set()
        holder.join()
    pid = told(out, "up", 0)
    left = f"rank 0: process {pid} does not end, not even on SIGKILL; its state is Z (zombie) (a hung device or disk?)"
    assert code == 1 and left in capfd.readouterr().err
    detail = RunDir(tmp_path / "r").read_attempts()[0]["detail"]
    assert detail == f"rank 1 ended with exit code 1: ValueError: the reward file is empty; {left}"


def test_a_failure_ends_a_run_within_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever does not end: a rank that ignores SIGTERM, one that SIGKILL does not end, what a guard ends."""
    parts = {
        "the rank that failed closes what it has": rank_of_run._CLOSE,
        "others may have failed before": local._SETTLE,
        "the others close what they have": local._GRACE,
        "SIGKILL": local._REAP,
        "the guard": processes._GUARD_SECONDS,
        "looks at the ranks": 2 * local._POLL,
    }
    assert sum(parts.values()) <= 30
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(local, "time", clock)
    ranks: Any = [SimpleNamespace(number=n, exit_code=lambda n=n: n or None, send=lambda signal: None) for n in (0, 1)]
    assert local._watch(ranks, StopFlag(), local._GRACE) == ([1], {1: 1})
    assert rank_of_run._CLOSE + now[0] + local._REAP + processes._GUARD_SECONDS <= sum(parts.values())


def test_a_worker_that_cannot_start_fails_the_attempt(tmp_path: Path, out: Path) -> None:
    with pytest.raises(FileNotFoundError):
        train(make_config(tmp_path), worker=[str(tmp_path / "no-such-program")])
    run = RunDir(tmp_path / "r")
    assert run.read_attempts()[0]["reason"] == "failed" and run.holder() is None


# Signals to the launcher ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "heard"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGUSR2", "SIGUSR2")])
def test_a_stop_is_passed_on_and_waited_for(tmp_path: Path, out: Path, name: str, heard: str) -> None:
    child = start_launcher(tmp_path, out, "stop")
    pids = family(out)
    assert all(alive(pid) for pid in pids)
    child.send_signal(signal.Signals[name])
    child.communicate(timeout=20)
    assert child.returncode == 75
    assert [told(out, "stopped", rank) for rank in range(2)] == [heard, heard]
    assert not any(alive(pid) for pid in pids)
    (record,) = RunDir(tmp_path / "r").read_attempts()
    assert (record["reason"], record["detail"]) == ("stopped", name)


def test_a_stop_before_the_ranks_listen_ends_them(tmp_path: Path, out: Path) -> None:
    child = start_launcher(tmp_path, out, "early")
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert child.returncode == 75 and "before it could save" in errors


def test_a_second_interrupt_ends_everything_at_once(tmp_path: Path, out: Path) -> None:
    child = start_launcher(tmp_path, out, "stubborn")
    pids = family(out)
    child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert child.poll() is None and all(alive(pid) for pid in pids)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=10)
    assert child.returncode == 1 and not any(alive(pid) for pid in pids)


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path, out: Path) -> None:
    child = start_launcher(tmp_path, out, "stubborn")
    pids = family(out)
    child.kill()
    child.wait(10)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert train(make_config(tmp_path), worker=worker(out, "environment")) == 0
    assert [r["reason"] for r in RunDir(tmp_path / "r").read_attempts()] == ["killed", "done"]


def kill_guard(launcher: subprocess.Popen[str], ranks: list[int]) -> None:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (guard,) = [int(pid) for pid in children if int(pid) not in ranks]
    os.kill(guard, signal.SIGKILL)


def test_without_the_guard_the_children_of_a_rank_end_with_it(tmp_path: Path, out: Path) -> None:
    child = start_launcher(tmp_path, out, "stop")
    kill_guard(child, [told(out, "up", rank) for rank in range(2)])
    child.terminate()
    child.wait(20)
    try:
        assert not any(alive(told(out, "children", rank)[0]) for rank in range(2))
    finally:
        processes.kill_marked(RunDir(tmp_path / "r").read_info()["run_id"])


def test_the_next_start_sweeps_up_where_the_guard_was_killed_too(
    tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start_launcher(tmp_path, out, "stubborn")
    ranks = [told(out, "up", rank) for rank in range(2)]
    pids = family(out)
    kill_guard(child, ranks)
    child.kill()
    child.wait(10)
    wait_for(lambda: not any(alive(pid) for pid in ranks))  # the kernel's work
    assert all(alive(pid) for pid in pids if pid not in ranks)
    assert train(make_config(tmp_path), worker=worker(out, "environment")) == 0
    assert not any(alive(pid) for pid in pids)
    assert "ended 4 processes that an earlier, killed start of this run had left" in capfd.readouterr().err


def test_a_second_start_does_not_touch_a_live_run(tmp_path: Path, out: Path) -> None:
    child = start_launcher(tmp_path, out, "stop")
    pids = family(out)
    with pytest.raises(ValueError, match=f"is running already: process {child.pid}"):
        train(make_config(tmp_path), worker=worker(out, "environment"))
    assert all(alive(pid) for pid in pids)
    child.terminate()
    child.communicate(timeout=20)
    assert child.returncode == 75


# Refused before anything is started -----------------------------------------------------------------------------------


def test_what_is_refused_makes_no_run_directory(tmp_path: Path, out: Path) -> None:
    fake = worker(out, "environment")
    with pytest.raises(ValueError, match=r"give also: run\.max_steps or run\.max_epochs, model\.path, "):
        train(Config(), worker=fake)
    with pytest.raises(ValueError, match=r"cluster\.nodes is 4.*gspo-hpc submit"):
        train(make_config(tmp_path, "cluster.nodes=4"), worker=fake)
    with pytest.raises(PlanError, match=r"\nnearest fix: batch\.\w+=\d+ \(gspo-hpc plan shows others\)$"):
        train(make_config(tmp_path, "batch.global_batch_size=15"), worker=fake)
    assert not (tmp_path / "r").exists()


def test_a_changed_config_starts_no_attempt(tmp_path: Path, out: Path) -> None:
    config = make_config(tmp_path)
    open_run(config)[0].append_metrics({"step": 1})
    with pytest.raises(ValueError, match=r"run\.seed: 42 -> 1"):
        train(make_config(tmp_path, "run.seed=1"), worker=worker(out, "environment"))
    assert RunDir(tmp_path / "r").read_attempts() == []


def test_a_run_that_was_refused_before_its_first_step_takes_the_fix(
    tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Processes that are left of it are ended first: they would go on to write into the new run."""
    assert train(make_config(tmp_path), worker=worker(out, "refused")) == 2
    run = RunDir(tmp_path / "r")
    assert run.read_attempts()[-1]["reason"] == "refused"
    mark = processes.mark(run.read_info()["run_id"], 1)
    left = subprocess.Popen(["sleep", "100"], env=os.environ | mark)
    fixed = make_config(tmp_path, "rollout.max_prompt_length=64")
    assert train(fixed, worker=worker(out, "environment")) == 0
    assert left.wait(timeout=10) == -signal.SIGKILL and "ended 1 processes" in capfd.readouterr().err
    assert loader.load(run.config) == fixed == run.load_config()
    assert [one["reason"] for one in run.read_attempts()] == ["refused", "done"]
    assert run.attempt(1).log_path(1).exists(), "what was refused can still be read"


# Export and evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["no config of the attempt", "no record of the attempt", "no config at all"])
def test_export_of_a_damaged_run_ends_in_one_line(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = loader.load("configs/tiny_cpu.yaml", [f"run.dir={tmp_path / 'r'}", f"model.path={tmp_path}/gone"])
    run, _ = open_run(config)
    with run.lock():
        begun = run.new_attempt(config)
    if damage == "no record of the attempt":
        (begun.path / "attempt.json").write_text("{}")
    else:
        begun.config.unlink()
    if damage == "no config at all":
        run.config.unlink()
    assert export(run.path, None, tmp_path / "out") == 2
    err = capfd.readouterr().err
    expected = f"{run.config}: no such config file" if damage == "no config at all" else f"{tmp_path}/gone"
    assert [line for line in err.splitlines() if line.startswith("error: ")] and expected in err
    assert "Traceback" not in err
    assert not (run.path / "export.log").exists(), "there is nothing in it that the line does not say"


def test_export_and_eval_hand_their_arguments_over(tmp_path: Path, out: Path) -> None:
    fake = worker(out, "environment")
    assert export("runs/a", 7, "x y", worker=fake) == 0
    environment = told(out, "environment", 0)
    assert environment["argv"] == ["export", "runs/a", "--step", "7", "--out", "x y"]
    assert environment["WORLD_SIZE"] == "1" and "GSPO_HPC_ATTEMPT" not in environment
    assert export("runs/a", None, "o", worker=fake) == 0
    assert told(out, "environment", 0)["argv"] == ["export", "runs/a", "--out", "o"]
    assert evaluate("runs/a", 0, ["eval.samples=2"], True, worker=fake) == 0
    assert told(out, "environment", 0)["argv"] == ["eval", "runs/a", "--step", "0", "--json", "eval.samples=2"]
    assert evaluate("runs/a", None, ["a.b=1"], False, Path("kept.jsonl"), worker=fake) == 0
    assert told(out, "environment", 0)["argv"] == ["eval", "runs/a", "--out", "kept.jsonl", "a.b=1"]
    assert evaluate(Path("m.yaml"), None, [], False, worker=fake) == 0
    assert told(out, "environment", 0)["argv"] == ["eval", "m.yaml"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (75, 75), (1, 1), (3, 1)])
def test_the_workers_exit_code_comes_through(
    out: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    monkeypatch.setenv("TEST_CODE", str(code))
    assert evaluate("t", None, [], False, worker=worker(out, "code")) == expected


def test_a_stopped_evaluation_leaves_nothing(tmp_path: Path, out: Path) -> None:
    code = (
        "import sys; from gspo_hpc.launch.local import evaluate; "
        "sys.exit(evaluate('t', 0, [], False, worker=sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *worker(out, "stubborn")]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (out / "up-0").exists())
    pids = family(out, ranks=1)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=10)
    assert child.returncode == 1 and "stopped by SIGINT" in errors
    assert not any(alive(pid) for pid in pids)


# The user side stays light, orphans -----------------------------------------------------------------------------------


def test_the_launcher_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'vllm', 'megatron', 'wandb', 'transformers'}"
    code = f"import sys, gspo_hpc.launch.local; print({heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"


def test_the_worker_command_is_this_package() -> None:
    assert WORKER == (sys.executable, "-P", "-m", "gspo_hpc.training.worker")


def test_a_child_whose_parent_is_gone_already_does_not_begin(out: Path) -> None:
    code = "from gspo_hpc.system.processes import die_with_parent; die_with_parent({}); print('alive')"
    ran = [
        subprocess.run([sys.executable, "-c", code.format(pid)], cwd=ROOT, capture_output=True, text=True, check=False)
        for pid in (os.getpid(), 1)
    ]
    assert [(r.returncode, r.stdout) for r in ran] == [(0, "alive\n"), (-signal.SIGKILL, "")]


def test_only_the_processes_of_that_run_are_found(out: Path) -> None:
    def sleeper(run_id: str) -> subprocess.Popen[bytes]:
        environment = os.environ | processes.mark(run_id, 1)
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env=environment)

    mine, other = sleeper("test-run-a"), sleeper("test-run-ab")
    try:
        wait_for(lambda: processes.marked("test-run-a") == [mine.pid])
        assert processes.marked("test-run-a", 1) == [mine.pid] and processes.marked("test-run-a", 11) == []
        assert processes.kill_marked("test-run-a") == 1
        assert mine.wait(5) == -signal.SIGKILL and other.poll() is None
        assert processes.kill_marked("test-run-a") == 0
    finally:
        for child in (mine, other):
            child.kill()
            child.wait()


def test_processes_in_another_user_namespace_are_left_to_those_who_see_them(out: Path) -> None:
    """A rank in a container of its own cannot read their marks, and goes on; from the host they are found."""
    own = ["unshare", "--user", "--map-current-user"]
    if (tried := subprocess.run([*own, "true"], capture_output=True, text=True)).returncode:
        pytest.xfail(f"this machine gives no namespaces: {tried.stderr}")
    environment = os.environ | processes.mark("test-run-c", 1)
    sleeper = subprocess.Popen([*own, sys.executable, "-c", "import time; time.sleep(100)"], env=environment)
    look = "from gspo_hpc.system.processes import kill_marked; print(kill_marked('test-run-c', 1))"
    try:
        namespace = os.readlink("/proc/self/ns/user")
        wait_for(lambda: os.readlink(f"/proc/{sleeper.pid}/ns/user") != namespace)
        found = subprocess.run([*own, sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True)
        assert (found.stdout, found.stderr) == ("0\n", "") and sleeper.poll() is None
        assert processes.kill_marked("test-run-c", 1) == 1
        assert sleeper.wait(5) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()


def test_what_is_only_planned_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can be planned, but this version does not train it"):
        train(make_config(tmp_path, "model.path=google/gemma-3-27b-it"))
    assert not (tmp_path / "r").exists()


def test_malformed_rows_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": 7}\n' * 4)
    with pytest.raises(ValueError, match=r"data\.jsonl:2"):
        train(config)
    assert not (tmp_path / "r").exists()


def test_all_ranks_are_killed_before_one_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that does not die uses up the time that all of them have: the others must have been ended by then."""
    order: list[str] = []

    class Ended:
        def __init__(self, number: int) -> None:
            self.number = number

        def kill(self) -> None:
            order.append(f"kill {self.number}")

        def end(self, deadline: float) -> str | None:
            order.append(f"end {self.number}")
            return "rank 0: stays" if self.number == 0 else None

    ranks: Any = [Ended(0), Ended(1), Ended(2)]
    assert local._end_all(ranks) == ["rank 0: stays"]
    assert order == ["kill 0", "kill 1", "kill 2", "end 0", "end 1", "end 2"]
    assert "rank 0: stays" in capsys.readouterr().err


def test_a_rank_alone_is_given_no_port_that_another_process_may_take() -> None:
    assert local._environment(1, None)["MASTER_PORT"] == "0"


def test_the_port_where_ranks_meet_is_never_free_for_others(tmp_path: Path, out: Path) -> None:
    """A port that is found first and listened at later is another process's on a busy machine."""
    assert train(make_config(tmp_path), worker=worker(out, "store")) == 0
    assert told(out, "inherited", 0) is not None and told(out, "inherited", 1) is None
    assert told(out, "in use", 0) == 0 and told(out, "refused", 0) in (errno.EADDRINUSE, errno.EINVAL)
    assert told(out, "address", 0) == "127.0.0.1", "the store asks nobody who he is"
    assert told(out, "sockets", 1) == [], "a rank that waits for one that is gone is not told"
