"""A checkpoint or a run directory from somebody else runs nothing of theirs, whichever of its files holds a pickle.

Takes a minute. It would catch a reader that unpickles: in our code, or in Megatron's or torch's where ours calls them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.runs import commit
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.runs.journal import Journal, read_journals
from tools.make_random_model import make_random_model

# Names that torch, Megatron and submitit read, whether or not a checkpoint or a run has them today.
OF_LIBRARIES = (".metadata", "__0.metadata", "metadata.json", "common.pt", "modelopt_run_config.yaml")
OF_SUBMITIT = ("jobs/0001/7_submitted.pkl", "jobs/0001/7_0_result.pkl")


class Planted:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def plain(marker: Path) -> bytes:
    """A pickle."""
    return pickle.dumps(Planted(marker), protocol=2)


def archive(marker: Path) -> bytes:
    """A pickle as torch.save writes it."""
    file = io.BytesIO()
    torch.save({"model": Planted(marker)}, file)
    return file.getvalue()


KINDS: dict[str, Callable[[Path], bytes]] = {"plain": plain, "archive": archive}


def run(*words: object) -> dict[str, Any]:
    """The JSON object that the process of handed_over.py prints."""
    command = [sys.executable, "-m", "tests.torch.checkpoint.handed_over", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    return make_random_model(tmp_path_factory.mktemp("model") / "m", hidden=64, layers=1, intermediate=64, vocab=128)


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of it, with an optimizer."""
    path = tmp_path_factory.mktemp("saved") / "000001"
    signs = run("save", model, path)
    # The watcher of a rank takes one that loads for hung, however large the model is, unless every tensor is a sign.
    assert signs["model"] >= signs["tensors"] and signs["checkpoint"] >= 3 * signs["tensors"], signs
    return path


def committed(folder: Path) -> Path:
    """Write the manifest and the marker of the commit anew, as whoever hands a checkpoint over can."""
    for name in (commit.MANIFEST, commit.COMMITTED):
        (folder / name).unlink()
    staging = folder.with_name(f".tmp-{folder.name}")
    folder.rename(staging)
    commit.commit(staging, 1, {"layout": {}}).rename(folder)
    return folder


def plant(checkpoint: Path, copy: Path, name: str, content: bytes) -> Path:
    """A copy whose file `name` has this content. The index finds the content wherever it looks into that file."""
    shutil.copytree(checkpoint, copy)
    (copy / name).write_bytes(content)
    index = copy / "megatron" / "index.json"
    if name.endswith(".distcp"):
        found = json.loads(index.read_text())
        for tensor in found["tensors"].values():
            for piece in tensor["pieces"]:
                piece[2:] = [Path(name).name, 0, len(content)]
        index.write_text(json.dumps(found))
    return committed(copy)


def marks(folder: Path) -> list[str]:
    """Files that planted pickles have made."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def loads(model: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path, Path]]:
    """Errors for each copy with a planted pickle, the folder of copies, and the one for marks of pickles."""
    folder, marked = tmp_path_factory.mktemp("planted"), tmp_path_factory.mktemp("marks")
    names = [str(path.relative_to(checkpoint)) for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    names = [name for name in names if name not in (commit.MANIFEST, commit.COMMITTED)]
    assert {"megatron/index.json", "megatron/common.pt", "rng-0.json", "cursor.json", "rollout.jsonl"} < set(names)
    assert any(name.endswith(".distcp") for name in names)
    names += [f"megatron/{name}" for name in OF_LIBRARIES if f"megatron/{name}" not in names]
    copies = []
    for kind, make in KINDS.items():
        for number, name in enumerate(names):
            copy = folder / f"{kind}-{number}-{Path(name).name}"
            copies.append(plant(checkpoint, copy, name, make(marked / copy.name)))
    older = folder / "older"
    shutil.copytree(checkpoint, older)
    (older / "megatron" / "index.json").unlink()
    (older / "megatron" / ".metadata").write_bytes(plain(marked / "older"))
    copies.append(committed(older))
    assert marks(marked) == []
    yield run("load", model, *copies), folder, marked


def test_a_pickle_in_no_file_of_a_checkpoint_runs(loads: tuple[Any, Path, Path]) -> None:
    said, _, marked = loads
    assert marks(marked) == []
    assert all(one["whole"] == [] for one in said.values()), "the hashes fit, so what is read is what is refused"


def test_each_is_refused_in_a_line_that_names_the_file(loads: tuple[Any, Path, Path]) -> None:
    said, folder, _ = loads
    for name, found in said.items():
        planted = name.split("-", 2)[-1]
        ignored = planted in OF_LIBRARIES and planted != "common.pt"  # names that nothing reads
        refusing = {key for key in ("resume", "evaluate", "export", "dtype") if found[key] is not None}
        if ignored:
            assert refusing == set(), (name, found)
        elif planted in ("index.json", "older"):
            assert refusing == {"resume", "evaluate", "export", "dtype"}, (name, found)
        elif planted.endswith(".distcp"):
            assert refusing == {"resume", "evaluate", "export"}, (name, found)
        else:
            assert "resume" in refusing or planted == "common.pt", (name, found)
        for key in refusing:
            kind, text = found[key]
            assert kind == "ValueError" and len(text.splitlines()) == 1 and len(text) < 400, (name, key, kind, text)
            assert str(folder / name) in text, (name, key, text)
    assert "earlier version" in said["older"]["export"][1]


def test_the_converter_refuses_it_as_a_program(model: Path, loads: tuple[Any, Path, Path], tmp_path: Path) -> None:
    _, folder, marked = loads
    words = ["to-hf", "--checkpoint", folder / "older", "--model", model, "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "tools.convert_checkpoint", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and marks(marked) == [], done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def handed_over(checkpoint: Path, tmp_path: Path) -> RunDir:
    """The directory of a run that has failed once, with all that commands read."""
    made, _ = open_run(loader.from_dict({"run": {"dir": str(tmp_path / "run"), "max_steps": 10}}))
    with made.lock():
        attempt = made.new_attempt(loader.load(made.config))
        attempt.log_path(0).write_text("Traceback (most recent call last):\n  f()\nZeroDivisionError: the cause\n")
        attempt.finish("failed", 1, "rank 0 on n1: ZeroDivisionError: the cause")
    for step in range(4):
        made.append_metrics({"step": step, "reward": 0.5, "seconds": 2.0, "completion_tokens_per_s": 100.0})
    made.append_samples([{"step": 0, "prompt": "1 + 1 = ?", "completion": "2", "reward": 1.0}])
    shutil.copytree(checkpoint, made.checkpoints / "000001")
    Journal(made.rollouts / "000001", 0, fingerprint="f", rollout=1).close()
    (made.path / "plan.json").write_text("{}")
    job = made.path / "jobs" / "0001"
    job.mkdir(parents=True)
    (job / "job.json").write_text(json.dumps({"job_id": "7"}))
    (job / "7_0_log.out").write_text("slurmstepd: error\n")
    return made


COMMANDS = ("status", "report", "diagnose", "logs", "sync", "cancel")


def test_no_command_that_reads_a_run_runs_a_pickle_in_it(
    handed_over: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked = tmp_path / "marks"
    marked.mkdir()
    top = handed_over.path
    names = [str(path.relative_to(top)) for path in sorted(top.rglob("*")) if path.is_file()]
    assert {"config.yaml", "plan.json", "run.json", "metrics.jsonl", "attempts/0001/config.yaml"} <= set(names)
    for name in (*names, *OF_SUBMITIT):
        path = top / name
        before = path.read_bytes() if path.exists() else None
        tag = f"run: !!python/object/apply:os.mkdir ['{marked}/yaml']\n".encode()
        for content in (plain(marked / "pickle"), archive(marked / "archive"), tag):
            path.write_bytes(content)
            for command in COMMANDS:
                code = main([command, str(top)])
                said = capsys.readouterr().err
                assert code in (0, 1, 2) and len(said.splitlines()) <= 4, (name, command, said)
            read_journals(handed_over.rollouts / "000001", "f")
            assert marks(marked) == [], name
        path.unlink() if before is None else path.write_bytes(before)
        (top / "report.html").unlink(missing_ok=True)
