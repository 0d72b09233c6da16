"""Runs of public scripts that were refused, or named wrongly, for a reason that is not theirs (seconds)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

ARGUMENTS = "--rlhf_type grpo --dataset d.jsonl --model q --num_generations 8 --beta 0.1"
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    "actor_rollout_ref.model.path=q actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
    "trainer.n_gpus_per_node=8 trainer.nnodes=1"
)


@pytest.mark.parametrize(
    ("command", "project"),
    [
        ("python -m swift.cli.main rlhf", "ms-swift"),
        ('"${VENV}/bin/python" -m swift.cli.main rlhf', "ms-swift"),
        ("python swift/cli/main.py rlhf", "ms-swift"),
        ("python -m swift.cli._megatron.main rlhf", "Megatron-SWIFT"),
        ("torchrun --nproc_per_node 8 swift/cli/_megatron/main.py rlhf", "Megatron-SWIFT"),
        ('torchrun $(python -c "import swift; print(swift.__path__[0])")/cli/rlhf.py', "ms-swift"),
    ],
)
def test_the_programs_of_swift_by_their_files(command: str, project: str) -> None:
    found = convert(f"{command} {ARGUMENTS}", gpus=8, name="run.sh")
    assert found.project == project and found.config.algorithm.kl_beta == 0.1


@pytest.mark.parametrize("main", ["swift.cli.main", "swift.cli._megatron.main"])
def test_another_verb_of_swift_by_its_file_is_refused(main: str) -> None:
    with pytest.raises(ValueError, match="sft is no reinforcement learning"):
        convert(f"python -m {main} sft --model q --dataset d", name="run.sh")


@pytest.mark.parametrize("program", ["swift", "megatron"])
@pytest.mark.parametrize("count", ["-1", "0", "None", "null"])
def test_all_checkpoints_of_swift_are_kept_by_any_count_below_one(program: str, count: str) -> None:
    found = convert(f"{program} rlhf {ARGUMENTS} --save_total_limit {count}", gpus=8, name="run.sh")
    assert found.config.checkpoint.keep == 2
    assert [item.why for item in found.left if item.name == "save_total_limit"] == [
        "all are kept there; here checkpoint.keep is how many"
    ]


def test_checkpoints_that_trl_keeps() -> None:
    run = "trl grpo --model_name_or_path q --num_generations 8 --save_total_limit"
    assert convert(f"{run} 3", gpus=8).config.checkpoint.keep == 3
    assert any("all are kept there" in item.why for item in convert(f"{run} -1", gpus=8).left)
    assert convert(f"{run} $K", gpus=8).open == ("save_total_limit=$K",)


@pytest.mark.parametrize(
    "line",
    [
        "pkill -f main_ppo",
        "sudo pkill -9 -f verl.trainer.main_ppo || true",
        "pgrep -f main_ppo | xargs -r kill -9",
        "ps aux | grep main_ppo | awk '{print $2}' | xargs kill",
        "ps -C main_ppo",
        "until ! pgrep -f verl.trainer.main_ppo > /dev/null; do sleep 60; done",
        "srun pkill -f recipe.dapo.main_dapo",
        "killall main_dapo",
    ],
)
def test_a_command_that_looks_for_a_run_starts_none(line: str) -> None:
    assert convert(f"{line}\n{VERL}\n{line}\n", name="run.sh").project == "verl"


TRL = """
srun -N1 trl vllm-serve --model q --tensor_parallel_size 4 &
accelerate launch --num_processes 8 train_grpo.py --model_name_or_path q --num_generations 8 \
  --use_vllm true {}
"""


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("--vllm_server_host $HOST", "server"),
        ("--vllm_server_base_url http://a:8000", "server"),
        ("", "colocate"),
        ("--vllm_server_host $HOST --vllm_mode colocate", "colocate"),
    ],
)
def test_a_server_of_trl_that_the_script_starts_and_names(words: str, mode: str) -> None:
    found = convert(TRL.format(words), name="run.slurm")
    assert found.config.rollout.mode == mode
    if mode == "server":
        assert found.config.rollout.tensor_parallel_size == 4
        assert any("vllm_mode is not given: server" in line for line in found.assumed)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("uv run -m skyrl_train.entrypoints.main_base trainer.policy.model.path=q", "a run of SkyRL"),
        ("cd skyrl-train && bash run.sh", "a run of SkyRL"),
        ("bash train.sh", "a task of SkyPilot"),
    ],
)
def test_a_task_of_skypilot_is_named(run: str, told: str) -> None:
    with pytest.raises(ValueError) as error:
        convert(f"resources:\n  accelerators: H100:8\nrun: |\n  {run}\n", name="task.yaml")
    assert told in str(error.value) and "--from" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "beside",
    [
        "resources: {accelerators: 'H100:8'}",
        "setup: pip install trl",
        "envs: {LR: 1e-6}",
        "workdir: .",
        "file_mounts: {/data: s3://d}",
        "num_nodes: 2",
    ],
)
def test_a_task_of_skypilot_is_named_whatever_stands_beside_its_commands(beside: str) -> None:
    """A task has no key but `run` in common with all others; its commands are what is to be converted."""
    run = "accelerate launch --num_processes 8 train_grpo.py --model_name_or_path q --num_generations 8"
    with pytest.raises(ValueError, match="put the commands under run into a script, and convert that"):
        convert(f"{beside}\nrun: |\n  {run}\n", name="task.yaml")


@pytest.mark.parametrize("module", ["torchtitan.experiments.rl", "torchtitan"])
def test_a_file_of_torchtitan_is_named(module: str) -> None:
    with pytest.raises(ValueError, match="a run of torchtitan"):
        convert(f"from {module} import trainer\n\nclass GRPOLoss:\n    pass\n", name="grpo.py")


@pytest.mark.parametrize(
    ("command", "name", "text"),
    [
        (f"{VERL} --config-path . --config-name mine", "./mine.yaml", "data:\n  max_promt_length: 5\n"),
        ("trl grpo --model_name_or_path q --config mine.yaml", "mine.yaml", "num_generation: 8\n"),
        (f"swift rlhf mine.yaml {ARGUMENTS}", "mine.yaml", "num_generation: 8\n"),
    ],
)
def test_a_misspelt_argument_of_a_yaml_is_told_with_its_name(
    command: str, name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        convert(command, gpus=8, folder=tmp_path, name="run.sh")
    assert str(error.value).startswith(f"{name}: unknown argument ")


PAGE = "# GRPO\n\nIt's made {}so:\n\n```python\nfrom trl import GRPOConfig\nGRPOConfig(beta=0.1)\n```\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (PAGE, "page.md"),
        (PAGE, ""),
        (PAGE.format("(`--beta 0.1`) "), ""),
        ("from trl import GRPOConfig\n", "page.mdx"),
        ('{"cells": [{"source": ["from trl import GRPOConfig"]}], "metadata": {}, "nbformat": 4}', "run.ipynb"),
        ('{"cells": [{"source": ["from trl import GRPOConfig"]}], "metadata": {}, "nbformat": 4}', ""),
    ],
)
def test_a_whole_page_is_called_one(text: str, name: str) -> None:
    with pytest.raises(ValueError, match="this is a page or a notebook: convert one of the blocks of code in it"):
        convert(text, name=name)


def test_fences_in_a_prompt_do_not_make_a_page() -> None:
    prompt = 'prompt = """\n```\n1 + 1\n```\n"""\n'
    assert convert(f"from trl import GRPOConfig\n{prompt}GRPOConfig(beta=0.1)\n", gpus=1).project == "TRL"
    script = f"cat > p.txt <<'EOF'\n{prompt}EOF\ntrl grpo --num_generations 8 --max_steps 9\n"
    assert convert(f"#!/bin/bash\n{script}", gpus=1).project == convert(script, gpus=1, name="run.sh").project == "TRL"


def test_dataset_is_an_argument_of_a_script_of_ones_own() -> None:
    run = "accelerate launch main.py --num_generations 4 --beta 0.1 --max_completion_length 9 --max_steps 9 --{} gsm8k"
    found = convert(run.format("dataset"), gpus=1)
    assert [item.given for item in found.strange] == ["dataset=gsm8k"]
    assert any("dataset=gsm8k is no known argument of TRL" in line for line in found.assumed)
    with pytest.raises(ValueError, match="unknown argument datset_name; nearest: dataset_name"):
        convert(run.format("datset_name"), gpus=1)
