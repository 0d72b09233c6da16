"""What is handed to Slurm: the script to the letter, and nothing that could be taken for more."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import loader, paths
from gspo_hpc.config.schema import Config
from gspo_hpc.launch.slurm import commands, submit
from gspo_hpc.launch.slurm.commands import SlurmError
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.runs.directory import RunDir
from tests.folders import model_folder

GOLDEN = Path(__file__).parent / "golden"
SMALL = {
    "run": {"name": "demo", "dir": "/runs/demo", "max_steps": 10},
    "model": {"path": "/models/m"},
    "batch": {"micro_batch_size": 1, "global_batch_size": 64, "num_generations": 8},
    "data": {"train": "/data/train.jsonl"},
    "reward": {"functions": [{"function": "number_match"}]},
    "cluster": {"nodes": 2, "gpus_per_node": 4},
    "slurm": {"python": "/opt/python"},
}
FULL = {
    **{"partition": "gpu", "account": "abc", "qos": "long", "time_minutes": 240, "signal_seconds": 300},
    **{"constraint": "a100&nvlink", "reservation": "course", "exclude": "n[3-4]", "exclusive": True, "mem": "500G"},
    **{"cpus_per_task": 12, "gres": "gpu:a100:4", "gpu_bind": "closest", "mail_user": "me@example.org"},
    **{"mail_type": "END,FAIL", "comment": "project 7", "sbatch": {"switches": 1, "nice": 100}},
    **{"srun": ["--mpi=none"], "modules": ["cuda/13.0"], "setup": ["ulimit -n 65536"]},
    **{"environment": {"NCCL_SOCKET_IFNAME": "ib0"}, "python": "/opt/python"},
}


def config(**sections: dict[str, object]) -> Config:
    raw = {name: dict(value) for name, value in SMALL.items()}
    for name, value in sections.items():
        raw.setdefault(name, {}).update(value)
    return loader.from_dict(raw)


@pytest.mark.parametrize(
    ("name", "slurm"),
    [
        ("small", {}),
        ("full", FULL),
        ("pyxis", {"container": {"kind": "pyxis", "image": "nvcr.io#team/gspo:1", "mounts": ["/data:/data"]}}),
        ("apptainer", {"container": {"kind": "apptainer", "image": "/images/gspo.sif", "args": ["--cleanenv"]}}),
    ],
)
def test_the_script_is_the_golden_one(name: str, slurm: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    golden = GOLDEN / f"submit_{name}.sh"
    text = submit.dry_run(config(slurm=slurm))
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_dry_run_needs_no_slurm_and_makes_nothing(tmp_path: Path) -> None:
    made = config(run={"dir": str(tmp_path / "run")})
    code = (
        "import sys, json; from gspo_hpc.config import loader; from gspo_hpc.launch.slurm import submit; "
        "print(submit.dry_run(loader.load(sys.argv[1]))); assert 'torch' not in sys.modules"
    )
    (tmp_path / "c.yaml").write_text(loader.dump(made))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c.yaml")],
        capture_output=True,
        text=True,
        env={"PATH": "/nonexistent", "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0 and "#SBATCH --nodes=2" in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_what_a_user_has_on_pythonpath_comes_after_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine:/runs/demo/jobs/NNNN/code.zip:/and $(this)")
    line = next(line for line in submit.dry_run(config()).splitlines() if line.startswith("export PYTHONPATH="))
    assert line == "export PYTHONPATH='/runs/demo/jobs/NNNN/code.zip:/mine:/and $(this)'"


HOSTILE = ["a\nb", "a'b", 'a"b', "$(touch x)", "`touch x`", "a;b", "a\\b", "ünï", "a\0b", "$HOME", "a\u2028b"]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", ["partition", "account", "constraint", "exclude", "comment", "mail_user", "gres"])
def test_hostile_values_are_refused(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"slurm.{key}"):
        config(slurm={key: value})


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_run_directories_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"run\.dir"):
        submit.dry_run(config(run={"dir": f"/runs/{value}"}))


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_options_of_sbatch_are_refused(value: str) -> None:
    """`submit` refuses whatever breaks a rule: test_options_that_have_a_key_of_their_own_are_refused."""
    for options in ({"switches": value}, {value: 1}):
        assert "sbatch_options_are_free" in {item.rule for item in make_plan(config(slurm={"sbatch": options})).broken}


def test_a_rank_requests_a_core_for_each_of_its_busy_processes() -> None:
    """Slurm binds a rank to one core if nobody says how many; its engine and reward functions would share it."""

    def cores(**sections: Any) -> tuple[str, str]:
        """Return what sbatch and srun are told, and that the plan takes what nobody gave."""
        text = submit.dry_run(config(**sections))
        script, attempt = text.split("# The job starts every attempt with")
        told = re.findall(r"--cpus-per-task=(\d+)", script), re.findall(r"--cpus-per-task=(\d+)", attempt)
        assert told[0] == told[1]
        return ",".join(told[0]), ",".join(re.findall(r"OMP_NUM_THREADS=(\d+)", attempt))

    assert cores() == ("4", "4")  # the rank, its engine, two processes of reward functions
    # Two engines of four ranks: 4 ranks, and for each engine vLLM's core, two workers, two of reward functions.
    assert cores(rollout={"tensor_parallel_size": 2}) == ("4", "4")
    assert cores(rollout={"tensor_parallel_size": 4}) == ("3", "3")  # 4 + 7 of a node's 12 cores
    whole = config(rollout={"tensor_parallel_size": 2})
    assert "--cpu-bind=none" in submit.dry_run(whole) and "--cpu-bind" not in submit.dry_run(config())
    bound = submit.dry_run(config(rollout={"tensor_parallel_size": 2}, slurm={"srun": ["--cpu-bind=cores"]}))
    assert "--cpu-bind=cores" in bound and "--cpu-bind=none" not in bound
    given = submit.dry_run(config(rollout={"tensor_parallel_size": 2}, slurm={"cpus_per_task": 9}))
    assert "--cpus-per-task=9" in given and "--cpu-bind" not in given
    assert cores(reward={"workers": 5}) == ("7", "7")
    assert cores(cluster={"threads_per_rank": 2}) == ("4", "2")
    assert cores(slurm={"cpus_per_task": 9}) == ("9", "9")
    assert cores(slurm={"srun": ["--cpu-bind=none"]}) == ("", "")
    assert cores(cluster={"platform": "cpu"}) == ("", "")


@pytest.mark.parametrize("value", ["a'b; touch x", "$(touch x)", "x y"])
def test_hostile_modules_and_images_are_inert(value: str, tmp_path: Path) -> None:
    """The lines that come from them do what they say, and run nothing else."""
    box = {"kind": "pyxis", "image": value, "args": [value]}
    text = submit.dry_run(config(slurm={"modules": [value], "container": box, "environment": {"A": value}}))
    lines = [line for line in text.splitlines() if line.startswith("module load") or line.startswith("#   srun")]
    assert len(lines) == 2
    for line in lines:
        shell = f'module() {{ printf "%s\\n" "$@"; }}; srun() {{ printf "%s\\n" "$@"; }}\n{line.lstrip("# ")}'
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=tmp_path, check=True)
        assert any(word.endswith(value) for word in done.stdout.splitlines()), done.stdout
    assert list(tmp_path.iterdir()) == []


def test_options_that_have_a_key_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes, time are set by other keys"):
        submit.dry_run(config(slurm={"sbatch": {"nodes": 3, "time": 5}}))


def test_secrets_do_not_belong_into_the_config() -> None:
    with pytest.raises(ValueError, match="looks like a secret"):
        submit.dry_run(config(slurm={"environment": {"WANDB_API_KEY": "abc"}}))


def test_a_profile_lies_under_the_config(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("slurm: {partition: gpu, account: site}\ncluster: {gpus_per_node: 8}\n")
    (tmp_path / "c.yaml").write_text(f"slurm: {{profile: {tmp_path}/site.yaml, account: mine}}\n")
    loaded = loader.load(tmp_path / "c.yaml", ["slurm.qos=short"])
    assert (loaded.slurm.partition, loaded.slurm.account, loaded.slurm.qos) == ("gpu", "mine", "short")
    assert loaded.cluster.gpus_per_node == 8
    with pytest.raises(
        ValueError, match="^command line: slurm.profile is 'not_there', but there is no such profile; known: "
    ):
        loader.load(None, ["slurm.profile=not_there"])
    known = "known: gpu_cluster, local"
    for given, what in (
        ("gpu_clustre", f"profile; nearest: gpu_cluster; {known}"),
        (f"{tmp_path}/sites.yaml", f"file; nearest: {tmp_path}/site.yaml; {known}"),
    ):
        (tmp_path / "wrong.yaml").write_text(f"run: {{seed: 1}}\nslurm:\n  profile: {given}\n")
        with pytest.raises(ValueError, match="slurm.profile") as refused:
            loader.load(tmp_path / "wrong.yaml")
        text = f"{tmp_path}/wrong.yaml:3: slurm.profile is {given!r}, but there is no such {what}"
        assert str(refused.value) == text
    (tmp_path / "site.yaml").write_text("slurm: {partitoin: gpu}\n")
    with pytest.raises(ValueError, match=r"site\.yaml:1: unknown key slurm\.partitoin; nearest: slurm\.partition"):
        loader.load(tmp_path / "c.yaml")


def fake_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Commands of the names given, in front of the real ones."""
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_what_slurm_refuses_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 8)
    fake_commands(
        tmp_path,
        monkeypatch,
        sbatch="echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1",
        squeue="exit 0",
    )
    made = config(
        run={"dir": str(tmp_path / "run")},
        model={"path": str(model_folder(tmp_path / "model"))},
        data={"train": str(data)},
        slurm={"partition": "nope"},
    )
    with pytest.raises(SlurmError, match="invalid partition specified: nope"):
        submit.submit(made)


def test_job_folders_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 8)
    fake_commands(tmp_path, monkeypatch, sbatch="echo Submitted batch job 77", squeue="exit 0")
    made = config(
        run={"dir": str(tmp_path / "run")},
        model={"path": str(model_folder(tmp_path / "model"))},
        data={"train": str(data)},
    )
    assert submit.submit(made) == "77"
    job = tmp_path / "run" / "jobs" / "0001"
    assert stat.S_IMODE(job.stat().st_mode) == 0o700
    for path in job.iterdir():
        if path.is_file() and not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    with zipfile.ZipFile(job / "code.zip") as code:
        worker = code.read("gspo_hpc/training/worker.py")
    assert worker == (paths.PACKAGE / "training" / "worker.py").read_bytes()
    assert {path.name for path in job.iterdir() if not path.name.startswith(".")} == {
        *("config.yaml", "code.zip", "job.json", "77_submission.sh", "77_submitted.pkl")
    }
    assert loader.load(job / "config.yaml") == made


def test_a_job_that_was_not_written_down_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submit that was killed after sbatch had taken the job: there must not be a second one."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 8)
    fake_commands(tmp_path, monkeypatch, sbatch="echo Submitted batch job 77", squeue="exit 0")
    made = config(
        run={"dir": str(tmp_path / "run")},
        model={"path": str(model_folder(tmp_path / "model"))},
        data={"train": str(data)},
    )
    submit.submit(made)
    record = tmp_path / "run" / "jobs" / "0001" / "job.json"
    comment = json.loads(record.read_text())["comment"]
    record.unlink()
    state = f"echo 'JobId=77 JobState=PENDING Comment={comment}'"
    fake_commands(tmp_path, monkeypatch, squeue=f"echo '77 {comment}'; echo '78 '", scontrol=state)
    with pytest.raises(ValueError, match="job 77 is pending already"):
        submit.submit(made)
    other = loader.with_settings(made, ["rollout.temperature=0.5"])
    with pytest.raises(ValueError, match="job 77 is pending already"):
        submit.submit(other)
    run = RunDir(tmp_path / "run")
    assert loader.load(run.config) == made, "what waits is of this config"
    refused = "echo 'sbatch: error: invalid account' >&2; exit 1"
    fake_commands(tmp_path, monkeypatch, squeue="exit 0", scontrol=f"{state} | sed s/PENDING/FAILED/", sbatch=refused)
    with pytest.raises(SlurmError, match="invalid account"):
        submit.submit(other)
    fake_commands(tmp_path, monkeypatch, sbatch="echo Submitted batch job 78")
    assert submit.submit(other) == "78" and loader.load(run.config) == other
    run.append_metrics({"step": 1})
    with pytest.raises(ValueError, match="was started with another config"):
        submit.submit(made)


def test_what_only_the_inputs_show_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look at first rows or at the syntax of a file shows it: all rows are read, and the functions are called."""
    fake_commands(tmp_path, monkeypatch, sbatch="echo Submitted batch job 77", squeue="exit 0")
    data, code = tmp_path / "train.jsonl", tmp_path / "own.py"
    head = "def {}(completion, *, prompt, fields):\n    return {}\n"
    code.write_text(head.format("good", "1") + head.format("bad", "fields['solution']"))
    whole = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model_folder(tmp_path / "model"))},
        "data": {"train": str(data)},
    }
    row = '{"prompt": "1 + 1 =", "answer": "2"}\n'
    data.write_text(row * 8 + f'{{"filler": "{"a" * 2**20}", "prompt": "a", "answer": 1}}\n[1]\n')
    with pytest.raises(ValueError, match=r"train\.jsonl:10"):
        submit.submit(config(**whole))
    data.write_text(row * 8)
    for names in (["bad"], ["good", "bad"]):
        functions = [{"function": f"{code}:{name}"} for name in names]
        with pytest.raises(ValueError, match=r"own\.py:bad raised KeyError: 'solution'"):
            submit.submit(config(**whole, reward={"functions": functions}))
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has none of tokenizer\.json"):
        submit.submit(config(**whole))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "squeue: error: DNS SRV lookup failed\nsqueue: fatal: Could not establish a configuration source",
            "Slurm is not set up on this machine: give the command on a login node of the cluster, or set SLURM_CONF\n"
            "squeue: fatal: Could not establish a configuration source",
        ),
        (
            "squeue: error: a\nslurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            "Slurm's controller does not answer: give the command again when `scontrol ping` says that it is up\n"
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        ),
        ("squeue: error: Invalid user: nobody", "squeue: error: Invalid user: nobody"),
    ],
)
def test_where_slurm_does_not_answer_two_lines_say_what_to_do(
    said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_commands(tmp_path, monkeypatch, squeue=f"cat >&2 <<'END'\n{said}\nEND\nexit 1")
    with pytest.raises(SlurmError) as refused:
        commands.own_jobs(0.0)
    assert str(refused.value) == told


LINE = (
    "JobId=10 JobName=tiny UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 "
    "TimeLimit=01:00:00 StartTime=2026-11-21T19:42:09 EndTime=2026-11-21T19:42:31 PreemptTime=2026-11-21T19:42:11 "
    "NodeList=n[1-2] Comment=gspo_hpc:abc:0001 Command=/a b/c.sh"
)


def test_a_job_is_read_from_scontrol() -> None:
    job = commands.parse_job(LINE)
    assert (job.id, job.state, job.nodes, job.restarts, job.comment) == (
        "10",
        "RUNNING",
        "n[1-2]",
        2,
        "gspo_hpc:abc:0001",
    )
    assert job.active and job.end_time is not None and job.preempt_time is not None
    assert job.end_time - job.preempt_time == 20.0
    assert commands.parse_job(LINE.replace("=RUNNING", "=SIGNALING")).state == "RUNNING"
    waiting = commands.parse_job("JobId=10 JobState=PENDING Reason=BeginTime EndTime=Unknown NodeList=(null)")
    assert (waiting.end_time, waiting.nodes, waiting.reason) == (None, "", "BeginTime")


@pytest.mark.parametrize(
    "error",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "scontrol: fatal: Unable to process configuration file",  # an administrator is writing it
    ],
)
def test_a_controller_that_restarts_is_waited_for(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"""
if [ -e {tmp_path}/up ]; then echo fine; exit 0; fi
touch {tmp_path}/up
echo '{error}' >&2; exit 1"""
    fake_commands(tmp_path, monkeypatch, squeue=body)
    assert commands.run(["squeue"]) == "fine\n"
    fake_commands(tmp_path, monkeypatch, squeue="echo 'Invalid user' >&2; exit 1")
    with pytest.raises(SlurmError, match="Invalid user"):
        commands.run(["squeue"])
    with pytest.raises(SlurmError, match="is not installed here"):
        commands.run(["no-such-command-of-slurm"])
