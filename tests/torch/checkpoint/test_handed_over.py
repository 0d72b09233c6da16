"""A checkpoint or a run directory from somebody else runs nothing of theirs, whichever of its files holds a pickle.

Takes a minute. It would catch a reader that unpickles: in our code, or in Megatron's or torch's where ours calls them;
and one that ends with a traceback on JSON of another form, with Infinity, or nested too deeply.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
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
from gspo_hpc.config.schema import Judges
from gspo_hpc.data.carried import Place
from gspo_hpc.evaluation import stored
from gspo_hpc.rollout.carried_files import CarriedFiles
from gspo_hpc.runs import commit, sample_record, spending
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.jobs import new_job_folder, record_job
from gspo_hpc.runs.journal import CARRIED, Journal, places, read_journal, read_journals, read_turns
from gspo_hpc.runs.spending import Amount, Spending
from gspo_hpc.runs.sweep import SweepDir
from tests.swanlab_server import SwanlabServer
from tests.torch.trackers.test_once import TRACKING, environment, make_run, sync
from tests.unit.evaluation.kept import row
from tests.unit.runs.test_sample_record import group
from tests.wandb_server import WandbServer
from tools.make_random_model import make_random_model

# Names that torch, Megatron and submitit read, whether or not a checkpoint or a run has them today.
OF_LIBRARIES = (".metadata", "__0.metadata", "metadata.json", "common.pt", "modelopt_run_config.yaml")
# Kinds of files in the directory of a run, as `kind` names them; tests/run/test_results.py holds a real run to them.
KINDS_OF_FILES = {
    *("config.yaml", "lock", "metrics.jsonl", "mlflow.db", "plan.json", "run.json", "samples.jsonl", "retired.jsonl"),
    *("attempts/N/attempt.json", "attempts/N/config.yaml", "attempts/N/console.log", "attempts/N/rank-N.log"),
    *(
        "checkpoints/N/COMMITTED",
        "checkpoints/N/MANIFEST.json",
        "checkpoints/N/cursor.json",
        "checkpoints/N/rng-N.json",
    ),
    *("checkpoints/N/baseline.json", "checkpoints/N/record.json", "checkpoints/N/rollout.jsonl"),
    *("checkpoints/N/adaptive_weights.json", "checkpoints/N/ahead.json", "checkpoints/N/retired.json"),
    *("checkpoints/N/carried.json", "checkpoints/N/pass_rates.json", "checkpoints/N/sources.json"),
    "checkpoints/N/teacher.json",
    *("rollouts/N/rank-N.spare", "rollouts/N/rank-N.unfinished", "rollouts/N/rank-N.turns"),
    *("checkpoints/N/megatron/N.distcp", "checkpoints/N/megatron/common.pt", "checkpoints/N/megatron/index.json"),
    *("jobs/N/config.yaml", "jobs/N/job.json", "record/rank-N.jsonl.gz", "rollouts/N/rank-N.journal"),
    *("evaluations/N.jsonl", "evaluations/N-eval.jsonl"),
    "spending/rank-N.requests",
    *("experts.json", "attempts/N/rank-N.stacks", "attempts/N/srun.log", "attempts/N/traces/*"),
    *("wandb/*.wandb", "swanlab/*.swanlab", "tensorboard/*", "wandb/*", "swanlab/*"),
}
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
OTHER_JSON = {"deep": b"[" * 3000 + b"]" * 3000, "infinite": b"[Infinity]", "other": b"[1]"}


def planted(path: Path, marked: Path) -> bytes:
    """A file that leaves a mark where it is unpickled, or read as YAML that may make objects."""
    if path.suffix in (".yaml", ".yml"):
        return f"run: !!python/object/apply:os.mkdir ['{marked}/yaml']\n".encode()
    found = plain(marked / "pickle")  # torch.load and numpy.load would run it as pickle.load does
    return gzip.compress(found) if path.suffix == ".gz" else found


def kind(name: str) -> str:
    """Return the kind of a file of a run: its name with N for numbers; of trackers, whether its library reads it."""
    top, *inner = name.split("/")
    if inner[1:2] == ["traces"]:
        return "attempts/N/traces/*"
    if top in ("wandb", "swanlab", "tensorboard", "trackio"):
        suffix = Path(name).suffix
        return f"{top}/*{suffix}" if suffix in (".wandb", ".swanlab") else f"{top}/*"
    return re.sub(r"_*[0-9]+(_[0-9]+)?", "N", name)


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


def kept(folder: Path) -> list[str]:
    """The files of a folder, but for those of a commit."""
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [name for name in names if Path(name).name not in (commit.MANIFEST, commit.COMMITTED)]


def marks(folder: Path) -> list[str]:
    """Files that planted pickles have made."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def loads(model: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path, Path]]:
    """Errors for each copy with a pickle or other JSON in it, the folder of copies, and the one for marks."""
    folder, marked = tmp_path_factory.mktemp("planted"), tmp_path_factory.mktemp("marks")
    names = kept(checkpoint)
    assert {"megatron/index.json", "megatron/common.pt", "rng-0.json", "cursor.json", "rollout.jsonl"} < set(names)
    assert {"carried.json", "pass_rates.json", "sources.json", "ahead.json", "retired.json"} < set(names)
    assert any(name.endswith(".distcp") for name in names)
    names += [f"megatron/{name}" for name in OF_LIBRARIES if f"megatron/{name}" not in names]
    copies = []
    for kind, make in KINDS.items():
        for number, name in enumerate(names):
            copy = folder / f"{kind}-{number}-{Path(name).name}"
            copies.append(plant(checkpoint, copy, name, make(marked / copy.name)))
    for kind, content in OTHER_JSON.items():
        for number, name in enumerate(name for name in names if name.endswith(".json")):
            copies.append(plant(checkpoint, folder / f"{kind}-{number}-{Path(name).name}", name, content))
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
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 2 and marks(marked) == [], done.stderr
    (line,) = done.stderr.splitlines()  # what libraries say goes to a log, which does not stay
    assert line.startswith(f"error: {folder / 'older'}") and done.stdout == ""
    assert not list(tmp_path.glob("*.log"))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole checkpoint of LoRA adapters, and the same in a folder of peft."""
    path = tmp_path_factory.mktemp("adapters") / "000002"
    run("save-adapters", model, path)
    return path, path.with_name(f"{path.name}-peft")


def test_a_pickle_in_no_file_of_a_checkpoint_or_folder_of_adapters_runs(
    model: Path, adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, peft = adapters
    marked = tmp_path / "marks"
    marked.mkdir()
    copies = []
    for kind, make in KINDS.items():
        for number, name in enumerate(kept(checkpoint)):
            copy = tmp_path / f"{kind}-{number}-{Path(name).name}"
            copies.append(plant(checkpoint, copy, name, make(marked / copy.name)))
        for name in (*kept(peft), "adapter_model.bin"):
            copy = Path(shutil.copytree(peft, tmp_path / f"{kind}-peft-{name}"))
            (copy / name).write_bytes(make(marked / copy.name))
            if name == "adapter_model.bin":  # the file that peft wrote before there was safetensors
                (copy / "adapter_model.safetensors").unlink()
            copies.append(copy)
    assert {copy.name.partition("-peft-")[2] for copy in copies} >= {"adapter_config.json", "adapter_model.safetensors"}
    said = run("load-adapters", model, *copies, checkpoint, peft)
    assert marks(marked) == []
    assert not any(said.pop(checkpoint.name).values()) and not any(said.pop(peft.name).values())
    for name, found in said.items():
        if "-peft-" in name:
            assert found["from-hf"] is not None, name
            assert "is a pickle, which is not read" in found["from-hf"][1] or not name.endswith(".bin"), found
        elif name.endswith((".distcp", "index.json")):
            assert all(found[key] for key in ("resume", "evaluate", "export", "adapter")), (name, found)
        for kind, text in filter(None, (one for key, one in found.items() if key != "whole")):
            assert kind == "ValueError" and len(text.splitlines()) == 1 and str(tmp_path / name) in text, (name, text)


TRACKERS = ("wandb/", "swanlab/", "tensorboard/", "trackio/", "mlflow.db")


@pytest.fixture
def handed_over(checkpoint: Path, adapters: tuple[Path, Path], tmp_path: Path) -> RunDir:
    """A run of a sweep that failed after some steps, with what each part of a run writes: the trackers, too."""
    top = tmp_path / "sweep"
    top.mkdir()
    with (sweep := SweepDir(top)).lock():
        sweep.open({"one": ["optimizer.lr=1e-6"]})
    made = make_run(top / "one", {**TRACKING, "record_interval": 1})
    command = [sys.executable, "-m", "tests.torch.trackers.attempt", str(made.path), "4"]
    done = subprocess.run(command, env=environment(made, HOME=str(tmp_path)), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with made.lock():
        attempt = made.new_attempt(loader.load(made.config))
        attempt.log_path(0).write_text("Traceback (most recent call last):\n  f()\nZeroDivisionError: the cause\n")
        attempt.console.write_text("gspo-hpc: rank 0 ended\n")
        attempt.stacks_path(0).write_text("Thread 0x1 (most recent call first):\n")
        (attempt.path / "srun.log").write_text("srun: error\n")
        attempt.traces.mkdir()
        (attempt.traces / "step-000001-rank-0.json.gz").write_bytes(gzip.compress(b"{}"))
        attempt.finish("failed", 1, "rank 0 on n1: ZeroDivisionError: the cause")
    record = made.path / "record"
    sample_record.append(sample_record.path_of(record, 0), sample_record.packed([group(1, 0)]))
    for path in (checkpoint, adapters[0]):
        shutil.copytree(path, made.checkpoints / path.name)
    for what in ("journal", "turns", *CARRIED):
        Journal(made.rollouts / "000001", 0, fingerprint="f", rollout=1, kind=what).close()
    assert Spending(spending.file_of(made.path, 0), Judges(), spending.Patience.from_now(made.path, 60.0)).ask(
        Amount(1, 5, 6), seconds=0.0
    )
    made.plan.write_text("{}")
    made.experts.write_text("{}")
    for step in (1, 2):
        stored.write_into(made, step, [row(1, True, step=step)], by_command=step == 2)
    made.append_retired([{"step": 1, "row": 0, "pass_rate": 1.0}])
    job = new_job_folder(made.path)
    record_job(job, "7", "gspo_hpc")
    (job / "config.yaml").write_text(made.config.read_text())
    (job / "7_0_log.out").write_text("slurmstepd: error\n")
    sweep.write_tasks(new_job_folder(top), {0: job})
    assert main(["report", str(made.path)]) == 0
    missing = [name for name, path in vars(made).items() if isinstance(path, Path) and not path.exists()]
    assert not missing, done.stdout
    return made


# Those that read a run and call neither its code nor a library of tensors.
COMMANDS = (
    *(("status", "RUN"), ("status", "SWEEP"), ("diagnose", "RUN"), ("logs", "RUN"), ("cancel", "RUN")),
    ("compare", "RUN", "RUN", "--steps", "1", "2"),
    *(("report", "RUN"), ("report", "--compare", "RUN", "RUN", "--out", "OUT")),
)
# Trackers whose files lie here are written to; the others' are sent to a server (below).
SYNC = ("sync", "RUN", "tracking.wandb=disabled", "tracking.swanlab=disabled")


def read_rollout(run: RunDir) -> None:
    """Read whatever a resumed attempt reads in the folder of a rollout."""
    folder = run.rollouts / "000001"
    read_journals(folder, "f")
    read_turns(folder, "f")
    carried = CarriedFiles(run.rollouts)
    for kind in CARRIED:
        path = folder / f"rank-0000.{kind}"
        read_journal(path, "f")
        places(path, "f")
        carried.read(Place(1, "f", path.name, 0, path.stat().st_size))


@pytest.mark.timeout(900)
def test_no_command_that_reads_a_run_runs_a_pickle_in_it(
    handed_over: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    top = handed_over.path
    monkeypatch.setenv("TRACKIO_DIR", str(top / "trackio"))
    marked = tmp_path / "marks"
    marked.mkdir()
    names = [str(path.relative_to(top)) for path in sorted(top.rglob("*")) if path.is_file()]
    assert {kind(name) for name in names} >= KINDS_OF_FILES, "a file of a run that nothing is planted in"
    places = {"RUN": str(top), "SWEEP": str(top.parent), "OUT": str(tmp_path / "compared.html")}
    for name in (*names, *OF_SUBMITIT, "../sweep.json", "../jobs/0001/tasks.json"):
        path = top / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(planted(path, marked))
        commands = (*COMMANDS, SYNC) if name.startswith(TRACKERS) or name.count("/") == 0 else COMMANDS
        for words in commands:
            code = main([places.get(word, word) for word in words])
            said = capsys.readouterr().err
            assert code in (0, 1, 2) and len(said.splitlines()) <= 6, (name, words, said)
        if name.startswith("rollouts/"):
            read_rollout(handed_over)
            capsys.readouterr()
        assert marks(marked) == [], name
        path.unlink() if before is None else path.write_bytes(before)


@pytest.mark.timeout(600)
def test_no_library_of_a_tracker_runs_a_pickle_in_what_it_uploads(handed_over: RunDir, tmp_path: Path) -> None:
    marked = tmp_path / "marks"
    marked.mkdir()
    top = handed_over.path
    for name in ("wandb", "swanlab"):
        files = [path for path in (top / name).rglob("*") if path.is_file() and not path.is_symlink()]
        assert files, name
        for path in files:
            path.write_bytes(planted(path, marked))
    with WandbServer() as wandb, SwanlabServer() as swanlab:
        variables = wandb.environment() | swanlab.environment()
        words = ("tracking.tensorboard=false", "tracking.mlflow=false", "tracking.trackio=false")
        done = sync(handed_over, *words, HOME=str(tmp_path), **variables)
        assert "Traceback" not in done.stderr and wandb.requests, done.stderr
    assert marks(marked) == []
