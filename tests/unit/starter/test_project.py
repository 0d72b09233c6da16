"""`gspo-hpc init`: what it writes is a config that is valid, data, and a reward function whose test passes.

Takes 6 s. It would catch a template that the loader or a rule refuses, and a reward that does not do what it says.
tests/run/test_starter.py trains one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import load
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.starter import project

SCRIPT = """
trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --num_generations 8 --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 32 --learning_rate 1e-6 --max_steps 100 --importance_sampling_level sequence
"""


def pytest_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """The user's own tests, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_reward.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("cuda", [False, True])
def test_a_project_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    made = project.write(tmp_path / "my sums", cuda=cuda)
    assert {path.name for path in made.files} == {"config.yaml", "train.jsonl", "reward.py", "test_reward.py"}
    monkeypatch.chdir(tmp_path / "my sums")
    config = load("config.yaml")
    plan = make_plan(config, 20)
    assert plan.valid and not plan.not_run and plan.warnings == () and config.missing() == []
    assert config.run.name == "my-sums" and config.cluster.platform == ("cuda" if cuda else "cpu")
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and all(eval_sum(row["prompt"]) == row["answer"] for row in rows)


def eval_sum(prompt: str) -> int:
    """The sum that a prompt asks for."""
    a, _, b = prompt.split("?")[0].split()[2:5]
    return int(a) + int(b)


def test_its_reward_is_tested(tmp_path: Path) -> None:
    project.write(tmp_path)
    done = pytest_in(tmp_path)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout
    reward = tmp_path / "reward.py"
    reward.write_text(reward.read_text().replace("numbers[-1]", "numbers[0]"))
    assert pytest_in(tmp_path).returncode == 1, "a wrong reward is found"


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "reward.py is there already; name another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"question": "1+1?", "answer": "2"}, "question", "answer"),
        ({"id": 1, "problem": "1+1?", "solution": "so 2"}, "problem", "solution"),
        ({"prompt": "1+1?", "output": 2}, "prompt", "output"),
    ],
)
def test_a_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, object], prompt: str, answer: str
) -> None:
    (tmp_path / "mine.jsonl").write_text(f"{json.dumps(row)}\n" * 30)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--from", "mine.jsonl"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    config = load("config.yaml")
    assert (config.data.train, config.data.prompt_key) == ("../mine.jsonl", prompt)
    assert f'fields["{answer}"]' in Path("reward.py").read_text() and not Path("train.jsonl").exists()
    assert make_plan(config, 30).valid and pytest_in(Path()).returncode == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[1]\n", "its first rows cannot be read"), ('{"a": 1, "b": 2}\n', "no field is a prompt; it has a, b")],
)
def test_a_data_file_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    (tmp_path / "mine.jsonl").write_text(text)
    assert main(["init", str(tmp_path / "mine"), "--from", str(tmp_path / "mine.jsonl")]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "mine").exists()


def test_a_script_of_another_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--from", "run.sh"]) == 0
    told = capsys.readouterr().out
    assert "arguments of TRL are carried over" in told and "data is that of this project" in told
    monkeypatch.chdir(tmp_path / "mine")
    config = load("config.yaml")
    assert config.batch.num_generations == 8 and config.run.max_steps == 100 and config.missing() == []
    assert make_plan(config).valid
    text = Path("config.yaml").read_text()
    assert text.index("\nreward:") < text.index("# Carried over:")
