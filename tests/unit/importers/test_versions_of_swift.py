"""One script in different versions of ms-swift: processes, the place of vLLM, rollouts ahead (under 1 s)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert

HF = "swift rlhf --rlhf_type grpo --model m --num_generations 4 --per_device_train_batch_size 4 --reward_funcs a "
MEGATRON = "megatron rlhf --rlhf_type grpo --model m --num_generations 8 --global_batch_size 32 --reward_funcs a "
HOST = "--vllm_server_host 127.0.0.1 --use_vllm true "


def told(found: Converted, start: str) -> list[str]:
    return [line for line in found.assumed if line.startswith(start)]


@pytest.mark.parametrize("run", [HF, MEGATRON, "python -m swift.cli.rlhf" + HF.removeprefix("swift rlhf")])
@pytest.mark.parametrize(
    ("before", "shape", "note"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1 ", (1, 1), 1),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 NNODES=2 ", (2, 1), 1),
        ("CUDA_VISIBLE_DEVICES=3 ", (1, 1), 0),
        ("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 ", (1, 2), 0),
        ("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$COUNT ", (1, 2), 0),  # not known: what is visible is the best guess
    ],
)
def test_without_nproc_per_node_there_is_one_process(run: str, before: str, shape: tuple[int, int], note: int) -> None:
    """All visible GPUs were taken, and with them an update of so many times the completions."""
    found = convert(before + run)
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == shape
    assert len(told(found, "NPROC_PER_NODE is not given: ms-swift starts one process")) == note


@pytest.mark.parametrize(
    ("words", "mode", "note"),
    [
        ("", "colocate", ""),
        (HOST, "server", "vllm_mode is not given: server"),
        (f"{HOST} --vllm_mode server", "server", ""),
        ("--use_vllm true --vllm_mode colocate", "colocate", ""),
        # up to 3.11.0 the address alone decides
        (f"{HOST} --vllm_mode colocate --train_type full", "server", "--vllm_mode colocate: ms-swift up to 3.11.0"),
        (f"{HOST} --vllm_mode colocate", "colocate", "--vllm_mode colocate: ms-swift up to 3.11.0 takes server"),
        ("--use_vllm true --vllm_mode server --train_type full", "colocate", "--vllm_mode server: ms-swift up to 3.11"),
        ("--use_vllm true --vllm_mode server", "server", "--vllm_mode server: ms-swift up to 3.11.0 takes colocate"),
    ],
)
def test_the_address_of_a_server_decided_where_vllm_runs(words: str, mode: str, note: str) -> None:
    found = convert(f"NPROC_PER_NODE=4 {HF} {words}")
    assert found.config.rollout.mode == mode
    assert [line for line in found.assumed if "takes" in line or "is taken, as" in line] == (
        told(found, note) if note else []
    )


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--use_vllm true", 1),
        ("", 0),
        ("--use_vllm false", 0),
        ("--use_vllm true --vllm_mode colocate", 0),
        ("--use_vllm true --num_infer_workers 2", 0),  # up to 3.4, which had no other mode
    ],
)
def test_a_mode_that_later_versions_demand_is_told(words: str, notes: int) -> None:
    """Since 3.11.1 there is no run beside use_vllm without one."""
    assert len(told(convert(HF + words), "vllm_mode is not given: colocate")) == notes


@pytest.mark.parametrize(("words", "mode"), [(HOST, "colocate"), (f"{HOST} --vllm_mode server", "server")])
def test_megatron_swift_takes_vllm_mode_as_it_is_given(words: str, mode: str) -> None:
    assert convert(f"NPROC_PER_NODE=4 {MEGATRON} {words}").config.rollout.mode == mode


def test_a_rollout_ahead_is_carried_over() -> None:
    """They were left out: "generation and training alternate here, never at the same time"."""
    found = convert(f"NPROC_PER_NODE=4 {HF} {HOST} --vllm_mode server --async_generate true")
    assert (found.config.rollout.mode, found.config.rollout.max_staleness) == ("server", 1)
    found = convert(f"NPROC_PER_NODE=4 {HF} {HOST} --vllm_mode server --async_generate false --dynamic_sample false")
    assert found.config.rollout.max_staleness == 0
    assert {"async_generate", "dynamic_sample"} <= {item.name for item in found.carried}
    found = convert(f"NPROC_PER_NODE=4 {HF} --use_vllm true --vllm_mode colocate --async_generate true")
    assert found.config.rollout.max_staleness == 0


@pytest.mark.parametrize("run", [HF, MEGATRON])
def test_rewards_of_an_environment_are_told(run: str) -> None:
    assert not told(convert(run), "neither reward_funcs")
    assert told(convert(run.replace("--reward_funcs a", "")), "neither reward_funcs nor reward_model is given")


@pytest.mark.parametrize("sign", ["--vllm_device auto", "--num_infer_workers 2"])
def test_arguments_of_early_versions_show_them(sign: str) -> None:
    assert told(convert(f"NPROC_PER_NODE=2 {HF} --use_vllm true {sign}"), f"{sign.split()[0][2:]} is an argument")


def test_the_earlier_name_of_a_scheduler_of_turns_says_the_same() -> None:
    lines = [
        convert(f"NPROC_PER_NODE=2 {HF} --{name} f").differs for name in ("multi_turn_func", "multi_turn_scheduler")
    ]
    assert len(lines[0]) == len(lines[1]) > 0


def test_sleep_made_accumulation_1_up_to_3_3() -> None:
    words = f"NPROC_PER_NODE=4 {HF} --gradient_accumulation_steps 4 --sleep_level 1 --use_vllm true"
    assert convert(words).config.batch.global_batch_size == 64
    found = convert(f"{words} --num_infer_workers 4")
    assert found.config.batch.global_batch_size == 64 and told(found, "--gradient_accumulation_steps 4: up to 3.3")
    found = convert(f"{words} --tools_prompt react_en")  # of 3.3 or before
    assert found.config.batch.global_batch_size == 16 and told(found, "--gradient_accumulation_steps 4: ms-swift up to")


def test_a_window_counts_for_engines_of_the_run_and_not_for_a_server() -> None:
    window = "--max_length 4096 --max_completion_length 2048 --vllm_max_model_len 4096 --use_vllm true"
    assert told(
        convert(f"NPROC_PER_NODE=2 {HF} {window} --num_infer_workers 1"), "--vllm_max_model_len 4096: an engine"
    )
    assert not told(convert(f"NPROC_PER_NODE=2 {HF} {HOST} {window}"), "--vllm_max_model_len 4096: an engine")


def test_a_server_was_started_by_swift_deploy_up_to_3_3() -> None:
    serve = "CUDA_VISIBLE_DEVICES=0,1 swift deploy --model m --infer_backend vllm --tensor_parallel_size 2 &"
    found = convert(f"{serve}\nNPROC_PER_NODE=4 {HF} {HOST}\n")
    assert (found.config.rollout.tensor_parallel_size, found.config.cluster.gpus_per_node) == (2, 6)
    assert not any("is not in the script" in line for line in found.assumed)


def test_adapters_to_begin_with_are_carried_over() -> None:
    """They were left out, since "adapters have nothing of the kind here"."""
    found = convert(f"NPROC_PER_NODE=2 {HF} --tuner_type lora --adapters out/checkpoint-9")
    assert (found.config.adapter.type, found.config.adapter.path) == ("lora", "out/checkpoint-9")
    found = convert(f"NPROC_PER_NODE=2 {HF} --tuner_type lora --adapters a b")
    assert found.config.adapter.path is None and "adapters" in {item.name for item in found.left}


def test_defaults_of_earlier_versions_of_megatron_swift_are_told() -> None:
    lines = told(convert(f"{MEGATRON} --wandb_project p"), "defaults are those of")
    assert "beta 0.1 (up to 3.11)" in lines[0] and "report_to wandb, since wandb_project is given" in lines[0]
    assert "beta" not in told(convert(f"{MEGATRON} --beta 0.04"), "defaults are those of")[0]


def test_a_default_that_is_only_shown_decides_nothing() -> None:
    shown = 'echo "GPUs: ${CUDA_VISIBLE_DEVICES:-not set}"'
    assert not told(convert(f"{shown}\nNPROC_PER_NODE=2 {HF}\n"), "$CUDA_VISIBLE_DEVICES")
