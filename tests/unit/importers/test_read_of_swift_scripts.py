"""Differences that readers of conversions of public scripts of ms-swift found, argument by argument (seconds)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.importers.convert import Converted, convert

RUN = "swift rlhf --rlhf_type grpo --num_generations 4 --per_device_train_batch_size 4 --reward_funcs a --model m"
MEGATRON = "megatron rlhf --rlhf_type grpo --num_generations 4 --global_batch_size 16 --reward_funcs a --model m"
SEES = "rows are text alone here, so what comes with images"


def of(words: str, run: str = RUN) -> Converted:
    return convert(f"{run} {words}", gpus=1)


def told(found: Converted, word: str) -> bool:
    return any(word in line for line in (*found.differs, *found.assumed))


def why(found: Converted, name: str) -> str:
    return next((item.why for item in found.left if item.name == name), "")


def keys(found: Converted, name: str) -> tuple[str, ...]:
    return next((item.keys for item in found.carried if item.name == name), ())


# -- the longest completion


@pytest.mark.parametrize(
    ("words", "length", "decides"),
    [
        ("--max_new_tokens 2048 --max_completion_length 100", 2048, "max_new_tokens"),
        ("--max_new_tokens 2048", 2048, "max_new_tokens"),
        ("--max_new_tokens 2048 --response_length 300", 300, "response_length"),
        ("--max_new_tokens 0 --max_completion_length 100", 100, "max_completion_length"),
        ("--max_completion_length 100", 100, "max_completion_length"),
        ("--max_completion_length 100 --max_new_tokens 9 --num_infer_workers 1", 100, "max_completion_length"),
    ],
)
def test_three_names_of_the_longest_completion(words: str, length: int, decides: str) -> None:
    """The argument num_infer_workers is gone before the other names count."""
    found = of(words)
    assert found.config.rollout.max_response_length == length
    assert keys(found, decides) == ("rollout.max_response_length",)
    for name in {"max_new_tokens", "response_length", "max_completion_length"} - {decides}:
        assert not keys(found, name) and "no counterpart" not in why(found, name)


def test_megatron_has_one_name_of_the_longest_completion() -> None:
    found = of("--max_new_tokens 2048 --max_completion_length 100", MEGATRON)
    assert found.config.rollout.max_response_length == 100
    assert "by max_completion_length alone" in why(found, "max_new_tokens")


# -- adapters and weights to begin with


@pytest.mark.parametrize("run", [RUN, MEGATRON])
@pytest.mark.parametrize(
    ("words", "without", "another"),
    [
        ("--adapters a/b", True, False),
        ("--adapters a/b --beta 0", False, False),
        ("--adapters a/b --ref_adapters a/b/", False, False),
        ("--adapters a/b --ref_adapters c", False, True),
        ("--ref_adapters c", False, True),
        ("--adapters a/b --ref_adapters c --beta 0", False, False),
        ("", False, False),
    ],
)
def test_the_reference_of_adapters_from_a_folder_is_told(run: str, words: str, without: bool, another: bool) -> None:
    found = of(f"--tuner_type lora {words}", run)
    assert told(found, "the reference of the divergence is the model without adapters in") is without
    assert told(found, "--ref_adapters c: the reference model is the one that the run begins with here") is another
    assert "no counterpart" not in why(found, "ref_adapters")


def test_a_reference_that_is_not_known_may_be_the_same_folder() -> None:
    found = of("--tuner_type lora --adapters $SFT --ref_adapters $SFT")
    assert why(found, "ref_adapters") == "it is what the run begins with, and so is the reference model here"


@pytest.mark.parametrize(
    ("words", "notes"),
    [("--ref_model other", True), ("--ref_model m", False), ("--ref_model other --beta 0", False), ("", False)],
)
def test_another_reference_model_is_told(words: str, notes: bool) -> None:
    found = of(f"--tuner_type full {words}")
    assert told(found, "the reference model is the one that the run begins with here") is notes


@pytest.mark.parametrize(("words", "notes"), [("--load a --ref_load a", False), ("--load a --ref_load b", True)])
def test_weights_in_megatrons_format_are_told(words: str, notes: bool) -> None:
    found = of(words, MEGATRON)
    assert told(found, "--load a: weights are read from there in the original") and not told(of("", MEGATRON), "--load")
    assert told(found, "--ref_load b: the reference model is the one that the run begins with here") is notes


def test_a_checkpoint_whose_weights_alone_are_resumed_is_what_the_run_begins_with() -> None:
    words = "--resume_from_checkpoint sft/checkpoint-9 --resume_only_model true"
    adapters = of(f"--tuner_type lora --adapters other {words}")
    assert adapters.config.adapter.path == "sft/checkpoint-9" and adapters.config.model.path == "m"
    assert told(adapters, "the reference of the divergence is the model without adapters")
    assert told(adapters, "goes on at the step of that checkpoint")
    assert "takes precedence" in why(adapters, "adapters")
    whole = of(f"--tuner_type full {words} --ignore_data_skip true")
    assert whole.config.model.path == "sft/checkpoint-9" and whole.config.adapter.type is None
    assert "takes precedence" in why(whole, "model") and not told(whole, "goes on at the step")
    early = of(f"--train_type lora {words} --num_infer_workers 1")
    assert early.config.adapter.path == "sft/checkpoint-9" and not told(early, "goes on at the step")


@pytest.mark.parametrize("words", ["", "--resume_only_model false"])
def test_a_checkpoint_of_another_run_is_not_resumed(words: str) -> None:
    found = of(f"--tuner_type lora --resume_from_checkpoint sft/checkpoint-9 {words}")
    assert found.config.adapter.path is None
    assert told(found, "its weights, optimizer and step are not read: the run begins anew here")
    assert not told(of("--tuner_type lora --resume_from_checkpoint false"), "begins anew")


@pytest.mark.parametrize(("words", "lora"), [("--adapters a", True), ("--ref_adapters a", True), ("", False)])
@pytest.mark.parametrize("tuner", ["--tuner_type full", ""])
def test_megatron_trains_adapters_where_some_are_named(words: str, lora: bool, tuner: str) -> None:
    found = of(f"{tuner} {words}", MEGATRON)
    assert (found.config.adapter.type == "lora") is lora is told(found, "lora, since ")
    assert found.config.optimizer.lr == (1e-4 if lora else 1e-5)
    assert of(f"--tuner_type full {words}").config.adapter.type is None


def test_adapters_in_megatrons_format_are_told() -> None:
    found = of("--tuner_type lora --mcore_adapter a", MEGATRON)
    assert found.config.adapter.path is None and told(found, "adapters in Megatron's format are not read here")


def test_a_folder_decides_the_rank_of_its_adapters() -> None:
    text = "takes their rank, scale and layers from its adapter_config.json"
    assert told(of("--tuner_type lora --adapters a"), text) and not told(of("--tuner_type lora"), text)


# -- the loss


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("--loss_type dapo --gradient_accumulation_steps 8", 8),
        ("--loss_type dapo --gradient_accumulation_steps 4 --steps_per_generation 8", 8),
        ("--loss_type cispo --epsilon_high 5 --gradient_accumulation_steps 2", 2),
        ("--loss_type dapo --gradient_accumulation_steps 1", 0),
        ("--loss_type bnpo --gradient_accumulation_steps 8", 0),
        ("--loss_type grpo --gradient_accumulation_steps 8", 0),
        ("--loss_type dapo --importance_sampling_level sequence --gradient_accumulation_steps 8", 0),
    ],
)
def test_what_a_mean_over_tokens_is_divided_by(words: str, share: int) -> None:
    found = of(words)
    assert told(found, f"there the loss is about 1/{share} of the mean here") is bool(share)
    assert told(found, f"clip_grad 1 there is {share} here") is bool(share)
    assert told(found, "counts by its share of these tokens") is ("steps_per_generation" in words)


def test_megatron_divides_a_mean_over_tokens_by_its_micro_batches() -> None:
    words = "--loss_type dapo --micro_batch_size 2 --steps_per_generation 2 --tensor_model_parallel_size 2"
    found = convert(f"{MEGATRON} {words}", gpus=4)
    assert told(found, "the loss is about 1/8 of the mean here")


@pytest.mark.parametrize(("loss", "by_tokens"), [("dapo", True), ("cispo --epsilon_high 5", True), ("bnpo", False)])
def test_completions_that_are_left_out_count_in_the_divisor(loss: str, by_tokens: bool) -> None:
    found = of(f"--loss_type {loss} --overlong_filter true")
    assert told(found, "the mean divides by the tokens of all completions there") is by_tokens
    assert not told(found, "the mean divides by all completions there")
    assert told(of("--overlong_filter true"), "the mean divides by all completions there")


# -- evaluation of Megatron-SWIFT


@pytest.mark.parametrize(
    ("words", "interval"),
    [("--eval_steps 25", 25), ("--save_steps 70", 70), ("", 500), ("--eval_steps 0", None)],
)
def test_when_megatron_evaluates(words: str, interval: int | None) -> None:
    found = of(f"--val_dataset rows.jsonl {words}", MEGATRON)
    ours = found.config.eval
    assert (ours.interval, ours.before, ours.after) == (interval, False, True)
    assert told(found, "evaluations sample as training does there")
    assert not told(of(words, MEGATRON), "evaluations sample as training does there")


def test_no_batches_of_an_evaluation_are_none() -> None:
    ours = of("--val_dataset rows.jsonl --eval_iters 0 --eval_steps 5", MEGATRON).config.eval
    assert (ours.interval, ours.before, ours.after) == (None, False, False)


def test_a_checkpoint_for_each_epoch_is_told() -> None:
    found = of("--save_strategy epoch --save_steps 7 --val_dataset a.jsonl", MEGATRON)
    assert found.config.checkpoint.interval != 7 and told(found, "save_strategy epoch saves once in an epoch there")
    assert found.config.eval.interval is None and told(found, "it is evaluated once in an epoch there")
    assert of("--save_strategy steps --save_steps 7", MEGATRON).config.checkpoint.interval == 7


# -- images


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--model_type qwen2_5_vl", True),
        ("--model_type qwen3_5_moe", True),
        ("--template qwen3_omni", True),
        ("--model_type minicpmv4_5", True),
        ("--model_type glm4_5v", True),
        ("--freeze_vit true", True),
        ("--max_pixels 9", True),
        ("--model_type qwen3", False),
        ("--model_type glm4_moe", False),
        ("--model_type qwen2_5 --template qwen2_5", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("run", [RUN, MEGATRON])
def test_arguments_show_that_a_model_reads_images(run: str, words: str, notes: bool) -> None:
    assert told(of(words, run), SEES) is notes


def test_variables_show_that_a_model_reads_images() -> None:
    assert told(
        convert(f"MAX_PIXELS=262144 \\\n{RUN}", gpus=1), f"MAX_PIXELS=262144 is for a model that reads images: {SEES}"
    )
    assert told(convert(f"export IMAGE_MAX_TOKEN_NUM=768\n{RUN}", gpus=1), SEES)
    named = convert(f"MAX_PIXELS=9 {RUN.replace('--model m', '--model Qwen/Qwen2.5-VL-3B-Instruct')}", gpus=1)
    assert sum(SEES in line for line in named.assumed) == 1


# -- the server, and GPUs

SERVER = "swift rollout --model m --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.7"
CLIENT = f"{RUN} --use_vllm true --vllm_mode server --vllm_server_host h"


@pytest.mark.parametrize(
    "text",
    [
        f'if [ "$RANK" -eq "$ROLLOUT" ]; then\n{SERVER} &\nelse\n{CLIENT}\nfi\n',
        f'MODE=$(cat mode)\nif [ "$MODE" = async ]; then {SERVER} & fi\n{CLIENT}\n',
    ],
)
def test_a_server_behind_a_condition_is_read(text: str) -> None:
    found = convert(text, gpus=1)
    assert found.config.rollout.tensor_parallel_size == 2
    assert found.config.rollout.engine == {"gpu_memory_utilization": 0.7}
    assert told(found, "swift rollout stands behind a condition that is not known") and not told(
        found, "not in the script"
    )


def test_a_server_that_runs_goes_before_one_behind_a_condition() -> None:
    other = SERVER.replace("0.7", "0.5")
    found = convert(f'A=$(cat a)\nif [ "$A" = b ]; then {SERVER} & fi\n{other} &\n{CLIENT}\n', gpus=1)
    assert found.config.rollout.engine == {"gpu_memory_utilization": 0.5} and not told(found, "behind a condition")


@pytest.mark.parametrize(
    ("words", "mode"), [("--vllm_server_host h", "server"), ("--vllm_mode server", "server"), ("", "colocate")]
)
def test_a_server_of_trl_behind_a_condition_is_read(words: str, mode: str) -> None:
    run = f"trl grpo --model_name_or_path m --num_generations 4 --use_vllm true {words}"
    found = convert(
        f'A=$(cat a)\nif [ "$A" = b ]; then trl vllm-serve --model m --tensor-parallel-size 2 & fi\n{run}', gpus=1
    )
    assert found.config.rollout.mode == mode
    assert (found.config.rollout.tensor_parallel_size == 2) is (mode == "server")
    assert told(found, "trl vllm-serve stands behind a condition") is (mode == "server")


def test_numbers_of_gpus_that_are_not_known_are_not_called_unset() -> None:
    text = "the run gets neither NPROC_PER_NODE nor CUDA_VISIBLE_DEVICES"
    unknown = convert(f"export NPROC_PER_NODE=$(nvidia-smi -L | wc -l)\n{RUN}")
    assert told(unknown, "how many GPUs train is not known (NPROC_PER_NODE): 1 GPU is assumed")
    assert not told(unknown, text) and told(convert(RUN), text)
    for lost in (
        "export $(grep -v '^#' .env | xargs)",
        "source .env",
        'while read -r k v; do export "$k=$v"; done < env',
    ):
        found = convert(f"{lost}\n{RUN}")
        assert told(found, "how many GPUs train is not known (NPROC_PER_NODE may be set by ") and not told(found, text)


@pytest.mark.parametrize("count", ["gpu", "auto", "cpu"])
def test_words_of_torchrun_for_what_a_machine_has_are_not_refused(count: str) -> None:
    swift = f"torchrun --nproc_per_node={count} -m swift.cli.rlhf {RUN.partition('rlhf ')[2]}"
    trl = f"torchrun --nproc_per_node {count} grpo.py --model_name_or_path q --dataset_name d --num_generations 8"
    trl += " --per_device_train_batch_size 8 --max_steps 5"
    for name, text in (("NPROC_PER_NODE", swift), ("nproc_per_node", trl)):
        assert told(convert(text), f"{name}={count}: how many these are is known only where it runs; give --gpus N")
        assert convert(text, gpus=4).config.cluster.gpus_per_node == 4


@pytest.mark.parametrize(
    ("setting", "gpus", "hidden"),
    [
        ("NPROC_PER_NODE=4\n", 1, "NPROC_PER_NODE=4"),
        ("NPROC_PER_NODE=4; ", 1, "NPROC_PER_NODE=4"),
        ("NPROC_PER_NODE=${NPROC_PER_NODE:-8}\n", 1, "NPROC_PER_NODE=8"),
        ("export NPROC_PER_NODE=4; export -n NPROC_PER_NODE\n", 1, "NPROC_PER_NODE=4"),
        ("NNODES=2\nNPROC_PER_NODE=4 ", 4, "NNODES=2"),
        ("NPROC_PER_NODE=4\nexport NPROC_PER_NODE\n", 4, ""),
        ("declare -x NPROC_PER_NODE=4\n", 4, ""),
        ("set -a; NPROC_PER_NODE=4; set +a\n", 4, ""),
        ("NPROC_PER_NODE=4\nsrun env NPROC_PER_NODE=$NPROC_PER_NODE ", 4, ""),
        ("NPROC_PER_NODE=4 ", 4, ""),
    ],
)
def test_numbers_of_gpus_count_where_they_are_exported(setting: str, gpus: int, hidden: str) -> None:
    """As bash hands them on: without `export` ms-swift starts one process on one node, and says nothing."""
    found = convert(f"{setting}{RUN}")
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (1, gpus)
    assert told(found, f"{hidden} is set, but not exported, so that the run does not get it") is bool(hidden)


def test_a_config_in_json_is_read_as_one_in_yaml(tmp_path: Path) -> None:
    given = {"rlhf_type": "grpo", "model": "q", "dataset": "d", "num_generations": 16, "learning_rate": 4e-6}
    (tmp_path / "c.json").write_text(json.dumps(given))
    for words in ("swift rlhf c.json", "swift rlhf --config c.json"):
        config = convert(words, folder=tmp_path, gpus=1).config
        assert (config.batch.num_generations, config.optimizer.lr) == (16, 4e-6)


@pytest.mark.parametrize(("words", "notes"), [("", True), ("--tools_prompt react_en", False)])
def test_engines_of_their_own_are_of_versions_up_to_3_4(words: str, notes: bool) -> None:
    text = f"NPROC_PER_NODE=3 {RUN} --use_vllm true --num_infer_workers 1 {words}"
    assert told(convert(text), "num_infer_workers: so it is up to 3.4; 3.5 ignores it") is notes


# -- data, and tables


@pytest.mark.parametrize(
    ("given", "key", "others"),
    [
        ('{"question": "query"}', "question", ""),
        ('{"chat": "messages", "text": "query"}', "chat", "text to query"),
        ('{"question": "query", "truth": "solution"}', "question", "truth to solution"),
        ('{"pictures": "images"}', "prompt", "pictures to images"),
    ],
)
@pytest.mark.parametrize("run", [RUN, MEGATRON])
def test_columns_name_the_prompt(run: str, given: str, key: str, others: str) -> None:
    found = of(f"--columns '{given}'", run)
    assert found.config.data.prompt_key == key
    assert told(found, f"as reward functions get them; there {others}") is bool(others)


def test_columns_have_to_be_a_mapping() -> None:
    with pytest.raises(ValueError, match="--columns x: must be a mapping of names to names"):
        of("--columns x")


def test_an_argument_of_another_project_is_not_called_one_of_ms_swift() -> None:
    found = of("--max_prompt_length 1024")
    assert [item.name for item in found.strange] == ["max_prompt_length"]


@pytest.mark.parametrize(
    ("run", "words", "section", "expected"),
    [
        (RUN, "--wandb_entity us --report_to wandb", "tracking", {"wandb_entity": "us"}),
        (RUN, "--swanlab_project p --report_to swanlab", "tracking", {"project": "p"}),
        (MEGATRON, "--swanlab_project p --report_to swanlab", "tracking", {"project": "p"}),
        (MEGATRON, "--swanlab_exp_name first", "run", {"name": "first"}),
        (
            MEGATRON,
            "--lr_warmup_iters 9 --lr_warmup_fraction 0.5 --train_iters 10",
            "optimizer",
            {"lr_warmup_steps": 5},
        ),
        (MEGATRON, "--lr_warmup_iters 9 --lr_warmup_fraction 0 --train_iters 10", "optimizer", {"lr_warmup_steps": 0}),
    ],
)
def test_arguments_with_a_counterpart_are_carried_over(
    run: str, words: str, section: str, expected: dict[str, Any]
) -> None:
    found = of(words, run)
    assert {name: getattr(getattr(found.config, section), name) for name in expected} == expected


def test_a_fraction_of_warm_up_goes_before_a_number() -> None:
    found = of("--lr_warmup_iters 9 --lr_warmup_fraction 0.5 --train_iters 10", MEGATRON)
    assert why(found, "lr_warmup_iters") == "lr_warmup_fraction takes precedence over it"


@pytest.mark.parametrize("run", [RUN, MEGATRON])
def test_the_revision_of_a_model_is_part_of_its_name(run: str) -> None:
    found = of("--model_revision v2", run.replace("--model m", "--model org/m"))
    assert found.config.model.path == "org/m@v2"
