"""`gspo-hpc init`: what it writes is a config that is valid, data, and a reward function whose test passes.

Takes 15 s. It would catch a template that the loader or a rule refuses, a reward that does not do what it says, and a
script of TRL, verl or ms-swift that becomes a project with broken rules, without its data or without its rewards.
tests/run/test_starter.py trains one.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import load
from gspo_hpc.config.schema import Config
from gspo_hpc.data import hub_data
from gspo_hpc.data.counting import count_rows
from gspo_hpc.data.rows import load_rows
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.rewards import registry
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


@pytest.mark.parametrize("name", ["config.yaml", "reward.py", "test_reward.py", "train.jsonl"])
def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert f"{name} is there already; name another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"question": "1+1?", "answer": "2"}, "question", "answer"),
        ({"id": 1, "problem": "1+1?", "solution": "so 2"}, "problem", "solution"),
        ({"prompt": "1+1?", "output": 2}, "prompt", "output"),
    ],
)
@pytest.mark.parametrize("name", ["mine.jsonl", "mine.csv", "folder"])
def test_a_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, object], prompt: str, answer: str, name: str
) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 30)
    elif name.endswith("jsonl"):
        (tmp_path / name).write_text(f"{json.dumps(row)}\n" * 30)
    else:
        (tmp_path / name).write_text(f"{','.join(row)}\n" + f"{','.join(map(str, row.values()))}\n" * 30)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--from", name]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    config = load("config.yaml")
    assert (config.data.train, config.data.prompt_key) == (f"../{name}", prompt)
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
    assert (
        "arguments of TRL are carried over" in told and "data is that of this project" in told and "--from" not in told
    )
    monkeypatch.chdir(tmp_path / "mine")
    config = load("config.yaml")
    assert config.batch.num_generations == 8 and config.run.max_steps == 100 and config.missing() == []
    assert make_plan(config).valid
    text = Path("config.yaml").read_text()
    assert text.index("\nreward:") < text.index("# Carried over:")


TRL = """
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
{more}
NUMBER = re.compile(r"-?[0-9]+")

def last(text):
    found = NUMBER.findall(text)
    return found[-1] if found else None

def right(completions, ground_truth, **kwargs):
    return [2.0 if last({text}) == truth else 0.0 for one, truth in zip(completions, ground_truth)]

def short(completions):
    return [-len({text}) / 100 if {text} else None for one in completions]

data = load_dataset("openai/gsm8k", "main", split="train")
data = data.map(lambda row: {{"prompt": {prompt}, "ground_truth": row["answer"].split("#### ")[1]}})
args = GRPOConfig(per_device_train_batch_size=8, num_generations=8, max_steps=100, reward_weights=[1.0, 0.5])
GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[right, short], args=args, train_dataset=data).train()
"""
CHAT = {"text": "one[0]['content']", "prompt": "[{'role': 'user', 'content': row['question']}]", "more": ""}
PLAIN = {"text": "one", "prompt": "row['question']", "more": ""}


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, plans: int = 0) -> Config:
    """The config of a project that begins from a script, in its folder; `plans`: the exit code of its plan."""
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--from", name]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    config = load("config.yaml")
    plan = make_plan(config, count_rows(config.data.train))
    assert plan.valid and config.missing() == []
    assert main(["plan", "config.yaml"]) == plans  # 3 where the rows that the script names are not here
    assert registry.wrong_terms(config.reward) == {} and "A run also needs" not in Path("config.yaml").read_text()
    return config


def graded(config: Config, completion: str, prompt: str, fields: dict[str, object]) -> list[float]:
    """The rewards that a config's functions give, called as the pool calls them."""
    found = [registry.load(term.function) for term in config.reward.functions]
    return [float(one(completion, prompt=prompt, fields=fields)) for one in found]


@pytest.mark.parametrize("form", [PLAIN, CHAT], ids=["plain", "chat"])
def test_a_python_file_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: dict[str, str]) -> None:
    """Ordinary sizes (8 a device, groups of 8), a dataset by its name, and reward functions that grade a batch."""
    config = begun(tmp_path, monkeypatch, "train.py", TRL.format(**form))
    assert (config.data.train, config.data.prompt_key) == ("openai/gsm8k:main/train-*.parquet", "question")
    assert hub_data.is_name(str(config.data.train)) and hub_data.wrong_name(str(config.data.train)) is None
    assert [(one.function, one.weight) for one in config.reward.functions] == [
        ("reward.py:grade_right", 1.0),
        ("reward.py:grade_short", 0.5),
    ]
    row = {"answer": "6 times 7 is 42. #### 42"}
    assert graded(config, "It is 42", "6 times 7?", dict(row)) == [2.0, -0.08]
    assert graded(config, "It is 43", "6 times 7?", dict(row)) == [0.0, -0.08]
    assert graded(config, "", "6 times 7?", dict(row)) == [0.0, 0.0], "None counts nothing"
    text = Path("config.yaml").read_text()
    assert "micro_batch_size: 1 # was 8, which breaks the rule rollout_prompts_fill_micro_batches" in text
    assert "reward_funcs=" not in text and "dataset_name=" not in text, (
        "they are here, so nothing says that they are not"
    )
    code = Path("reward.py").read_text()
    assert "if False" not in code and "if True" not in code
    done = pytest_in(Path())
    assert done.returncode == 0 and "2 skipped" in done.stdout, done.stdout


def test_functions_that_need_the_training_script_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of one that uses the trainer's libraries would start them in every reward process."""
    more = "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('x')\n"
    text = TRL.format(**PLAIN, **{}).replace("import re\n", f"import re\n{more}", 1)
    config = begun(tmp_path, monkeypatch, "train.py", text.replace("[-len(one)", "[-len(tokenizer(one))"))
    assert [one.function for one in config.reward.functions] == ["reward.py:grade_right", "reward.py:short"]
    assert "tokenizer" not in Path("reward.py").read_text()
    with pytest.raises(NotImplementedError, match="fill in short, the reward function of train.py"):
        graded(config, "42", "?", {"answer": "#### 42"})


def test_a_script_of_ms_swift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset {} --reward_funcs accuracy format "
        "--reward_weights 1 0.2 --per_device_train_batch_size 8 --num_generations 8 --max_completion_length 1024 "
        "--max_steps 9 --tuner_type full"
    )
    config = begun(tmp_path, monkeypatch, "run.sh", script.format("AI-MO/NuminaMath-TIR#1000"))
    assert config.data.train == "AI-MO/NuminaMath-TIR:data/train-*.parquet"
    assert [(one.function, one.weight) for one in config.reward.functions] == [
        ("reward.py:accuracy", 1.0),
        ("reward.py:format", 0.2),
    ]
    (tmp_path / "two").mkdir()
    many = script.format("a/b c/d").replace("_size 8", "_size 32")
    config = begun(tmp_path / "two", monkeypatch, "run.sh", f"NPROC_PER_NODE=8 {many}")
    rows = Path("train.jsonl").read_text().splitlines()
    assert config.data.train == "train.jsonl", "what is not known is the project's own"
    assert len(rows) == make_plan(config).quantities["num_rollout_prompts"] > 20, "as many as a rollout takes"


def test_rows_that_are_at_hand_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the project is not there yet: their number and their fields were not known."""
    rows = [json.dumps({"question": f"What is {n} + {n}?", "label": 2 * n}) for n in range(9)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    script = (
        "NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset sums.jsonl "
        "--reward_funcs accuracy --per_device_train_batch_size 8 --num_generations 8 --steps_per_generation 8"
    )
    config = begun(tmp_path, monkeypatch, "run.sh", script)
    assert (config.data.train, config.data.prompt_key) == ("../sums.jsonl", "question")
    assert config.batch.steps_per_generation == 4, "nine prompts do not fill a rollout of sixteen"
    assert "--reward_funcs accuracy: " in Path("config.yaml").read_text(), "it is to be filled in"


VERL = """
TRAIN=$HOME/data/gsm8k/train.parquet
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$TRAIN data.val_files={eval} \\
  data.train_batch_size=1024 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
  actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_training_steps=100 {more}
"""


def test_a_script_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """$HOME is the user's; a variable that nobody set stays and is said; rows have verl's form."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NOWHERE", raising=False)
    config = begun(tmp_path, monkeypatch, "run.sh", VERL.format(eval="'~/data/test.parquet'", more=""), plans=3)
    assert config.data.train == f"{tmp_path}/home/data/gsm8k/train.parquet"
    assert config.data.eval == f"{tmp_path}/home/data/test.parquet"
    assert "set by the shell; write it out" not in Path("config.yaml").read_text()
    row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "42"}}
    assert graded(config, "so 42", "?", dict(row)) == [1.0] and graded(config, "so 43", "?", dict(row)) == [0.0]
    assert "3 passed" in pytest_in(Path()).stdout
    (tmp_path / "other").mkdir()
    capsys.readouterr()
    config = begun(
        tmp_path / "other", monkeypatch, "run.sh", VERL.format(eval="$NOWHERE/test.parquet", more=""), plans=3
    )
    assert config.data.eval == "$NOWHERE/test.parquet"
    assert "data.eval is $NOWHERE/test.parquet: a variable in it is not set here" in capsys.readouterr().out


def test_a_reward_function_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = (
        "SCALE = 2\n\ndef score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': SCALE * (ground_truth in solution_str), 'acc': 1}\n"
    )
    (tmp_path / "mine.py").write_text(own)
    more = "custom_reward_function.path=mine.py custom_reward_function.name={}"
    text = VERL.format(eval="x.parquet", more=more)
    config = begun(tmp_path, monkeypatch, "run.sh", text.format("score"), plans=3)
    assert graded(config, "so 42", "?", {"data_source": "a", "reward_model": {"ground_truth": "42"}}) == [2.0]
    assert "1 passed" in pytest_in(Path()).stdout
    (tmp_path / "other").mkdir()
    config = begun(tmp_path / "other", monkeypatch, "run.sh", text.format("score"), plans=3)
    assert [one.function for one in config.reward.functions] == ["reward.py:score"]


def test_a_file_of_the_script_is_found_from_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"prompt": "1+1?", "answer": 2}\n' * 40)
    config = begun(tmp_path, monkeypatch, "run.sh", f"{SCRIPT.rstrip()} --dataset_name data/a.jsonl\n")
    assert config.data.train == "../data/a.jsonl" and not Path("train.jsonl").exists()


def test_rows_of_verl_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    chat = [{"role": "user", "content": "What is 17 + 25?"}]
    row = {"data_source": "x", "prompt": chat, "reward_model": {"style": "rule", "ground_truth": "42"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 30), tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--from", "rows.parquet"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    text = Path("config.yaml").read_text()
    assert "train: ../rows.parquet # parquet, a row for each prompt" in text and "JSON object" not in text
    assert preflight_trial(load("config.yaml")) is None and "3 passed" in pytest_in(Path()).stdout


def preflight_trial(config: Config) -> str | None:
    """The mistake in the rewards of the first row; None if there is none."""
    (row, *_) = load_rows(str(config.data.train), config.data)
    try:
        graded(config, "42", row.text, dict(row.fields))
    except KeyError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine", "--from", "rows.xlsx"], "pandas.read_excel('rows.xlsx').to_parquet('rows.parquet')"),
        (["mine", "--from", "rows.csv"], "rows.csv: no field is a prompt; it has a, b"),
        (["mine", "--from", "empty.jsonl"], "empty.jsonl: it is empty: it needs at least one row with a prompt"),
        (["mine", "--from", "data"], "data: its first rows cannot be read: it is no folder that save_to_disk wrote"),
        (["mine", "--from", "empty.sh"], "empty.sh: it is empty"),
        (["mine", "--from", "README.md"], "README.md: this is a page or a notebook"),
        (["README.md"], "README.md: README.md is a file; name a folder for the project, or the file with --from"),
        (["README.md/mine"], "README.md/mine: README.md is a file"),
    ],
)
def test_what_no_project_begins_from_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    for name, text in {
        "rows.csv": "a,b\n",
        "rows.xlsx": "",
        "empty.jsonl": "",
        "empty.sh": "",
        "README.md": "# A project\n",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["init", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and "name one with --from" not in said and not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    "lacks", ["actor_rollout_ref.model.path=", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="]
)
def test_what_a_script_does_not_say_is_written_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacks: str
) -> None:
    """A script takes much from defaults that are not in it; the config has to be whole all the same."""
    text = " ".join(
        word for word in VERL.format(eval="data/x.parquet", more="").split(" ") if not word.startswith(lacks)
    )
    config = begun(tmp_path, monkeypatch, "run.sh", text, plans=3)
    told = capsys.readouterr().out
    assert config.data.eval == "../data/x.parquet" and "data.eval: data/x.parquet is not there" in told
    assert "of the original is not known" in told or "the original gives none" in told


ON_NODES = """#!/bin/bash
srun --nodes=4 bash -c "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 \\
 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
 actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=8 \\
 trainer.nnodes=\\$SLURM_NNODES"
"""
UNSAID = """swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-0.5B-Instruct --num_generations 8 --dataset d.jsonl \\
    --per_device_train_batch_size 8
"""


@pytest.mark.parametrize(
    ("name", "script", "words"),
    [("run.sh", ON_NODES, []), ("my run.sh", SCRIPT, []), ("swift.sh", UNSAID, ["--project", "ms-swift"])],
)
def test_what_a_conversion_assumed_is_told_and_the_printed_command_runs(
    name: str,
    script: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(script)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--from", name, *words]) == 0
    told = capsys.readouterr()
    (printed,) = [line for line in told.out.splitlines() if " convert " in line]
    assert main(shlex.split(printed)[shlex.split(printed).index("convert") :]) == 0
    command = capsys.readouterr()
    assert "Carried over:" in command.out
    for line in command.err.splitlines():  # the plan of the config of init is another: its rules hold
        if not line.startswith(("warning: the plan breaks", "warning: this fixes")) and "set batch.micro" not in line:
            line = line.replace("give --gpus N", "set cluster.nodes and cluster.gpus_per_node")
            line = line.replace("give --rows N", "set run.max_steps")
            assert line in told.err
    assert "--gpus" not in told.err and "--rows" not in told.err
    if script == ON_NODES:
        assert "$SLURM_NNODES is not set in the script, and a batch system or a launcher may" in told.err
