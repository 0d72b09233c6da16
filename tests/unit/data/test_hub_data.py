"""Data by its name on the hub, with the real client against a server that speaks the hub's protocol.

Takes 5 s. It would catch a file of this machine that is taken for a dataset, some parts that count as all, and a
download that a plan begins.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data import hub_data
from gspo_hpc.data.rows import load_rows
from gspo_hpc.runs import same_run
from tests.hub_server import COMMIT, Hub, serving

PARTS = {f"main/train-0000{number}-of-00002.jsonl": b'{"prompt": "%d"}\n' % number * (number + 1) for number in (0, 1)}
FILES = PARTS | {"main/test.jsonl": b'{"prompt": "t"}\n', "README.md": b"not asked for"}
TRAIN, TEST = "acme/sums:main/train-*.jsonl", f"acme/sums@{COMMIT}:main/test.jsonl"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving({"datasets/acme/sums": FILES}, tmp_path, monkeypatch) as address:
        yield address


def fetched(endpoint: str, **data: str) -> subprocess.CompletedProcess[str]:
    """The paths of the data, in a process of its own: the client reads its environment once."""
    code = (
        "import json, sys\nfrom gspo_hpc.config.loader import from_dict\nfrom gspo_hpc.data import hub_data\n"
        "data = hub_data.with_files(from_dict({'data': json.loads(sys.argv[1])})).data\nprint(data.train)\n"
        "print(data.eval)"
    )
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", code, json.dumps(data)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_files_are_downloaded_once(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = from_dict({"data": {"train": TRAIN, "eval": TEST}})
    assert hub_data.with_cached_files(config) == config
    main(["plan", "tiny_cpu", f"data.train={TRAIN}", "--json"])
    assert (
        f"data.train {TRAIN} is not in the cache of the hub: its prompts are not counted. A run downloads it."
        in (json.loads(capsys.readouterr().out)["not_checked"])
    )
    assert not Hub.asked, "a plan downloads nothing"

    done = fetched(server, train=TRAIN, eval=TEST)
    assert done.returncode == 0, done.stderr
    train, test = done.stdout.splitlines()[-2:]
    assert [row.prompt for row in load_rows(train, config.data)] == ["0", "1", "1"]
    assert [row.prompt for row in load_rows(test, config.data)] == ["t"]
    assert not any("README" in path for path in Hub.asked)

    asked = len(Hub.asked)
    found = hub_data.with_files(config).data
    assert (found.train, found.eval) == (train, test) and len(Hub.asked) == asked, "the cache needs no network"
    before = same_run.data_hash(train)
    next(Path(train).parent.glob("train-00001*")).unlink()
    assert same_run.data_hash(train) not in (before, None), "the data of a run is all of its files"
    assert hub_data.with_cached_files(config).data.train == TRAIN, "some parts are not all"
    assert fetched(server, train=TRAIN).stdout.splitlines()[-2] == train and same_run.data_hash(train) == before


@pytest.mark.parametrize(
    ("name", "endpoint", "reason"),
    [
        ("acme/none:train.jsonl", None, "Repository"),
        (TRAIN, "http://127.0.0.1:9", "onnect"),  # nobody listens there
        ("acme/sums:no/such-*.jsonl", None, "the dataset has no such file"),
        ("acme/sums:main/train.txt/x", None, "what follows the colon must be CONFIG/SPLIT, or end in .jsonl"),
        ("acme/sums:other/train", None, "the dataset has no such split in files that are read here"),
    ],
)
def test_what_cannot_be_had_says_how(server: str, name: str, endpoint: str | None, reason: str) -> None:
    done = fetched(endpoint or server, train=name)
    assert done.returncode == 1 and f"ValueError: data.train: {name}: " in done.stderr and reason in done.stderr
    repo, _, inside = name.partition(":")
    if "cannot be taken" in done.stderr:
        here = f"data/{repo.split('/')[1]}"
        fetch = f"hf download {repo} --repo-type dataset --include {shlex.quote(inside)} --local-dir {here}"
        assert f"{fetch}; then give {here}/{inside}" in done.stderr


@pytest.mark.parametrize(
    "inside", ["x'; touch PWNED; '.jsonl", "a b.jsonl", "$(touch PWNED).jsonl", "main/train-*.jsonl"]
)
def test_the_command_that_is_printed_fetches_that_file_and_does_nothing_else(inside: str, tmp_path: Path) -> None:
    """It is pasted into a shell, and the name may come from a config of another's making."""
    fetch = hub_data.command(f"acme/sums:{inside}").partition("; then give data/")[0]
    done = subprocess.run(
        ["sh", "-c", f"hf() {{ printf '%s\\n' \"$@\"; }}\n{fetch}"], cwd=tmp_path, capture_output=True, text=True
    )
    words = ["download", "acme/sums", "--repo-type", "dataset", "--include", inside, "--local-dir", "data/sums"]
    assert done.stdout.splitlines() == words and not any(tmp_path.iterdir())


def test_a_run_offline_says_how(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in ("train", "submit"):
        assert main([command, "tiny_cpu", f"data.train={TRAIN}"]) == 2
        error = capsys.readouterr().err
        assert "it is not in the cache of the hub, and cannot be taken from the hub (HF_HUB_OFFLINE is set)" in error
        assert "hf download acme/sums --repo-type dataset --include 'main/train-*.jsonl'" in error
    assert not Hub.asked


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("openai/gsm8k:main/train-00000-of-00001.parquet", True),
        ("openai/gsm8k@v2:train.jsonl", True),
        ("openai/gsm8k", True),
        ("openai/gsm8k:main/train", True),
        ("openai/gsm8k@refs/convert/parquet:main/train", True),
        ("openai/gsm8k.jsonl", False),
        ("data/train", False),
        ("data/train.jsonl", False),
        ("./a/b:c.jsonl", False),
        ("C:/data/train.jsonl", False),
        ("here/is:one.jsonl", False),
    ],
)
def test_which_paths_are_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: bool) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here/is:one.jsonl").write_text("")
    assert hub_data.is_name(path) is name
