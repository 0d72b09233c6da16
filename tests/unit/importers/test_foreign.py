"""Runs of other projects are refused in one line that names them, and nothing turns into a config of defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.importers.convert import convert

RUNS = {
    "NeMo-RL": (
        "uv run examples/run_grpo.py grpo.num_prompts_per_step=8 cluster.gpus_per_node=8",
        "uv run python -u run.py policy.model_name=m grpo.max_num_steps=3",
        "defaults: ../../grpo_math_1B.yaml\npolicy:\n  model_name: m\ncluster:\n  num_nodes: 2\n",
        "grpo: {num_prompts_per_step: 32}\npolicy: {model_name: m}\nloss_fn: {ratio_clip_min: 0.2}\n",
    ),
    "slime": (
        "ARGS=(--num-rollout 30 --rollout-batch-size 32)\nray job submit -- python3 train.py --colocate ${ARGS[@]}",
    ),
    "OpenRLHF": (
        "deepspeed --module openrlhf.cli.train_ppo_ray --pretrain m --advantage_estimator group_norm",
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m",
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --rollout_batch_size 1024 --n_samples_per_prompt 8",
    ),
    "prime-rl": (
        "uv run rl @ rl.toml",
        'max_steps = 20\n\n[model]\nname = "m"\n\n[orchestrator]\nbatch_size = 128\n[trainer.optim]\nlr = 1e-6\n',
    ),
    "AReaL": (
        "python3 -m areal.launcher.local examples/math/gsm8k_rl.py --config x.yaml",
        "experiment_name: gsm8k\ntrial_name: t0\ngconfig: {n_samples: 4}\nactor: {path: m}\n",
    ),
    "SkyRL": (
        'uv run -m skyrl.train.entrypoints.main_base trainer.algorithm.advantage_estimator="grpo"',
        "python -m my.main_dapo trainer.policy.model.path=m generator.n_samples_per_prompt=5",
    ),
    "ROLL": (
        "python examples/start_rlvr_pipeline.py --config_path x --config_name y",
        "pretrain: m\nrollout_batch_size: 64\nactor_train: {}\nactor_infer: {}\n",
    ),
    "open-instruct": (
        "python open_instruct/grpo_fast.py --num_samples_per_prompt_rollout 4 --learning_rate 1e-6",
        "dataset_mixer_list: x\nlearning_rate: 1e-6\nnum_unique_prompts_rollout: 8\n",
        "import open_instruct.grpo_fast\n",
    ),
    "tunix": (
        "from tunix.rl.grpo.grpo_learner import GRPOConfig\nconfig = GRPOConfig(num_generations=2, beta=0.08)\n",
        "from tunix.rl.grpo import grpo_learner as g\na = g.GRPOConfig(beta=1)\nb = g.GRPOConfig(beta=2)\n",
        "python3 -m tunix.cli.grpo_main base_config.yaml rl_training_config.max_steps=9 grpo_config.num_generations=4",
        "rl_training_config: {max_steps: 9}\ngrpo_config: {num_generations: 2}\n",
    ),
    "EasyDeL": (
        "import easydel as ed\nconfig = ed.GRPOConfig(learning_rate=1e-6, num_train_epochs=1, num_generations=4)\n",
        "from easydel.trainers import GRPOConfig, GRPOTrainer\nGRPOTrainer(arguments=GRPOConfig(learning_rate=1e-6))\n",
        "python -m easydel.scripts.finetune.gsm8k_grpo --learning_rate 1e-6 --num_return_sequences 8",
    ),
    "siiRL": ("python3 -m siirl.client.main_dag algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4",),
    "Trinity-RFT": (
        "trinity run --config x.yaml",
        "algorithm: {algorithm_type: grpo, repeat_times: 8}\nmodel: {model_path: m}\nbuffer: {batch_size: 128}\n",
    ),
    "Agent-Lightning": (
        "python -m agentlightning.verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4",
        "import agentlightning as agl\nagl.Trainer(algorithm=agl.VERL({}))\n",
    ),
    "Oumi": (
        "oumi train -c grpo.yaml --training.learning_rate 1e-6",
        "oumi distributed torchrun -m oumi train -c grpo.yaml",
        "model: {model_name: m}\ntraining: {trainer_type: TRL_GRPO, learning_rate: 1e-6, grpo: {use_vllm: true}}\n",
    ),
    "trlX": (
        "import trlx\nfrom trlx.data.configs import TRLConfig\ntrlx.train(config=TRLConfig.load_yaml('x'))\n",
        "train: {epochs: 9, batch_size: 8}\nmodel: {model_path: m}\ntokenizer: {}\nmethod: {name: ppoconfig}\n",
    ),
}


@pytest.mark.parametrize(("project", "text"), [(name, text) for name, texts in RUNS.items() for text in texts])
def test_another_projects_run_is_named_in_one_line(project: str, text: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(text)
    assert str(refused.value).startswith(f"this is a run of {project}, which is not converted: convert reads ")
    assert len(str(refused.value).splitlines()) == 1


def test_a_config_that_is_called_as_trls_is_not_taken_for_it() -> None:
    for text in ("from mylib import GRPOConfig\nGRPOConfig(num_generations=4, beta=0.1)\n",
                 "import mylib as m\nm.GRPOConfig(num_generations=4, beta=0.1)\n"):  # fmt: skip
        with pytest.raises(ValueError, match=r"^its GRPOConfig is that of mylib, and it imports nothing of TRL: .*$"):
            convert(text)
    derived = convert("import trl\nfrom mylib import GRPOConfig\nGRPOConfig(num_generations=4, beta=0.1)\n", gpus=1)
    assert "the file has a GRPOConfig of mylib's own, which may set any argument" in " ".join(derived.assumed)
    assert convert("import trl\ntrl.GRPOConfig(num_generations=4, beta=0.1)\n", gpus=1).open == ()


def test_a_python_file_that_a_script_starts_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RUNS["tunix"][0])
    with pytest.raises(ValueError, match=r"^this is a run of tunix,"):
        convert("accelerate launch train.py --num_generations 4 --learning_rate 1e-6", folder=tmp_path)


def test_the_exit_code_of_a_refusal_is_not_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(RUNS["slime"][0])
    assert main(["convert", str(tmp_path / "run.sh")]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "a run of slime" in told.err
    assert main(["convert", str(tmp_path / "run.sh"), "--json"]) == 2
    assert "a run of slime" in capsys.readouterr().out


ACTOR = "actor_rollout_ref.actor.ppo_mini_batch_size=32"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"python -m verl.experimental.fully_async_policy.fully_async_main {ACTOR}", "trains at the same time"),
        (f"python -m verl.experimental.one_step_off_policy.main_ppo {ACTOR}", "trains at the same time"),
        (f"python -m verl.experimental.fully_async_policy.main a.b=1 \\\n\n {ACTOR} a.c=1", "trains at the same time"),
        (f"python3 -m recipe.spin.main_spin {ACTOR}", "recipe.spin.main_spin is another trainer"),
        ("python3 -m verl.trainer.main_generation data.path=x", "does no reinforcement learning"),
        ("trl rloo --num_generations 4", "trl rloo is another trainer of TRL: convert reads trl grpo"),
        (
            "accelerate launch rloo.py --num_generations 4 --max_completion_length 8 --learning_rate 1 --bf16",
            "rloo.py is",
        ),
        (
            "from trl import RLOOConfig, RLOOTrainer\nRLOOTrainer(args=RLOOConfig(num_generations=2))\n",
            "RLOOTrainer is",
        ),
        ("import torch\nprint(1)\n", "read for the GRPOConfig that it makes, and there is none"),
        ("[tool.ruff]\nline-length = 3\n", "a project with configs in TOML"),
        ("swift rlhf --rlhf_type grpo --output_dir x", "no argument of ms-swift that says how to train is in it"),
        ("megatron rlhf --rlhf_type grpo --save_interval 5", "no argument of Megatron-SWIFT that says how to train"),
        ("output_dir: x\nrun_name: y\nreport_to: wandb\n", "no argument shows that this is a GRPO run of TRL"),
        ("output_dir: grpo\nrun_name: y\nreport_to: wandb\n", "no argument of TRL that says how to train is in it"),
        ("stage: rl\nfinetuning_type: full\nlearning_rate: 1e-6\n", "a run of LLaMA-Factory"),
        ("hello: world\n", "these arguments do not show whose they are"),
        ("echo hello\n", "no run of ms-swift, verl or TRL is recognised"),
        ("# train with OpenRLHF\nbash ./inner.sh\n", "no run of ms-swift, verl or TRL is recognised"),
        ("bash ./start.sh --engine OpenRLHF\n", "a run of OpenRLHF"),
    ],
)
def test_what_is_no_run_that_is_read_says_what_it_is(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(text)
    assert expected in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_a_name_in_a_path_makes_no_other_project_of_a_run() -> None:
    found = convert(
        "swift rlhf --rlhf_type grpo --model /mnt/slime/ROLL/m --output_dir /data/OpenRLHF --learning_rate 1e-6"
    )
    assert found.project == "ms-swift" and found.config.model.path == "/mnt/slime/ROLL/m"


def test_the_config_of_a_module_of_trl_is_trls() -> None:
    for module in ("trl.trainer", "trl.trainer.grpo_config"):
        found = convert(f"from {module} import GRPOConfig\nGRPOConfig(num_generations=4, beta=0.1)\n", gpus=1)
        assert found.open == () and found.config.algorithm.kl_beta == 0.1


def test_arguments_that_two_projects_have_alike_show_neither() -> None:
    with pytest.raises(ValueError, match=r"^these arguments do not show whose they are"):
        convert("seed: 1\ntemperature: 1.0\nbf16: true\n")


@pytest.mark.parametrize(
    "line",
    [
        "python3 examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo.yaml scheduler.type=local",
        "python3 train_grpo.py --config absent.yaml experiment_name=x trial_name=y actor.path=z",
        "python3 grpo.py --config absent.yaml rollout.backend=sglang:d4 actor.backend=fsdp:d4",
        "python3 train_grpo.py --config absent.yaml allocation_mode=sglang.d4p1t1+d4p1t1",
    ],
)
def test_a_script_of_areal_is_named_without_its_yaml(line: str) -> None:
    with pytest.raises(ValueError, match="this is a run of AReaL, which is not converted"):
        convert(f"{line}\n")


def test_words_after_the_yaml_of_trl_are_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"^--config a.yaml b.yaml x=1: TRL reads one file, and no words after it$"):
        convert("python3 train_grpo.py --config a.yaml b.yaml x=1\n")


@pytest.mark.parametrize(
    "before",
    ["conda activate rl", "source rl", "mkdir -p rl", "pip install skyrl", "uv add trlx", "ml load rl"],
)
def test_an_environment_with_the_name_of_a_project_makes_no_run_of_it(before: str) -> None:
    """`conda activate rl` was called a run of prime-rl, whatever was started in it."""
    run = "accelerate launch --num_processes 4 grpo.py --num_generations 4 --per_device_train_batch_size 4"
    assert convert(f"{before}\n{run}\n").project == "TRL"
    with pytest.raises(ValueError, match="a run of prime-rl"):
        convert("conda run rl @ config.toml\n")
