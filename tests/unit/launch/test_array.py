"""The points of a sweep, the array that they become, and what is left where Slurm does not take it. About 5 seconds.

Small programs answer in the place of Slurm's commands. It would catch points that are missing or have one folder, a
task that runs another's point, a point that is submitted twice or forgotten, and folders without a job.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader, sweep
from gspo_hpc.launch import status
from gspo_hpc.launch.slurm import array, commands, submit
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import job_logs
from gspo_hpc.runs.sweep import SweepDir
from gspo_hpc.system.environment import slurm_job_id
from tests.folders import model_folder
from tests.unit.launch.test_submit import fake_commands


def test_points_are_all_combinations() -> None:
    found = sweep.points(["run.seed=1,2", "optimizer.lr=1e-6,2e-6"])
    assert [point.name for point in found] == [f"seed-{seed}_lr-{lr}" for seed in (1, 2) for lr in ("1e-6", "2e-6")]
    assert found[1].settings == ("run.seed=1", "optimizer.lr=2e-6")


def test_a_comma_in_brackets_or_quotes_belongs_to_the_value() -> None:
    (key,) = (["rollout.stop=[a, b],[a,c]"],)
    assert [point.settings for point in sweep.points(key)] == [
        ("rollout.stop=[a, b]",),
        ("rollout.stop=[a,c]",),
    ]
    text = "reward.functions=[{function: 'a,b.py:f'}],[{function: number_match}]"
    first, second = sweep.points([text])
    assert first.settings == ("reward.functions=[{function: 'a,b.py:f'}]",)
    names = (first.name, second.name)
    assert names[0] != names[1] and all(len(name) < 80 and not set(name) & set("[]{}:', /") for name in names), names
    assert names == tuple(point.name for point in sweep.points([text])), "the same point has the same folder"


def test_names_tell_settings_with_the_same_end_apart() -> None:
    (one,) = sweep.points(["optimizer.name=adam", "algorithm.name=gspo"])
    assert one.name == "optimizer.name-adam_algorithm.name-gspo"
    plain, odd = sweep.points(["model.path=a-b,a/b"])
    assert plain.name == "path-a-b" and odd.name.startswith("path-a-b-") and len(odd.name) == len("path-a-b-") + 8


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["run.seed"], "write section.key=value,value,... such as run.seed=1,2,3"),
        (["seed=1,2"], "write section.key=value"),
        (["run.seed=1,,2"], "write section.key=value"),
        (["run.seed=1,2,1"], "--array run.seed: 1 is given twice"),
        (["run.seed=1", "run.seed=2"], "--array run.seed is given twice: give all of its values at once"),
        (["run.dir=a,b"], "--array run.dir: each run of a sweep gets its own"),
    ],
)
def test_what_is_no_sweep_is_refused(given: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("(", r"\(").replace("...", r"\.\.\.")):
        sweep.points(given)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config that can be submitted, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 8)
    (tmp_path / "c.yaml").write_text(
        f"run: {{name: demo, max_steps: 10}}\nmodel: {{path: {model_folder(tmp_path / 'model')}}}\n"
        "batch: {micro_batch_size: 1, global_batch_size: 64, num_generations: 8}\ndata: {train: train.jsonl}\n"
        "reward: {functions: [{function: number_match}]}\ncluster: {nodes: 2, gpus_per_node: 4}\n"
    )
    (tmp_path / "bin").mkdir()
    return tmp_path / "c.yaml"


def slurm(config: Path, patch: pytest.MonkeyPatch, waiting: str = "", taken: str = "Submitted batch job 77") -> None:
    said = f"echo '{taken}'" if "error" not in taken else f"echo '{taken}' >&2; exit 1"
    fake_commands(config.parent / "bin", patch, sbatch=said, squeue=f"printf '%s' '{waiting}'")


SWEEP = ("--array", "run.seed=1,2", "optimizer.lr=1e-6,2e-6")


def submitted(config: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["submit", str(config), *(more or SWEEP)]) == 0
    return capsys.readouterr().out


def test_each_point_is_a_run_of_its_own_and_the_array_one_job(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(config, monkeypatch)
    assert submitted(config, capsys) == "job array 77 submitted: 4 runs; sweep directory runs/demo\n"
    folder = config.parent / "runs" / "demo"
    names = [f"seed-{seed}_lr-{lr}" for seed in (1, 2) for lr in ("1e-6", "2e-6")]
    assert list(SweepDir(folder).points()) == names
    for number, name in enumerate(names):
        run = RunDir(folder / name)
        own = loader.load(run.path / "jobs" / "0001" / "config.yaml")
        assert (own.run.name, own.run.dir) == (f"demo_{name}", f"runs/demo/{name}") and own == run.load_config()
        assert (own.run.seed, own.optimizer.lr) == (1 + number // 2, (1e-6, 2e-6)[number % 2])
        record = json.loads((run.path / "jobs" / "0001" / "job.json").read_text())
        assert record["job_id"] == f"77_{number}"
        (folder / "jobs" / "0001" / f"77_{number}_0_log.out").write_text("said")
        assert job_logs(run) == job_logs(run, f"77_{number}") == [folder / "jobs" / "0001" / f"77_{number}_0_log.out"]
        assert job_logs(run, "77_9") == []
    assert [path.name for path in status.runs_below(config.parent / "runs")] == names
    script = (folder / "jobs" / "0001" / "77_submission.sh").read_text()
    assert "#SBATCH --array=0-3\n" in script and f"--output={folder}/jobs/0001/%A_%a_0_log.out" in script
    assert sorted(path.name for path in (folder / "jobs" / "0001").iterdir() if not path.is_symlink()) == sorted(
        ["code.zip", "tasks.json", "77_submission.sh", *(f"77_{number}_0_log.out" for number in range(4))]
    )


def test_a_task_starts_the_supervisor_of_its_point(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script as a shell executes it, also where a signal ends the first supervisor."""
    python = config.parent / "python"
    python.write_text(f'#!/bin/bash\necho "$@" >> {config.parent}/starts\n[ -n "$GSPO_HPC_KILLED" ] || kill -9 $$\n')
    python.chmod(0o700)
    given = (*SWEEP, "--at-most", "2", "--dry-run")
    text = submitted(config, capsys, f"slurm.python={python}", f"run.dir={config.parent}/a b", *given)
    table, _, script = text.partition("\n\n")
    assert table.splitlines()[3].split() == ["2", "seed-2_lr-1e-6", "run.seed=2", "optimizer.lr=1e-6"]
    assert "#SBATCH --array=0-3%2\n" in script and not (config.parent / "a b").exists()
    run = config.parent / "a b" / "seed-2_lr-1e-6"
    (run / "attempts").mkdir(parents=True)
    done = subprocess.run(["bash", "-c", script], env=os.environ | {"SLURM_ARRAY_TASK_ID": "2"}, capture_output=True)
    assert done.returncode == 0, done.stderr
    line = f"-u -P -m gspo_hpc.launch.slurm.supervisor {run} {run}/jobs/NNNN"
    assert (config.parent / "starts").read_text().splitlines() == [line, line]
    assert shlex.quote(str(run.parent / "seed-1_lr-1e-6")) in script.rpartition("\n#   srun ")[2].splitlines()[0]


def test_the_same_command_again_submits_what_is_neither_done_nor_active(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(config, monkeypatch)
    submitted(config, capsys)
    folder = config.parent / "runs" / "demo"
    comment = json.loads((folder / "seed-1_lr-1e-6" / "jobs" / "0001" / "job.json").read_text())["comment"]
    RunDir(folder / "seed-1_lr-1e-6").append_metrics({"step": 10})
    RunDir(folder / "seed-2_lr-1e-6").append_metrics({"step": 9})
    # The submission was killed before it wrote down the job of the task that waits.
    (folder / "seed-2_lr-2e-6" / "jobs" / "0001" / "job.json").unlink()
    slurm(config, monkeypatch, waiting=f"77_3 {comment}\n78 \n", taken="Submitted batch job 79")
    assert submitted(config, capsys) == (
        "1 run of 4 is done: seed-1_lr-1e-6\n1 run of 4 is running or waiting already: seed-2_lr-2e-6\n"
        "job array 79 submitted: 2 runs; sweep directory runs/demo\n"
    )
    assert status.job_ids(RunDir(folder / "seed-2_lr-2e-6")) == ["77_3"]
    assert status.job_ids(RunDir(folder / "seed-2_lr-1e-6")) == ["77_2", "79_2"], "a point keeps its number"
    assert "#SBATCH --array=1-2\n" in (folder / "jobs" / "0002" / "79_submission.sh").read_text()
    told = submitted(config, capsys, "--array", "run.seed=1,2,3", "optimizer.lr=1e-6,2e-6")
    assert (
        "submitted: 4 runs" in told and "#SBATCH --array=1-2,4-5\n" in next(folder.glob("jobs/0003/*.sh")).read_text()
    )


def test_points_without_a_step_take_other_settings_unless_they_wait_or_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(config, monkeypatch)
    other = ("rollout.temperature=0.5", *SWEEP)
    submitted(config, capsys)
    slurm(config, monkeypatch, waiting="77_0 \n")
    assert main(["submit", str(config), *other]) == 2
    said = capsys.readouterr().err
    assert "seed-1_lr-1e-6 was started with another config" in said
    slurm(config, monkeypatch, taken="Submitted batch job 78")
    assert "job array 78 submitted: 4 runs" in submitted(config, capsys, *other)
    run = RunDir(config.parent / "runs" / "demo" / "seed-1_lr-1e-6")
    assert loader.load(run.config).rollout.temperature == 0.5
    run.append_metrics({"step": 1})
    assert main(["submit", str(config), *SWEEP]) == 2
    assert "was started with another config" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), SWEEP])
def test_what_slurm_refuses_leaves_nothing(
    config: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(config, monkeypatch, taken="sbatch: error: invalid partition specified: nope")
    assert main(["submit", str(config), *more]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: sbatch: error: invalid partition specified: nope"
    assert list((config.parent / "runs").iterdir()) == []
    slurm(config, monkeypatch)
    submitted(config, capsys, *(more or ("run.seed=42",)))
    before = sorted(str(path) for path in (config.parent / "runs").rglob("*"))
    slurm(config, monkeypatch, taken="sbatch: error: invalid account")
    assert main(["submit", str(config), *more]) == 2
    assert sorted(str(path) for path in (config.parent / "runs").rglob("*")) == before, "a run that was there stays"


@pytest.mark.parametrize("more", [(), SWEEP])
def test_what_slurm_may_have_taken_stays(
    config: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "PATIENCE", 0.0)
    slurm(config, monkeypatch)
    asked = config.parent / "asked"
    once = f"if [ -e {asked} ]; then echo 'slurm_load_jobs error: connect failure' >&2; exit 1; fi; touch {asked}"
    lost = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
    fake_commands(config.parent / "bin", monkeypatch, squeue=once, sbatch=lost)
    assert main(["submit", str(config), *more]) == 2
    assert "Slurm may have taken the job: give the command again later" in capsys.readouterr().err
    kept = list((config.parent / "runs").rglob("code.zip"))
    assert len(kept) == 1


def test_a_point_that_cannot_be_run_is_named_before_anything_is_submitted(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(config, monkeypatch)
    for values, why in (
        ("batch.num_generations=8,7", "point num_generations-7: rule "),
        ("optimizer.lr=1e-6,fast", "point lr-fast: command line: optimizer.lr"),
        ("cluster.nodes=1,2", "points nodes-1 and nodes-2 need different jobs (--nodes=1; --nodes=2)"),
    ):
        assert main(["submit", str(config), "--array", values]) == 2
        assert why in (said := capsys.readouterr().err), said
        assert not (config.parent / "runs").exists()
    assert main(["submit", str(config), "--at-most", "2"]) == 2
    assert "--at-most 2 must be at least 1, and belongs to --array" in capsys.readouterr().err


def test_a_sweep_and_a_run_do_not_share_a_folder(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(config, monkeypatch)
    submitted(config, capsys, "run.dir=one")
    assert main(["submit", str(config), "run.dir=one", *SWEEP]) == 2
    assert "one is a run; give another run.name or run.dir" in capsys.readouterr().err
    submitted(config, capsys)
    assert main(["submit", str(config)]) == 2
    assert "is not empty, and is not a run directory" in capsys.readouterr().err
    assert main(["logs", "runs/demo"]) == 2
    assert "a folder of several; name one: seed-1_lr-1e-6, " in capsys.readouterr().err


def test_a_task_goes_by_the_arrays_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last task has the number of the array itself, by which Slurm would requeue or cancel all of its tasks."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm_job_id() == "77_3"
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    assert slurm_job_id() == "77"
    line = "JobId=80 ArrayJobId=77 ArrayTaskId=3 JobState=RUNNING"
    assert commands.parse_job(line).id == "77_3"
    assert commands.parse_job(line.replace("=3", "=3-5%2").replace("80", "77")).id == "77"


def test_code_in_a_container_is_mounted(config: Path) -> None:
    box = ["slurm.container={kind: apptainer, image: /i.sif}", f"run.dir={config.parent}/s"]
    points = {point: loader.load(config, [*box, *point.settings]) for point in sweep.points(["run.seed=1,2"])}
    text = array.dry_run(points, None)
    assert f"--bind {config.parent}/s/seed-1:{config.parent}/s/seed-1 --bind {config.parent}/s/jobs/NNNN:" in text


def test_a_run_whose_code_is_a_folder_is_submitted_again(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of earlier versions have the copy of the package as a folder."""
    slurm(config, monkeypatch)
    submitted(config, capsys, "run.dir=one")
    jobs = config.parent / "one" / "jobs"
    (jobs / "0001" / "code.zip").unlink()
    (jobs / "0001" / "code" / "gspo_hpc").mkdir(parents=True)
    fake_commands(
        config.parent / "bin", monkeypatch, scontrol="echo 'slurm error: Invalid job id specified' >&2; exit 1"
    )
    submitted(config, capsys, "run.dir=one")
    assert (jobs / "0002" / "code.zip").is_file() and (jobs / "0001" / "code").is_dir()
