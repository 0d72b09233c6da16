"""Runs of Megatron-SWIFT as configs of ours, in the shape of published examples; and the command."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.importers.convert import convert
from gspo_hpc.planning.plan import make_plan

SWIFT_DENSE = r"""
# 8 GPUs; global_batch_size counts completions
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
megatron rlhf \
    --rlhf_type grpo \
    --model /models/Qwen2.5-7B-Instruct \
    --save_safetensors true \
    --context_parallel_size 1 \
    --tensor_model_parallel_size 2 \
    --pipeline_model_parallel_size 1 \
    --dataset train.jsonl \
    --global_batch_size 128 \
    --micro_batch_size 2 \
    --steps_per_generation 4 \
    --num_generations 16 \
    --reward_funcs accuracy format \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.7 \
    --vllm_max_model_len 10240 \
    --max_length 8192 \
    --max_completion_length 2048 \
    --tuner_type full \
    --lr 1e-6 \
    --bf16 true \
    --beta 0.001 \
    --importance_sampling_level token \
    --epsilon 0.2 --epsilon_high 0.28 \
    --dynamic_sample false --merge_lora false \
    --loss_type grpo \
    --sleep_level 2 \
    --offload_model true --offload_optimizer true \
    --recompute_granularity selective --recompute_modules core_attn mlp \
    --finetune \
    --no_save_optim \
    --temperature 1.0 \
    --train_iters 100 --eval_steps 50 --save_steps 25 \
    --report_to wandb
"""

SWIFT_MOE = r"""
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
export NNODES=2
export NPROC_PER_NODE=8
MODEL=/models/Qwen3-30B-A3B
megatron rlhf \
    --rlhf_type grpo --model ${MODEL} \
    --context_parallel_size 2 --tensor_model_parallel_size 2 \
    --expert_model_parallel_size 4 --pipeline_model_parallel_size 2 \
    --sequence_parallel true --decoder_first_pipeline_num_layers 25 --decoder_last_pipeline_num_layers 23 \
    --moe_aux_loss_coeff 1e-3 --moe_router_dtype fp64 --router_replay_mode R3 \
    --dataset 'open-r1/DAPO-Math-17k-Processed#10000' \
    --num_train_epochs 1 --global_batch_size 64 --micro_batch_size 2 \
    --generation_batch_size 256 --num_generations 8 \
    --reward_funcs accuracy --use_vllm true --vllm_mode colocate \
    --vllm_tensor_parallel_size 4 --max_length 8192 --max_completion_length 8192 \
    --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.00 \
    --loss_type grpo --overlong_filter true --optimizer_cpu_offload true \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --lr 1e-6 --min_lr 1e-7 --lr_warmup_fraction 0.05 --target_modules a b c
"""

SWIFT_SERVER = r"""
CUDA_VISIBLE_DEVICES=4,5,6,7 \
swift rollout --model /models/Qwen2.5-7B-Instruct --vllm_tensor_parallel_size 2 &

CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 \
megatron rlhf --rlhf_type grpo --model /models/Qwen2.5-7B-Instruct --dataset a.parquet \
    --global_batch_size 96 --micro_batch_size 4 --steps_per_generation 4 --num_generations 8 \
    --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 8000 --use_vllm true \
    --max_length 1024 --max_completion_length 1024 --train_iters 40 --tuner_type full
"""


def settings(text: str) -> dict[str, Any]:
    """The settings of a converted YAML, by dotted name."""
    return {f"{name}.{key}": value for name, part in yaml.safe_load(text).items() for key, value in part.items()}


def test_a_dense_run_of_megatron_swift_on_one_node() -> None:
    found = convert(SWIFT_DENSE)
    assert found.project == "Megatron-SWIFT"
    assert settings(found.text) == {
        "run.max_steps": 100,
        "cluster.nodes": 1,
        "cluster.gpus_per_node": 8,
        "model.path": "/models/Qwen2.5-7B-Instruct",
        "model.dtype": "bfloat16",
        "parallel.tensor_model_parallel_size": 2,
        "parallel.pipeline_model_parallel_size": 1,
        "parallel.context_parallel_size": 1,
        "memory.recompute_granularity": "selective",
        "memory.recompute_modules": ["core_attn", "mlp"],
        "memory.offload_trainer": True,
        "batch.micro_batch_size": 2,
        "batch.global_batch_size": 128,
        "batch.steps_per_generation": 4,
        "batch.num_generations": 16,
        "data.train": "train.jsonl",
        "data.overlong": "truncate_left",  # a default of theirs
        "rollout.max_prompt_length": 8192,
        "rollout.max_response_length": 2048,
        "rollout.temperature": 1.0,
        "rollout.engine": {"gpu_memory_utilization": 0.7},
        "rollout.sleep_level": 2,
        "algorithm.name": "grpo",
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.kl_beta": 0.001,
        "optimizer.lr": 1e-6,
        "optimizer.lr_decay_style": "cosine",  # defaults of theirs, from here
        "optimizer.weight_decay": 0.1,
        "optimizer.adam_beta2": 0.95,
        "optimizer.distributed": True,
        "checkpoint.interval": 25,
    }
    assert "  lr_decay_style: cosine # default of Megatron-SWIFT\n" in found.text
    assert "  temperature: 1.0\n" in found.text
    for name in ("save_safetensors", "reward_funcs", "use_vllm", "finetune", "no_save_optim"):
        assert f"--{name}" in " ".join(found.dropped), name
    assert "switched off or empty in the original run, and absent here: --merge_lora" in found.dropped
    assert "dynamic_sample" in {item.name for item in found.carried}
    assert found.assumed == (
        "defaults are those of ms-swift 4.5; earlier versions had top_p 0.9 (up to 4.0.2); top_k 50 (up to 4.0.2)",
    )
    assert found.differs == (
        "--max_length 8192: a longer prompt is cut for the engine alone there, and updates have it whole; here both "
        "have it cut",
        "k3, the KL term: a token's estimate of the divergence is 10 at most there since 4.0.4, and has no bound here",
        "checkpoints: all are kept in the original, and the last 2 here (checkpoint.keep)",
        "logits and log-probs are in float32 here, and may be rounded to the model's type in Megatron-SWIFT",
        "advantages are divided by the deviation of the rewards + 1e-4 there, and by the deviation alone here, "
        "where equal rewards give 0",
    )
    awake = convert(SWIFT_DENSE.replace("--sleep_level 2", "--sleep_level 0"))
    assert "rollout.sleep_level" not in settings(awake.text) and "engines always sleep here" in " ".join(awake.dropped)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--moe_token_dispatcher_type flex", "flex"),
        ("--moe_token_dispatcher_type flex --moe_enable_deepep true", "flex"),
        ("--moe_token_dispatcher_type alltoall", "alltoall"),
        ("--moe_token_dispatcher_type allgather", None),
        ("", None),
    ],
)
def test_the_dispatcher_of_megatron_swift(words: str, kept: str | None) -> None:
    found = convert(SWIFT_MOE.replace("--lr 1e-6", f"{words} --lr 1e-6"))
    assert settings(found.text).get("moe.token_dispatcher") == kept
    assert ("equally many tokens on every rank" in " ".join(found.dropped)) == ("allgather" in words)


def test_a_mixture_of_experts_of_megatron_swift_on_two_nodes() -> None:
    found = convert(SWIFT_MOE)
    got = settings(found.text)
    assert {
        key: got[key] for key in got if key.split(".")[0] in ("cluster", "parallel", "moe", "memory", "algorithm")
    } == {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 8,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.context_parallel_size": 2,
        "parallel.expert_model_parallel_size": 4,
        "parallel.expert_tensor_parallel_size": 1,
        "parallel.sequence_parallel": True,
        "parallel.num_layers_in_first_pipeline_stage": 25,
        "parallel.num_layers_in_last_pipeline_stage": 23,
        "moe.router_dtype": "float64",
        "moe.aux_loss_coeff": 1e-3,
        "moe.router_replay": "rollout",
        "memory.recompute_granularity": "full",
        "memory.recompute_method": "uniform",
        "memory.recompute_num_layers": 1,
        "memory.offload_optimizer": True,
        "algorithm.name": "gspo",
        "algorithm.clip_low": 3e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.kl_beta": 0.0,
    }
    assert got["batch.generation_batch_size"] == 256 and "batch.steps_per_generation" not in got
    assert got["rollout.tensor_parallel_size"] == 4 and got["rollout.temperature"] == 0.9  # a default of theirs
    assert got["run.max_steps"] == 1250  # 10000 x 8 / 64: the data's own size, though nothing of it is read
    assert got["optimizer.lr_warmup_steps"] == 62 and got["optimizer.min_lr"] == 1e-7
    assert any(item.startswith("--target_modules a b c: it is read with adapters only") for item in found.dropped)
    assert got["rollout.truncated"] == "mask"  # --overlong_filter true
    assert make_plan(found.config).quantities["steps_per_generation"] == 4


def test_the_server_of_megatron_swift_is_part_of_the_job() -> None:
    found = convert(SWIFT_SERVER)
    got = settings(found.text)
    assert got["rollout.mode"] == "server"
    assert (got["cluster.gpus_per_node"], got["rollout.engines_per_node"], got["rollout.tensor_parallel_size"]) == (
        8,
        2,
        2,
    )
    plan = make_plan(found.config)
    assert plan.valid and plan.quantities["world_size"] == 4
    assert "gpus_per_node 8" in found.differs[0]
    assert found.assumed == (
        "defaults are those of ms-swift 4.5; earlier versions had top_p 0.9 (up to 4.0.2); top_k 50 (up to 4.0.2)",
        "neither reward_funcs nor reward_model is given: ms-swift then needs an environment (use_gym_env) for rewards, "
        "perhaps of several turns; here a reward function grades one completion",
    )
    alone = convert(SWIFT_SERVER[SWIFT_SERVER.index("CUDA_VISIBLE_DEVICES=0,1,2,3") :])
    assert "swift rollout is not in the script" in alone.assumed[0]
    assert make_plan(alone.config).quantities["world_size"] == 4
    assert any(item.startswith("--vllm_server_host 127.0.0.1; --vllm_server_port 8000: ") for item in found.dropped)


def test_convert_writes_a_config_that_loads_and_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "run.sh", tmp_path / "mine.yaml"
    script.write_text(SWIFT_DENSE.replace("micro_batch_size 2", "micro_batch_size 4"))
    assert main(["convert", str(script)]) == 0
    printed = capsys.readouterr()
    assert (
        "the plan breaks rule update_prompts_fill_micro_batches: num_prompts_per_dp_group (2) must be divisible by "
        "micro_batch_size (4)" in printed.err
    )
    assert "this fixes the plan: batch.micro_batch_size=2" in printed.err
    assert main(["convert", str(script), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert out.read_text() == printed.out and "not carried over:\n" in said
    assert "\n  --reward_funcs accuracy format: " in said
    assert loader.load(out).batch.global_batch_size == 128
    assert main(["plan", str(out), "batch.micro_batch_size=2"]) == 3
    capsys.readouterr()
    assert main(["convert", str(script), "--out", str(out)]) == 2
    assert "is there already; name another file" in capsys.readouterr().err


def test_convert_needs_nothing_that_trains(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SWIFT_MOE)
    script = (
        "import sys\nfrom gspo_hpc.cli.main import main\n"
        f"assert main(['convert', {str(tmp_path / 'run.sh')!r}]) == 0\n"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'wandb', 'numpy', 'submitit', 'rich'}\n"
        "sys.exit(' '.join(heavy & {name.split('.')[0] for name in sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_convert_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--rlhf_type grpo --global_batch_size 32 --num_generations 4 --train_iters 5"
    monkeypatch.setattr("sys.stdin", io.StringIO(words))
    assert main(["convert", "-", "--from", "swift", "--gpus", "4"]) == 0
    assert settings(capsys.readouterr().out)["cluster.gpus_per_node"] == 4
    monkeypatch.setattr("sys.stdin", io.StringIO(words + " --global_batch_sise 64"))
    assert main(["convert", "-", "--gpus", "4"]) == 2
    assert capsys.readouterr().err == "error: -: unknown argument --global_batch_sise; nearest: --global_batch_size\n"


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.sh").write_text(" \n")
    (tmp_path / "binary.sh").write_bytes(b"\x80\xff\x00")
    (tmp_path / "zero.sh").write_bytes(b"a\0b")
    (tmp_path / "run.sh").write_text("trl grpo --config folder.yaml")
    (tmp_path / "named.sh").write_text("trl grpo --config binary.sh")
    for name, expected in {
        "": "cannot be read: Is a directory",
        "empty.sh": "it is empty",
        "binary.sh": "not UTF-8 text",
        "zero.sh": "line 1: a NUL byte stands here",
        "rn.sh": f"no such file; nearest: {tmp_path}/run.sh",
        "run.sh": "folder.yaml, which the command reads, is not there",
        "named.sh": "binary.sh: not UTF-8 text",
    }.items():
        assert main(["convert", str(tmp_path / name)]) == 2, name
        said = capsys.readouterr()
        assert expected in said.err and len(said.err.splitlines()) == 1 and said.out == "", said


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (
            "a/b",
            "--dataset a/b: data.train takes JSONL, CSV or parquet, and datasets as folders or on the hub "
            "(OWNER/NAME:CONFIG/SPLIT): name them, or write its rows",
        ),
        (
            f"a/b {'x' * 50}......yyyy",
            f"--dataset a/b {'x' * 50}…: data.train takes JSONL, CSV or parquet, and datasets as folders or on the "
            "hub (OWNER/NAME:CONFIG/SPLIT): name them, or write the rows of all of these",
        ),
    ],
)
def test_data_of_a_hub_is_written_to_a_file_first(given: str, what: str) -> None:
    text = SWIFT_DENSE.replace("--dataset train.jsonl", f"--dataset {given}")
    assert [line for line in convert(text).dropped if line.startswith(what)]
