"""``gspo-hpc train --dry-run``: the ranks join their groups, tell their places and end. Two ranks, half a minute.

Catches places that are not those of the plan, parameters that are not those of the model, and anything left behind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import catalog
from gspo_hpc.planning import ranks as rank_grid
from gspo_hpc.planning.plan import make_plan


def raw(model: Path, **parallel: int) -> dict[str, Any]:
    sizes = {f"{name}_parallel_size": size for name, size in parallel.items()}
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"platform": "cpu", "gpus_per_node": 2, "threads_per_rank": 1},
        "parallel": sizes,
    }


def dry_run(folder: Path, content: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    command = [sys.executable, "-m", "gspo_hpc", "train", str(path), "--dry-run"]
    environment = os.environ | {"TMPDIR": str(folder / "tmp"), "COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    small = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(catalog.content("Qwen3-8B") | small | heads))
    (tmp_path / "tmp").mkdir()
    return folder


@pytest.mark.parametrize("parallel", [{"tensor_model": 2}, {"pipeline_model": 2}, {}])
def test_places_and_parameters(parallel: dict[str, int], model: Path, tmp_path: Path) -> None:
    content = raw(model, **parallel)
    done = dry_run(tmp_path, content)
    assert done.returncode == 0, done.stderr
    head, *rows, last = done.stdout.splitlines()
    assert last.startswith("2 ranks joined") and head.split()[:2] == ["rank", "node"]
    seats = rank_grid.seats(make_plan(from_dict(content)).layout)
    for seat, row in zip(seats, rows, strict=True):
        rank, _, local, *places, count = row.split()
        assert [int(rank), int(local)] == [seat.rank, seat.gpu]
        names = ("tp", "pp", "cp", "dp", "ep", "etp", "expert_dp")
        assert list(map(int, places)) == [getattr(seat, name) for name in names]
        assert re.fullmatch(r"[\d,]+", count)
    counts = [int(row.split()[-1].replace(",", "")) for row in rows]
    layer = (4 + 2 * 2) * 16 * 64 + 4 * 16 * 64 + 2 * 16 + 2 * 64 + 3 * 64 * 128
    ends, norm = 1000 * 64, 64
    if "pipeline_model" in parallel:
        assert counts == [2 * layer + ends, 2 * layer + ends + norm]
    elif "tensor_model" in parallel:
        whole = 2 * 16 + 2 * 64  # norms of a layer
        assert counts == [4 * ((layer - whole) // 2 + whole) + ends + norm] * 2
    else:
        assert counts == [4 * layer + 2 * ends + norm] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run.yaml", "tmp"], "a dry run leaves nothing"
    assert not list((tmp_path / "tmp").glob("gspo-dry-run-*"))


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
WRONG = """
import sys
from pathlib import Path
import torch.distributed as dist
from gspo_hpc.training.jobs.dry_run import dry_run

real, calls = dist.all_reduce, []

def wrong(tensor, *arguments, **options):
    calls.append(tensor)
    real(tensor, *arguments, **options)
    tensor += len(calls) == int(sys.argv[2])

dist.all_reduce = wrong
dry_run(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(("number", "group"), [(1, "world"), (8, "expert data")])
def test_a_group_whose_sum_is_wrong_is_named(number: int, group: str, model: Path, tmp_path: Path) -> None:
    """The last one of eight, too: a network that only some groups use shows itself when they are used."""
    content = raw(model)
    content["cluster"]["gpus_per_node"] = 1
    (tmp_path / "config.yaml").write_text(json.dumps(content))
    command = [sys.executable, "-c", WRONG, str(tmp_path), str(number)]
    done = subprocess.run(command, env=os.environ | ALONE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith(f"a sum of ones over 1 ranks of {group} is 2\n"), done.stderr


def test_ranks_that_only_generate_are_told_apart(model: Path, tmp_path: Path) -> None:
    content = raw(model, tensor_model=2)
    content["cluster"]["gpus_per_node"] = 3
    content["rollout"] = {"mode": "server", "engines_per_node": 1}
    done = dry_run(tmp_path, content)
    assert done.returncode == 0, done.stderr
    _, *rows, last = done.stdout.splitlines()
    assert last.startswith("3 ranks joined")
    places = [row.split() for row in rows]
    assert [(place[0], place[3], place[-1] == "generates") for place in places] == [
        ("0", "0", False),
        ("1", "1", False),
        ("2", "-", True),
    ]


def test_a_rank_that_fails_says_why_and_nothing_that_libraries_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    done = dry_run(tmp_path, raw(model, tensor_model=2))
    lines = done.stderr.splitlines()
    ours = [line.partition(":")[0] for line in lines[: lines.index("Traceback (most recent call last):")]]
    assert done.returncode == 1 and set(ours) <= {"warning", "not checked"}, done.stderr
    assert "none9" in lines[-2] and lines[-2].startswith("error: ")
    assert lines[-1].startswith("gspo-hpc: rank ") and lines[-1].endswith(" ended with exit code 1")


def test_a_config_of_one_gpu_is_tried_on_a_cpu(model: Path, tmp_path: Path) -> None:
    """The card that the config names has too little memory for a real run; here it is no limit."""
    content = raw(model) | {"cluster": {"platform": "cpu", "gpu": "RTX4090", "gpu_memory_gb": 1, "threads_per_rank": 1}}
    done = dry_run(tmp_path, content)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 rank joined its process groups and summed over each of them"


def test_a_plan_that_is_refused_starts_nothing(model: Path, tmp_path: Path) -> None:
    done = dry_run(tmp_path, raw(model, tensor_model=4))
    assert done.returncode == 2 and "error: rule world_size_divides: " in done.stderr
    several = raw(model) | {"cluster": {"platform": "cpu", "nodes": 2}}
    assert "gspo-hpc submit" in dry_run(tmp_path, several).stderr


def test_ranks_of_a_slurm_job_meet_in_a_folder(model: Path, tmp_path: Path) -> None:
    """As `doctor --nodes --groups` starts them: with Slurm's variables, and without a port that somebody chose."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(raw(model, tensor_model=2)))
    own = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT", "RANK")}
    command = [sys.executable, "-m", "gspo_hpc.training.worker", "dry-run", str(folder)]
    ranks = []
    for number in (1, 0):
        slurm = {"SLURM_PROCID": str(number), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(number)}
        place = slurm | {"SLURM_NTASKS_PER_NODE": "2", "SLURMD_NODENAME": f"node{number}"}
        ranks.append(subprocess.Popen(command, env=own | place, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    places = json.loads((folder / "ranks.json").read_text())
    assert [(one["rank"], one["node"], one["tp"]) for one in places] == [(0, "node0", 0), (1, "node1", 1)]
