"""The run directory: modes, atomic writes, a full disk, the lock between real processes, attempts, metrics, resume.

It would catch a run that goes on with another config, data or code than its steps were made with, and one without a
step that takes another config and keeps what the old one sampled. Half a minute.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.evaluation import stored
from gspo_hpc.runs import sample_record
from gspo_hpc.runs.directory import RunDir, open_locked, open_run, write_atomically
from gspo_hpc.runs.jobs import new_job_folder
from gspo_hpc.runs.journal import Journal
from gspo_hpc.system import files
from gspo_hpc.trackers.registry import tracked_run

ROOT = Path(__file__).parents[3]


def make_config(path: Path, *overrides: str) -> Config:
    data = path.with_suffix(".jsonl")
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text('{"prompt": "1+1"}\n')
    return loader.load(None, [f"run.dir={path}", f"data.train={data}", "run.max_steps=4", *overrides])


def python(code: str, *args: object, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(params=[0o000, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


# Files ----------------------------------------------------------------------------------------------------------------


def test_everything_is_private_whatever_the_umask(tmp_path: Path, umask: None) -> None:
    root = tmp_path / "r"
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    data = tmp_path / "d.jsonl"
    data.touch()
    data.chmod(0o644)
    config = loader.load(None, [f"run.dir={root}", f"data.train={data}"])
    run, _ = open_run(config)
    with run.lock():
        attempt = run.new_attempt(config)
        run.append_metrics({"step": 1})
        run.append_samples([{"step": 1, "phase": "train", "prompt": "p"}])
        files.write_json(run.plan, {})
    attempt.finish("done", 0)
    paths = [root, *root.rglob("*")]
    assert len(paths) > 10
    assert {str(p): oct(mode(p)) for p in paths if mode(p) != (0o700 if p.is_dir() else 0o600)} == {}


def test_atomic_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_atomic_write_syncs_the_file_before_and_the_directory_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def log_fsync(fd: int) -> None:
        events.append("sync " + ("dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"{os.fstat(fd).st_size} bytes"))
        fsync(fd)

    def log_rename(source: Any, target: Any) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "rename", log_rename)
    write_atomically(tmp_path / "a", "12345")
    assert events == ["sync 5 bytes", "rename", "sync dir"]


def test_atomic_write_does_not_follow_a_planted_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("safe")
    monkeypatch.setattr("secrets.token_hex", lambda size: "x")
    (tmp_path / ".a.x.tmp").symlink_to(victim)
    with pytest.raises(OSError):
        write_atomically(tmp_path / "a", "bad")
    assert victim.read_text() == "safe"


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1', "", '{"a": Infinity}'])
def test_read_json_is_strict(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: not valid JSON"):
        files.read_json(path)


def test_json_roundtrip_and_plain_numbers(tmp_path: Path) -> None:
    value = {"a": np.float32(0.5), "b": [np.int64(3), float("nan")], "c": (True, None, "ä"), "d": -np.inf}
    files.write_json(tmp_path / "x", value)
    assert files.read_json(tmp_path / "x") == {"a": 0.5, "b": [3, None], "c": [True, None, "ä"], "d": None}
    assert files.read_json(tmp_path / "x")["c"][0] is True


# A full disk ----------------------------------------------------------------------------------------------------------

FILL = """
import json, os, resource, sys
from pathlib import Path
from gspo_hpc.runs.journal import Journal, read_journals
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.evaluation import stored
from gspo_hpc.runs import sample_record
from gspo_hpc.runs.directory import RunDir, write_atomically
import numpy as np
root, limit = Path(sys.argv[1]), int(sys.argv[2])
run = RunDir(root)
write_atomically(root / "a", "old")
run.append_metrics({"step": 1})
journal = Journal(root / "j", 0, fingerprint="f", rollout=0)
ints, floats = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
def group(slot, text):
    return Group(slot, Prompt(0, ints, text, {}), (Completion(ints, floats, "", "stop", 1),))
journal.append([group(0, "small")])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
errors = []
before = [run.metrics.stat().st_size, journal.path.stat().st_size]
for write in (
    lambda: write_atomically(root / "a", "x" * 400_000),
    lambda: run.append_metrics({"step": 2, "text": "x" * 400_000}),
    lambda: journal.append([group(1, "x" * 400_000)]),
):
    try:
        write()
        errors.append(None)
    except OSError as error:
        errors.append([error.errno, error.filename, error.strerror])
sizes = [run.metrics.stat().st_size, journal.path.stat().st_size]
run.append_metrics({"step": 3})
journal.append([group(2, "small")])
print(json.dumps({
    "errors": errors,
    "grown": sizes != before,
    "a": (root / "a").read_text(),
    "left": sorted(p.name for p in root.iterdir()),
    "steps": [record["step"] for record in run.read_metrics()],
    "slots": sorted(read_journals(root / "j", "f")),
}))
"""


def check_full(root: Path, limit: int, code: int) -> None:
    child = python(FILL, root, limit)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    result = json.loads(out)
    assert [error[0] for error in result["errors"]] == [code] * 3
    assert [Path(error[1]).name for error in result["errors"]] == ["a", "metrics.jsonl", "rank-0000.journal"]
    assert all("free some space" in error[2] and "\n" not in error[2] for error in result["errors"])
    assert result["a"] == "old" and not result["grown"]
    assert result["left"] == ["a", "j", "metrics.jsonl"]
    assert result["steps"] == [1, 3]
    assert result["slots"] == [0, 2]


def test_a_file_size_limit_leaves_no_partial_file(tmp_path: Path) -> None:
    check_full(tmp_path, 100_000, errno.EFBIG)


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(small)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount; the test with a file size limit covers the same code")
    try:
        check_full(small, 0, errno.ENOSPC)
    finally:
        subprocess.run(["umount", small], check=True)


# The lock -------------------------------------------------------------------------------------------------------------

HOLD = """
import sys
from gspo_hpc.runs.directory import RunDir
lock = RunDir(sys.argv[1]).lock()
lock.describe(7)
print("held", flush=True)
sys.stdin.readline()
lock.close()
print("released", flush=True)
sys.stdin.readline()
"""


def test_a_live_run_is_refused_with_who_holds_it(tmp_path: Path) -> None:
    run, _ = open_run(make_config(tmp_path / "r"))
    assert run.holder() is None
    child = python(HOLD, run.path)
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "held\n"
    who = run.holder()
    assert who is not None and (who["pid"], who["attempt"]) == (child.pid, 7)
    with pytest.raises(ValueError, match=rf"is running already: process {child.pid} on .*attempt 7"):
        run.lock()
    with pytest.raises(ValueError, match="is running already"):
        open_run(make_config(tmp_path / "r"))
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "released\n"  # while the process lives on
    assert run.holder() is None
    with run.lock():
        assert run.holder() is not None
    child.communicate("\n", timeout=10)


def test_a_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    run, _ = open_run(make_config(tmp_path / "r"))
    child = python(HOLD, run.path)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=10)
    assert str(child.pid) in (run.path / "lock").read_text()  # it could not clean up
    assert run.holder() is None
    with run.lock() as lock:
        lock.describe(8)
        assert (run.holder() or {})["pid"] == os.getpid()


def test_the_lock_does_not_pass_into_started_processes(tmp_path: Path) -> None:
    run, _ = open_run(make_config(tmp_path / "r"))
    with run.lock():
        child = python("input()")
    with run.lock():  # would be refused if the child had the lock's file open
        pass
    child.communicate("\n", timeout=10)


def test_only_one_of_many_simultaneous_starts_gets_the_run(tmp_path: Path) -> None:
    run, _ = open_run(make_config(tmp_path / "r"))
    children = [python(HOLD, run.path, stderr=subprocess.PIPE) for _ in range(4)]
    held = []
    for child in children:
        assert child.stdout is not None
        held.append(child.stdout.readline() == "held\n")
    assert sum(held) == 1
    for child in children:
        child.kill()
        child.communicate()


# Attempts -------------------------------------------------------------------------------------------------------------


def test_attempts_are_numbered_and_say_how_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    config = make_config(tmp_path / "r")
    run, _ = open_run(config)
    with run.lock():
        first = run.new_attempt(config)
        first.finish("stopped", 75, "SIGTERM")
    with run.lock():
        run.new_attempt(config)  # killed: never finished
    with run.lock() as lock:
        third = run.new_attempt(config)
        lock.describe(third.number)
        records = run.read_attempts()
        assert [r["reason"] for r in records] == ["stopped", "killed", "running"]
        assert records[0]["exit_code"] == 75 and records[0]["detail"] == "SIGTERM" and records[0]["ended"]
        assert records[0]["pid"] == os.getpid() and records[0]["slurm_job_id"] == "4711"
        assert records[0]["versions"]["python"].startswith("3.")
    assert [r["reason"] for r in run.read_attempts()] == ["stopped", "killed", "killed"]
    assert third.path == tmp_path / "r" / "attempts" / "0003"
    assert third.log_path(2) == third.path / "rank-2.log"


def test_an_attempt_killed_before_its_record_counts_as_killed(tmp_path: Path) -> None:
    config = make_config(tmp_path / "r")
    run, _ = open_run(config)
    (run.attempts / "0001").mkdir()
    assert [(r["attempt"], r["reason"]) for r in run.read_attempts()] == [(1, "killed")]
    assert run.load_config() == config
    assert run.new_attempt(config).number == 2


def test_a_config_that_an_attempt_lacks_is_the_runs(tmp_path: Path) -> None:
    config = make_config(tmp_path / "r")
    run, _ = open_run(config)
    with run.lock():
        run.new_attempt(config).config.unlink()
    assert run.load_config(overrides=("run.seed=77",)).run.seed == 77
    assert run.load_config() == config


def test_a_metrics_line_without_a_step_is_refused_with_its_place(tmp_path: Path) -> None:
    run, _ = open_run(make_config(tmp_path / "r"))
    run.append_metrics({"step": 1})
    with run.metrics.open("a") as file:
        file.write('{"reward": 1}\n')
    for read in (run.read_metrics, lambda: run.truncate_metrics(1)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: has no whole number `step`"):
            read()


# Metrics --------------------------------------------------------------------------------------------------------------


def make_run(tmp_path: Path) -> RunDir:
    return open_run(make_config(tmp_path / "r"))[0]


def test_metrics_roundtrip_with_numbers_that_are_not_finite(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run.read_metrics() == []
    run.append_metrics({"step": 1, "loss": float("nan"), "gap": np.float32("inf"), "n": np.int64(3), "x": 0.1})
    run.append_metrics({"step": 2})
    assert run.read_metrics() == [{"step": 1, "loss": None, "gap": None, "n": 3, "x": 0.1}, {"step": 2}]
    assert len(run.metrics.read_text().splitlines()) == 2


def test_metrics_torn_at_every_byte_lose_only_the_last_line_and_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (1, 2):
        run.append_metrics({"step": step, "reward": 0.5})
    whole = run.metrics.read_bytes()
    begin = whole.index(b"\n") + 1
    for size in range(begin, len(whole)):
        run.metrics.write_bytes(whole[:size])
        assert [r["step"] for r in run.read_metrics()] == [1]
        run.append_metrics({"step": 9})
        assert [r["step"] for r in run.read_metrics()] == [1, 9]


def test_a_torn_line_longer_than_what_follows_goes_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.append_metrics({"step": 1})
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 2, "text": "' + b"x" * 200_000)
    run.append_metrics({"step": 2})
    assert run.metrics.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_metrics_are_not_written_through_a_planted_link(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "victim").write_text("safe\n")
    run.metrics.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        run.append_metrics({"step": 1})
    assert (tmp_path / "victim").read_text() == "safe\n"


@pytest.mark.parametrize(
    "name", ["attempts", "attempts/0001", "rollouts", "rollouts/000003", "record", "evaluations", "spending", "jobs"]
)
def test_a_run_whose_folders_lead_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    """It writes into them and removes what is old, and a run directory may be of another's making."""
    config = make_config(tmp_path / "run")
    run, _ = open_run(config)
    run.new_attempt(config)
    (run.rollouts / "000003").mkdir()
    place, outside = run.path / name, tmp_path / "outside"
    if place.exists():
        place.rename(outside)
    outside.mkdir(exist_ok=True)
    place.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(ValueError, match=f"run/{name} is a link, and a run writes into its own directory") as caught:
        open_run(config)
    assert len(str(caught.value).splitlines()) == 1 and sorted(outside.rglob("*")) == before
    place.unlink()
    assert open_run(config)[1], "the fix of the message"


def test_no_command_writes_into_a_folder_of_a_run_that_leads_elsewhere(tmp_path: Path) -> None:
    """Evaluations, submissions and records of samples are written without the run's lock."""
    run, outside = make_run(tmp_path), tmp_path / "outside"
    outside.mkdir()
    for folder, write in {
        run.evaluations: lambda: stored.write_into(run, 4, []),
        run.path / "jobs": lambda: new_job_folder(run.path),
        run.record: lambda: sample_record.append(run.record / "rank-0.jsonl.gz", b""),
    }.items():
        folder.symlink_to(outside)
        with pytest.raises(ValueError, match=f"{folder.name} is a link, and a run writes into its own directory"):
            write()
        folder.unlink()
        write()
    assert not any(outside.iterdir())


def test_a_run_may_be_named_by_a_link_and_have_its_checkpoints_on_another_disk(tmp_path: Path) -> None:
    run, _ = open_run(make_config(tmp_path / "run"))
    run.checkpoints.rename(tmp_path / "large")
    run.checkpoints.symlink_to(tmp_path / "large")
    (tmp_path / "link").symlink_to(run.path)
    assert open_run(make_config(tmp_path / "link", f"data.train={tmp_path / 'run.jsonl'}"))[1]


def test_metrics_damaged_in_the_middle_are_told_by_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for bad in ("{", "[]", "", "null", '{"step": 2, "loss": NaN}', '{"a": ' * 3000 + "1" + "}" * 3000):
        run.metrics.write_text('{"step": 1}\n' + bad + '\n{"step": 3}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a JSON object"):
            run.read_metrics()


def test_truncate_metrics_drops_later_steps_and_the_torn_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.truncate_metrics(3)
    assert not run.metrics.exists()
    for step in range(6):
        run.append_metrics({"step": step})
    kept = run.metrics.read_bytes().split(b"\n")[:4]
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 2')
    run.truncate_metrics(3)
    assert run.metrics.read_bytes() == b"\n".join(kept) + b"\n"


# Start and resume -----------------------------------------------------------------------------------------------------


def test_start_writes_config_and_ids_and_resume_keeps_them(tmp_path: Path) -> None:
    config = make_config(tmp_path / "deep" / "r", "run.seed=7")
    run, resumed = open_run(config)
    assert not resumed
    info = run.read_info()
    assert loader.load(run.config) == config
    assert info["seed"] == 7 and len(info["run_id"]) == 16 and len(info["data_sha256"]) == 64
    assert info["versions"]["python"]
    again, resumed = open_run(config)
    assert resumed and again.read_info() == info
    assert open_run(make_config(tmp_path / "other"))[0].read_info()["run_id"] != info["run_id"]


def test_a_changed_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    run, _ = open_run(make_config(tmp_path / "r", "optimizer.lr=1e-6"))
    run.append_metrics({"step": 1})
    with pytest.raises(ValueError) as caught:
        open_run(make_config(tmp_path / "r", "optimizer.lr=2e-6", "run.seed=1", "tracking.wandb=disabled"))
    text = str(caught.value)
    assert "  optimizer.lr: 1e-06 -> 2e-06\n" in text and "  run.seed: 42 -> 1\n" in text
    assert "tracking" not in text
    assert loader.load(run.config).optimizer.lr == 1e-6


def test_keys_that_may_change_are_kept_with_the_attempt(tmp_path: Path) -> None:
    old = make_config(tmp_path / "r")
    run, _ = open_run(old)
    run.new_attempt(old)
    new = make_config(tmp_path / "r", "run.max_steps=9", "checkpoint.keep=5")
    run, resumed = open_run(new)
    assert resumed and run.load_config() == old
    run.new_attempt(new)
    assert loader.load(run.config) == old
    assert run.load_config() == new and run.load_config(1) == old
    assert loader.load(run.attempts / "0002" / "config.yaml") == new


def test_changed_training_data_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path / "r")
    open_run(config)[0].append_metrics({"step": 1})
    data = Path(str(config.data.train))
    data.write_text(data.read_text().replace("1+1", "1+2"))
    with pytest.raises(ValueError, match=r"data\.train .* is not the file"):
        open_run(config)


def test_a_foreign_directory_or_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "thesis"
    foreign.mkdir(mode=0o755)
    foreign.chmod(0o755)
    (foreign / "chapter1.tex").write_text("x")
    with pytest.raises(ValueError, match=r"not empty, and is not a run directory \(it has chapter1\.tex\)"):
        open_run(make_config(foreign))
    assert [p.name for p in foreign.iterdir()] == ["chapter1.tex"] and mode(foreign) == 0o755
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="is a file"):
        open_run(make_config(file))
    with pytest.raises(ValueError, match="not a run directory"):
        RunDir(foreign).read_info()


OTHER = ("rollout.temperature=0.5", "optimizer.lr=2e-6")


def journaled(config: Config, rollout: int = 0) -> tuple[RunDir, Path]:
    """A run that was killed in the middle of a rollout, before its first step."""
    run, _ = open_run(config)
    run.new_attempt(config)
    folder = run.rollouts / f"{rollout:06d}"
    Journal(folder, 0, fingerprint="of the weights", rollout=rollout).close()
    run.append_metrics({"step": 0, "eval/accuracy": 0.5})
    run.append_samples([{"step": 0, "phase": "eval"}])
    (run.record / "000000").mkdir(parents=True)
    (run.path / "tensorboard").mkdir()
    (run.checkpoints / ".tmp-000001").mkdir()
    return run, folder


def test_a_run_without_a_step_takes_another_config_and_nothing_that_it_sampled(tmp_path: Path) -> None:
    """Journals name the weights only, which are the same: groups of the old temperature would be trained on."""
    old, new = make_config(tmp_path / "r"), make_config(tmp_path / "r", *OTHER)
    run, journal = journaled(old)
    before = run.read_info()
    again, resumed = open_run(new)
    assert resumed and loader.load(run.config) == new and not journal.exists() and run.rollouts.is_dir()
    assert again.read_metrics() == [] and not any(
        path.exists() for path in (run.metrics, run.samples, run.record, run.path / "tensorboard")
    )
    info = run.read_info()
    assert info["run_id"] == before["run_id"], "by which processes and jobs of the run are found"
    assert tracked_run(run, new).id == info["tracked_id"] != before["run_id"]
    assert [one["attempt"] for one in run.read_attempts()] == [1] and run.attempt(1).config.exists()
    assert info["first_attempt"] == 2
    run.new_attempt(new)
    assert open_run(new)[0].read_info() == info and run.load_config() == new


@pytest.mark.parametrize("given", [(), ("run.max_steps=9", "checkpoint.keep=5"), ("rollout.kv_cache_gb=0.5",)])
def test_a_run_without_a_step_keeps_what_it_sampled_where_the_settings_count_as_the_same(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    run, journal = journaled(make_config(tmp_path / "r"))
    info = run.read_info()
    open_run(make_config(tmp_path / "r", *given))
    assert (journal / "rank-0000.journal").exists() and run.read_info() == info
    assert run.read_metrics() == [{"step": 0, "eval/accuracy": 0.5}]


def test_a_run_without_a_step_takes_other_data_and_an_edited_reward_function(tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("def mark(completion, *, prompt, fields):\n    return 1\n")
    config = make_config(tmp_path / "r", f"reward.functions=[{{function: {code}:mark}}]")
    run, journal = journaled(config)
    first = run.read_info()
    code.write_text(code.read_text().replace("1", "0"))
    open_run(config)
    assert not journal.exists() and run.read_info()["graders_sha256"] != first["graders_sha256"]
    Path(str(config.data.train)).write_text('{"prompt": "1+2", "answer": "3"}\n')
    _, journal = run, Journal(run.rollouts / "000000", 0, fingerprint="of the weights", rollout=0)
    journal.close()
    open_run(config)
    assert not journal.path.exists() and run.read_info()["data_sha256"] != first["data_sha256"]


@pytest.mark.parametrize("kept", ["step", "000001", ".old-000001", "damaged-000001"])
def test_a_run_that_has_a_step_or_a_checkpoint_is_refused_and_left_alone(kept: str, tmp_path: Path) -> None:
    old = make_config(tmp_path / "r")
    run, journal = journaled(old)
    if kept == "step":
        run.append_metrics({"step": 1})
    else:
        (run.checkpoints / kept).mkdir()
    before = sorted(run.path.rglob("*"))
    with pytest.raises(ValueError, match=r"rollout\.temperature: 1\.0 -> 0\.5"):
        open_run(make_config(tmp_path / "r", *OTHER))
    assert loader.load(run.config) == old and sorted(run.path.rglob("*")) == before and journal.is_dir()


def test_nothing_is_begun_anew_while_somebody_holds_the_run_or_against_who_vets_it(tmp_path: Path) -> None:
    old, new = make_config(tmp_path / "r"), make_config(tmp_path / "r", *OTHER)
    run, journal = journaled(old)

    def steps(run: RunDir) -> None:
        run.append_metrics({"step": 1})  # as a process would that is ended here

    with run.lock(), pytest.raises(ValueError, match="is running already"):
        open_run(new)
    with pytest.raises(ValueError, match="job 7 is pending"):
        open_locked(new, refuse)
    with pytest.raises(ValueError, match="was started with another config"):
        open_locked(new, steps)
    assert loader.load(run.config) == old and journal.is_dir() and run.holder() is None
    _, _, lock = open_locked(old)
    with lock, pytest.raises(ValueError, match="is running already"):
        open_run(new)


def refuse(run: RunDir) -> None:
    raise ValueError("job 7 is pending")


def test_a_run_that_is_begun_anew_is_never_of_the_new_config_with_what_the_old_one_sampled(tmp_path: Path) -> None:
    """Killed at any call that changes something, it can be started with either config."""
    finished, points, seen = False, 0, set()
    while not finished:
        root = tmp_path / str(points)
        old, new = make_config(root), make_config(root, *OTHER)
        run, journal = journaled(old)
        run.evaluations.mkdir()
        for name in ("000000.jsonl", ".000000.jsonl.1a2b.tmp", ".000000-eval.jsonl.1a2b.tmp"):
            (run.evaluations / name).touch()
        first = run.read_info()
        source = tmp_path / f"{points}.yaml"
        source.write_text(loader.dump(new))
        child = python(START, source, points)
        child.communicate(timeout=60)
        finished = child.returncode == 0
        assert finished or child.returncode == -signal.SIGKILL
        is_new = loader.load(run.config) == new
        assert is_new or loader.load(run.config) == old
        kept = list(run.path.glob("rollouts/*/*.journal"))
        if is_new:
            info = run.read_info()
            assert not run.evaluations.exists()
            assert not kept and not run.metrics.exists() and info["tracked_id"] and info["first_attempt"] == 2
        seen.add((is_new, bool(kept)))
        config = old if points // 2 % 2 else new
        open_run(config)
        assert loader.load(run.config) == config and run.read_info()["run_id"] == first["run_id"]
        left = {path.name for path in run.evaluations.glob("*")}
        assert left <= {"000000.jsonl", ".000000-eval.jsonl.1a2b.tmp"} and (config == old or not left)
        assert not list(root.glob(".*")) and (config == old or not list(run.path.glob("rollouts/*/*")))
        points += 2
        assert points < 400
    assert seen == {(False, True), (False, False), (True, False)} and points > 10


START = """
import os, sys
from gspo_hpc.config import loader as config_file
from gspo_hpc.runs.directory import open_run
left = int(sys.argv[2])
def dies(real):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)
    return call
for name in ("mkdir", "open", "write", "fsync", "rename", "ftruncate", "chmod", "fchmod", "unlink", "rmdir"):
    setattr(os, name, dies(getattr(os, name)))
open_run(config_file.load(sys.argv[1]))
"""


def test_a_first_start_killed_anywhere_can_be_started_again(tmp_path: Path) -> None:
    finished = False
    points = 0
    while not finished:
        root = tmp_path / str(points)
        config = make_config(root)
        source = tmp_path / f"{points}.yaml"
        source.write_text(loader.dump(config))
        child = python(START, source, points)
        child.communicate(timeout=60)
        finished = child.returncode == 0
        assert finished or child.returncode == -signal.SIGKILL
        run, resumed = open_run(config)
        assert resumed or not finished
        assert run.read_info()["data_sha256"] and loader.load(run.config) == config
        assert not list(root.glob(".*"))
        points += 1 if finished else 4
        assert points < 400
    assert points > 20
