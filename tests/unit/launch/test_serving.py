"""Commands that `gspo-hpc serve` becomes or hands in, and mistakes that it refuses (3 s).

A server itself is in tests/run/test_results.py, and one in a job in tests/slurm/test_serve.py.

Catches an export that is made anew or of another checkpoint, a server for everybody, and options that reach a shell.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import replace
from gspo_hpc.launch import serving
from gspo_hpc.launch.slurm import serve, server_job
from gspo_hpc.runs import commit
from gspo_hpc.runs.directory import open_run
from gspo_hpc.runs.jobs import new_job_folder
from gspo_hpc.system.files import make_private_dir, read_json, write_atomically, write_json


class Became(Exception):
    """In the place of another program."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that this process would have become."""
    found: list[list[str]] = []

    def become(path: str, words: list[str], variables: dict[str, str]) -> None:
        assert path == words[0] == sys.executable and variables["VLLM_NO_USAGE_STATS"] == "1"
        found.append(words)
        raise Became

    monkeypatch.setattr("os.execve", become)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made, _ = open_run(from_dict({"run": {"dir": str(tmp_path / "run"), "max_steps": 4}}))
    for step in (2, 10):
        staging = commit.begin(made.checkpoints, step)
        (staging / "weights").write_bytes(b"1")
        commit.commit(staging, step)
    return made.path


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Path]]:
    """The exports that were made."""
    made: list[tuple[int, Path]] = []

    def export(run: Path, step: int, out: Path) -> int:
        made.append((step, out))
        if step != 2:
            out.mkdir()
        return 0 if step != 2 else 1

    monkeypatch.setattr(serving, "export", export)
    return made


def test_a_run_is_exported_once_and_served_to_this_machine_alone(
    run: Path, exports: list[tuple[int, Path]], started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with pytest.raises(Became):
            main(["serve", str(run), "--port", "8123", "--vllm", "--max-model-len 64 --chat-template 'a b; rm $HOME'"])
    folder = run / "served" / "000010"
    assert exports == [(10, folder)] and folder.parent.stat().st_mode & 0o777 == 0o700
    words = started[1]
    assert words[words.index("--model") + 1 :] == [
        *(str(folder), "--host", "127.0.0.1", "--port", "8123", "--served-model-name", "run"),
        *("--load-format", "safetensors", "--max-model-len", "64", "--chat-template", "a b; rm $HOME"),
    ]
    assert f"serving {folder} as run at http://127.0.0.1:8123/v1" in capsys.readouterr().out


def test_an_export_that_fails_ends_the_command(
    run: Path, exports: list[tuple[int, Path]], started: list[list[str]]
) -> None:
    assert main(["serve", str(run), "--step", "2"]) == 1
    assert exports and not started


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--step", "3"], "has no checkpoint 3; it has 2, 10"),
        (["--port", "0"], "--port 0: must be from 1 to 65535"),
        (["--vllm", "--port 1"], "--vllm: --port is decided by serve"),
        (["--vllm=--load-format=pt"], "--vllm: --load-format=pt is decided by serve"),
        (["--vllm=--load_format pt"], "--vllm: --load_format is decided by serve"),
        (["--vllm=--served-mod x"], "--vllm: --served-mod is decided by serve"),
        (["--vllm", "'"], "No closing quotation"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    words: list[str], told: str, run: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run), *words]) == 2
    assert told in capsys.readouterr().err and not started and not (run / "served").exists()


def test_a_folder_of_a_model(tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path)]) == 2 and "no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--step", "1"]) == 2 and "no checkpoints" in capsys.readouterr().err
    with pytest.raises(Became):
        main(["serve", str(tmp_path), "--name", "mine"])
    assert "--served-model-name" in started[0] and "mine" in started[0] and str(tmp_path) in started[0]


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("127.0.0.1", "", False), ("::1", "", False), ("localhost", "", False), ("0.0.0.0", "", True), ("node7", "", True)]
    + [("0.0.0.0", "secret", False)],
)
def test_a_server_for_others_without_a_key_is_warned_of(
    host: str,
    key: str,
    warned: bool,
    tmp_path: Path,
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key) if key else monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Became):
        main(["serve", str(tmp_path), "--host", host])
    assert ("everybody who reaches" in capsys.readouterr().err) is warned


def test_a_job_is_one_node_with_the_gpus_of_one_server(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret")
    words = ["serve", str(run), "--slurm", "--dry-run", "slurm.partition=gpu", "--vllm=-tp 4 --dtype bfloat16"]
    assert main(words) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert {"#SBATCH --nodes=1", "#SBATCH --gpus-per-node=4", "#SBATCH --partition=gpu", "#SBATCH --no-requeue"} <= {
        line.replace("--no-requeue=True", "--no-requeue") for line in lines
    }
    assert lines[-1].endswith(f"-u -P -m gspo_hpc.launch.slurm.server_job {run}/served/jobs/NNNN")
    assert "a-secret" not in output.out and not output.err and not (run / "served").exists()
    monkeypatch.delenv("VLLM_API_KEY")
    assert main(words) == 0
    assert "everybody who is on its node may use this server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ("", 2),
        ("--dtype float32", 2),
        ("--tensor-parallel-size=4", 4),
        ("-tp 4 -pp 2", 8),
        ("--data-parallel-size 3", 6),
        ("--tensor_parallel_size 4", 4),  # vLLM takes it
        ("--tensor-par=4 -pp=2", 8),
        ("--data_parallel_size=3 -tp 1", 3),
    ],
)
def test_options_that_divide_a_model_decide_the_gpus(run: Path, options: str, gpus: int) -> None:
    order = server_job.Order(str(run), True, None, "a name", "127.0.0.1", None, options)
    found = serve.config_of(order, ["rollout.tensor_parallel_size=2", "cluster.nodes=4", "run.max_steps=4"])
    assert (found.cluster.gpus_per_node, found.cluster.nodes, found.slurm.requeue) == (gpus, 1, False)


@pytest.mark.parametrize(
    ("options", "gpus", "tensor"),
    [("", 2, ["2"]), ("", 1, []), ("-tp 4", 4, []), ("--data-parallel-size 3", 6, ["2"]), ("-pp 2", 4, ["2"])],
)
def test_the_server_of_a_job_uses_all_its_gpus(
    tmp_path: Path,
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    gpus: int,
    tensor: list[str],
) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))
    (tmp_path / "config.json").write_text("{}")
    order = server_job.Order(str(tmp_path), False, None, "mine", "127.0.0.1", 8123, options)
    config = serve.config_of(order, [])
    config = replace(config, cluster=replace(config.cluster, gpus_per_node=gpus))
    write_atomically(tmp_path / "config.yaml", loader.dump(config))
    write_json(tmp_path / "serve.json", asdict(order))
    with pytest.raises(Became):
        server_job.main([str(tmp_path)])
    words = started[0]
    given = [words[place + 1] for place, word in enumerate(words) if word == "--tensor-parallel-size"]
    assert given == tensor and words[-len(options.split()) :] == (options.split() or words)


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname()), ("::", socket.gethostname())]
)
def test_a_job_writes_down_an_address_that_leads_there(
    run: Path,
    exports: list[tuple[int, Path]],
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    told: str,
) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))
    order = server_job.Order(str(run), True, 10, "mine", host, 8123, "")
    make_private_dir(run / "served")
    folder = new_job_folder(run / "served")
    write_atomically(folder / "config.yaml", loader.dump(serve.config_of(order, [])))
    write_json(folder / "serve.json", asdict(order))
    with pytest.raises(Became):
        server_job.main([str(folder)])
    assert read_json(folder / "address.json")["address"] == f"http://{told}:8123/v1"
    write_json(folder / "serve.json", asdict(order) | {"step": 2})  # whose export fails
    assert server_job.main([str(folder)]) == 1
    assert exports == [(10, run / "served" / "000010"), (2, run / "served" / "000002")] and len(started) == 1


def test_two_servers_that_export_at_once_both_have_the_checkpoint(
    run: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(run: Path, step: int, out: Path) -> int:
        out.mkdir()  # by the other one; what is exported appears whole
        return 2

    monkeypatch.setattr(serving, "export", slower)
    with pytest.raises(Became):
        main(["serve", str(run)])
    assert str(run / "served" / "000010") in started[0]


def test_a_folder_of_a_model_has_its_jobs_beside_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main(["serve", "model", "--slurm", "--dry-run", "cluster.platform=cpu"]) == 0
    assert f"{tmp_path}/served/model/jobs/NNNN" in capsys.readouterr().out and not (tmp_path / "served").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slurm.partition=gpu"], "slurm.partition=gpu: belongs to a Slurm job, which --slurm asks for"),
        (["--dry-run"], "--dry-run: belongs to a Slurm job"),
        (["--slurm", "--step", "3"], "has no checkpoint 3; it has 2, 10"),
        *[
            (["--slurm", f"--vllm={word}"], "give the key as VLLM_API_KEY in the environment")
            for word in ("--api-key x", "--api_key x", "--api-key=x", "--api-k x")
        ],
        (["--slurm", "slurm.partion=gpu"], "slurm.partition"),
    ],
)
def test_mistakes_of_a_job_are_told_before_it_is_one(
    words: list[str], told: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run), *words]) == 2
    assert told in capsys.readouterr().err and not (run / "served").exists()


def test_a_key_that_does_not_reach_the_job_ends_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr("os.environ", dict(os.environ))  # the job changes its own
    order = server_job.Order(str(run), True, None, "run", "0.0.0.0", None, "", keyed=True)
    make_private_dir(run / "served")
    folder = new_job_folder(run / "served")
    write_atomically(folder / "config.yaml", loader.dump(serve.config_of(order, [])))
    write_json(folder / "serve.json", asdict(order))
    assert server_job.main([str(folder)]) == 2
    assert "VLLM_API_KEY did not reach this job" in capsys.readouterr().out
