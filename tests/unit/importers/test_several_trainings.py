"""A Python file that trains several times is refused, or told where it does so only perhaps.

Takes three seconds. It would catch a curriculum or a sweep that becomes one run without a word.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

HEAD = "import sys\nfrom trl import GRPOConfig, GRPOTrainer\n"
CONFIG = "GRPOConfig(num_generations=4, learning_rate=1e-6)"
TRAIN = f"t = GRPOTrainer(model='m/m', args={CONFIG}, reward_funcs=f, train_dataset=d); t.train()\n"
RUN = f"def run(d):\n    {TRAIN}"
MAKE, OF = f"def make():\n    return {CONFIG}\n", "GRPOTrainer(model='m/m', args=make(), reward_funcs=f)"
METHOD = f"class Runs:\n    def run(self, d):\n        {TRAIN}    def main(self):\n        {{}}Runs().main()\n"
SEVERAL = "so it starts several runs: leave one in the file"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"for tier, d in enumerate([a, b]):\n    {TRAIN}", "line 3: for (tier, d) in enumerate([a, b])"),
        (f"for d in (1, 2):\n    t.train() if d else None\n    {TRAIN}", "line 3: for d in (1, 2)"),
        (f"TIERS = ['a', 'b']\nfor d in TIERS:\n    {TRAIN}", "line 4: for d in TIERS"),
        (f"for i in range(3):\n    d = i\n    {TRAIN}", "line 3: for i in range(3)"),
        (f"for k, d in {{'a': 1, 'b': 2}}.items():\n    {TRAIN}", "line 3: for (k, d) in {'a': 1, 'b': 2}.items()"),
        (f"{RUN}for d in [a, b]:\n    run(d)\n", "line 5: for d in [a, b]"),
        (f"{RUN}def main():\n    for d in [a, b]:\n        run(d)\nmain()\n", "line 6: for d in [a, b]"),
        (f"{RUN}x = [run(d) for d in [a, b]]\n", "line 5: for d in [a, b]"),
        (METHOD.format("for d in [a, b]: self.run(d)\n"), "line 7: for d in [a, b]"),
        (f"{RUN}if __name__ == '__main__':\n    for d in [a, b]:\n        run(d)\n", "line 6: for d in [a, b]"),
        (f"{TRAIN.replace('t.train()', '')}for i in range(2):\n    t.train()\n", "line 4: for i in range(2)"),
        (f"{TRAIN}t.args.learning_rate = 5\nt.train()\n", "lines 3 and 5: t.train() and t.train()"),
        (f"{RUN}run(a)\nrun(b)\n", "lines 5 and 6: run(a) and run(b)"),
        (f"{MAKE}t = {OF}\nt.train()\nu = {OF}\nu.train()\n", "lines 6 and 8: t.train() and u.train()"),
    ],
)
def test_a_file_that_trains_several_times_is_refused(text: str, where: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{HEAD}{text}", gpus=1)
    middle = "both train" if where.startswith("lines") else "it trains in each turn of this loop"
    assert str(refused.value) == f"{where}: {middle}, {SEVERAL}"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"for d in sys.argv[1:]:\n    {TRAIN}", "line 3: for d in sys.argv[1:]"),
        (f"while more():\n    {TRAIN}", "line 3: while more()"),
        (
            f"if x:\n    {TRAIN.replace('t.', 't.')}else:\n    for d in [a, b]:\n        run(d)\n{RUN}",
            "line 6: for d in",
        ),
        (
            f"for d in [a, b]:\n    try:\n        {TRAIN}        break\n    except ValueError:\n        pass\n",
            "line 3: for",
        ),
        (f"for d in [a, b]:\n    {TRAIN}    if ok(d):\n        break\n", "line 3: for d in [a, b]"),
        (f"for d in [a, b]:\n    if d in sys.argv:\n        {TRAIN}", "line 3: for d in [a, b]"),
        (f"{RUN}run(a)\nif x:\n    run(b)\n", "lines 5 and 7: run(a) and run(b)"),
    ],
)
def test_a_file_that_trains_several_times_perhaps_is_told(text: str, where: str) -> None:
    if text.startswith("if x"):
        text = text.replace(TRAIN, "run(0)\n", 1)
    found = convert(f"{HEAD}{text}", gpus=1)
    told = [
        line for line in found.assumed if where in line and "if the file gets there: this is one run of these" in line
    ]
    assert len(told) == 1 and any(where in line for line in found.open)
    assert found.config.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    "text",
    [
        TRAIN,
        f"for d in [a]:\n    {TRAIN}",
        f"for i in range(1):\n    {TRAIN}",
        f"for d in [a, b]:\n    print(d)\n{TRAIN}",
        f"for d in [a, b]:\n    print(d)\nelse:\n    {TRAIN}",
        f"{RUN}if x:\n    run(a)\nelse:\n    run(b)\n",
        f"{RUN}def main():\n    if x:\n        run(a)\n        return\n    run(b)\nmain()\n",
        f"{RUN}if x:\n    run(a)\n    sys.exit(0)\nrun(b)\n",
        f"{RUN}run(a) if x else run(b)\n",
        f"{RUN}try:\n    run(a)\nexcept ValueError:\n    run(b)\n",
        f"{RUN}def first():\n    run(a)\ndef second():\n    run(b)\nCOMMANDS[sys.argv[1]]()\n",
        f"{MAKE}t = {OF}\nif x:\n    t.train(resume_from_checkpoint=x)\nelse:\n    t.train()\n",
        f"{MAKE}t = {OF}\ntry:\n    t.train(resume_from_checkpoint=True)\nexcept ValueError:\n    t.train()\n",
        f"{TRAIN}for i in range(2):\n    t.evaluate()\n",
    ],
)
def test_a_file_that_trains_once_is_neither(text: str) -> None:
    found = convert(f"{HEAD}{text}", gpus=1)
    assert not found.open and not any("one run of these" in line for line in found.assumed)


TRL = "train_grpo.py --num_generations 8 --max_steps 20 --learning_rate 1e-6 --beta 0.0 --per_device_train_batch_size 4"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("python stage2.py --learning_rate 1e-5 --num_generations 4 --max_steps 4", "stage2.py"),
        ("python -m torch.distributed.run --nproc_per_node 8 stages/two.py", "stages/two.py"),
        ("accelerate launch --num_processes 8 -m stages.two --x 1", "stages.two"),
        ("srun python -m stages.two", "stages.two"),
        ("python a.py\npython b.py\npython c.py\npython a.py\npython d.py\npython e.py", "a.py, b.py, c.py and 2 more"),
        ('python "my dir/stage2.py"', "my dir/stage2.py"),
        ("[ -f done ] && python stage2.py", "stage2.py (if a condition holds)"),
        ("pip install trl\npython -m pip install x\ncp a.py b.py\npkill -f foo.py\necho c.py\ncat d.py", ""),
        ("wget http://x/y.py\ncode a.py", ""),
    ],
)
def test_what_else_a_script_starts_is_named(command: str, named: str) -> None:
    for text in (f"python {TRL}\n{command}\n", f"{command}\npython {TRL}\n"):
        notes = [one for one in convert(text, gpus=8).assumed if "also starts" in one]
        assert notes == [f"the script also starts {named}, of which nothing is converted"] * bool(named)


@pytest.mark.parametrize(
    "command",
    [
        "wget -q https://x/verl/trainer/main_ppo.py -O /tmp/main_ppo.py",
        "curl -sSLO https://x/train_grpo.py",
        "dos2unix main_ppo.py",
        "code train_grpo.py",
        "pytest -q tests/test_grpo.py",
        "pylint train_grpo.py; mypy a.py; flake8 b.py; truncate -s 0 c.py",
        "aws s3 cp train_grpo.py s3://b/",
        "hf upload me/x train_grpo.py",
        "python -m py_compile train_grpo.py",
        "python3 -m black --check train_grpo.py",
        "uv run python -m pytest train_grpo.py",
        "huggingface-cli download me/x train_grpo.py",
        "sudo cp train_grpo.py /w",
        "bandit tools/other.py",
        "docker cp other.py c:/w",
    ],
)
def test_a_command_that_copies_or_reads_a_file_is_no_run(command: str) -> None:
    """Such a script was refused as one of two runs, or told that the file is started."""
    alone = convert(f"python {TRL}\n", gpus=8)
    for text in (f"{command}\npython {TRL}\n", f"python {TRL}\n{command}\n"):
        assert convert(text, gpus=8).text == alone.text


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Return the folder of a script, with the Python file of a run in it."""
    (tmp_path / "train_grpo.py").write_text(f"{HEAD}{TRAIN}")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "python -m dis train_grpo.py",
        "python -mpy_compile train_grpo.py",
        "bandit train_grpo.py",
        "uv run ruff check train_grpo.py",
        "sudo cp train_grpo.py /w",
        "docker cp train_grpo.py c:/w",
        "gsutil -m cp train_grpo.py gs://b",
        "ssh host cat train_grpo.py",
        "srun cp train_grpo.py /tmp",
    ],
)
def test_a_command_that_only_names_the_file_of_the_run_is_told(command: str, beside: Path) -> None:
    """Such scripts were refused as ones of two runs."""
    alone = convert("python train_grpo.py\n", gpus=8, folder=beside, name="run.sh")
    for text in (f"{command}\npython train_grpo.py\n", f"python train_grpo.py\n{command}\n"):
        found = convert(text, gpus=8, folder=beside, name="run.sh")
        assert found.values == alone.values
        assert f"{command} is taken to read that file, and not to start it" in found.assumed
    assert convert(f"{command}\n", gpus=8, folder=beside, name="run.sh").values == alone.values  # nothing else runs


@pytest.mark.parametrize(
    "command",
    [
        "./train_grpo.py",
        "srun ./train_grpo.py",
        "mpirun ./train_grpo.py",
        "mpirun -mca btl tcp -np 2 python train_grpo.py",
        "uv run --with trl train_grpo.py",
        "coverage run train_grpo.py",
        "python -m pdb train_grpo.py",
        "python -m coverage run train_grpo.py",
        "python3.11 -u -m cProfile -o x train_grpo.py",
        "python -mtorch.distributed.run train_grpo.py",
        "torchrun train_grpo.py",
        "ssh host python train_grpo.py",
        "amlt x train_grpo.py --num_generations 4",
    ],
)
def test_a_command_that_starts_the_file_is_another_run(command: str, beside: Path) -> None:
    """Without a word behind them, srun and mpirun ended convert with an error of Python's."""
    with pytest.raises(ValueError, match=r"^it starts 2 runs: leave one in the file$"):
        convert(f"{command}\npython train_grpo.py\n", gpus=8, folder=beside, name="run.sh")


def test_overrides_of_verl_start_its_file_behind_any_program() -> None:
    run = "main_ppo.py algorithm.adv_estimator=grpo data.train_batch_size=64 actor_rollout_ref.rollout.n=8"
    with pytest.raises(ValueError, match=r"^it starts 2 runs: leave one in the file$"):
        convert(f"amlt x verl/trainer/{run}\npython3 verl/trainer/{run}\n", gpus=8)


def test_a_module_among_the_arguments_of_a_run_is_not_what_reads_its_file() -> None:
    alone = convert(f"python {TRL}\n", gpus=8)
    text = TRL.replace(".py ", ".py -m ast ")
    assert convert(f"python {text}\n", gpus=8).values.items() >= alone.values.items()


def test_what_a_job_of_the_hub_starts_is_named() -> None:
    found = convert(f"hf jobs uv run --flavor a10 {TRL}\nhf jobs uv run evaluate.py\n", gpus=8)
    assert "the script also starts evaluate.py, of which nothing is converted" in found.assumed


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("trl sft --model_name_or_path m", "trl sft"),
        ("swift sft --model m", "swift sft is no reinforcement learning: convert reads swift rlhf"),
        ("python train_grpo_stage2.py --cfg s2.json", "train_grpo_stage2.py is started without an argument of TRL"),
        ("bash stage2.sh", "stage2.sh"),
    ],
)
def test_why_another_command_is_no_run_is_told(command: str, told: str) -> None:
    assert any(told in one for one in convert(f"python {TRL}\n{command}\n", gpus=8).assumed)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("ls", False),
        ("ls && date", False),
        ("pip install trl && wandb login && nvidia-smi", False),
        ('[ -f "$MODEL" ] && ls', True),
        ('ls && [ -f "$MODEL" ]', True),
        ("ls && test -d data && date", True),
        ("ls || date", True),
        ("ls && { ls && date; }", False),
        ("ls && (ls && date)", False),
        ("{ ls || date; }", True),
        ("ls && ( cd x; test -f y )", True),
        ("test -f y 2>/dev/null", True),
        ("ls | test -f y", True),
        ("ls | tee log", False),
        ("if [ -f y ]; then ls; fi", True),
        ("if ls; then date; fi", False),
        ("/usr/bin/test -f y", True),
        ("ls || exit 1", False),
        ("ls || { echo no; exit 1; }", False),
        ("[ -f y ] || exit 1", True),
        ("ls || true", False),
    ],
)
def test_commands_before_a_run_are_taken_to_succeed_and_tests_are_not(before: str, told: bool) -> None:
    """Three in a row were taken for a condition, though two were not."""
    found = convert(f"{before} && python {TRL}\n", gpus=8)
    assert any("behind a condition that is not known" in note for note in found.assumed) == told


def test_a_run_for_where_a_command_fails_stands_behind_a_condition() -> None:
    found = convert(f"ls || python {TRL}\n", gpus=8)
    assert any("behind a condition that is not known" in note for note in found.assumed)
    found = convert(f"ls || python {TRL.replace('1e-6', '3e-6')}\npython {TRL}\n", gpus=8)
    assert found.values["learning_rate"] == "1e-6"


def test_of_two_runs_on_both_sides_of_a_command_neither_is_certain() -> None:
    found = convert(f"ls && python {TRL} || python3 {TRL.replace('1e-6', '3e-6')}\npython {TRL}\n", gpus=8)
    assert found.values["learning_rate"] == "1e-6"
