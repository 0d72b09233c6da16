"""Arguments of ms-swift one by one, as the classes and trainers of its source read them (seconds).

Each row has a program, what is added to its command, the settings that follow, and what is told. Defaults are of 4.5.2.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.importers.tables import load
from gspo_hpc.planning.settings import value_of

_BOTH = "--rlhf_type grpo --model m --dataset d.jsonl --reward_funcs a --num_generations 8 --tuner_type full"
HF = f"NPROC_PER_NODE=8 swift rlhf {_BOTH} --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
VLLM = f"{HF} --use_vllm true --vllm_mode colocate"
MEGATRON = f"NPROC_PER_NODE=8 megatron rlhf {_BOTH} --micro_batch_size 1 --global_batch_size 64"
RUNS = {"swift": HF, "swift vllm": VLLM, "megatron": MEGATRON}
EVALUATED = "--val_dataset v.jsonl"

Row = tuple[str, str, dict[str, Any], str]
ROWS: list[Row] = [
    # what advantages are: compute_advantages of swift/rl_core, and the defaults of RLHFArguments
    ("swift", "--scale_rewards gdpo", {"algorithm.advantage": "gdpo"}, "rewards + 1e-8 there"),
    ("megatron", "--scale_rewards gdpo", {"algorithm.advantage": "gdpo"}, "rewards + 1e-8 there"),
    ("swift", "--scale_rewards gdpo --kl_in_reward true", {"algorithm.kl_placement": "loss"}, "leaves the divergence"),
    (
        "swift",
        "--advantage_estimator rloo",
        {
            "algorithm.advantage": "leave_one_out",
            "algorithm.normalize_advantage": False,
            "algorithm.kl_placement": "reward",
        },
        "",
    ),
    (
        "megatron",
        "--advantage_estimator rloo",
        {
            "algorithm.advantage": "leave_one_out",
            "algorithm.normalize_advantage": True,
            "algorithm.kl_placement": "loss",
        },
        "scale_rewards group, the default of Megatron-SWIFT",
    ),
    ("swift", "--advantage_estimator rloo --kl_in_reward false", {"algorithm.kl_placement": "loss"}, ""),
    ("swift", "--advantage_estimator rloo --scale_rewards group", {"algorithm.normalize_advantage": True}, ""),
    ("swift", "--advantage_estimator reinforce_plus_plus", {"algorithm.advantage": "reinforce_baseline"}, "1e-4 there"),
    (
        "megatron",
        "--advantage_estimator reinforce_plus_plus",
        {"algorithm.advantage": "group", "algorithm.normalize_advantage": True, "algorithm.kl_placement": "loss"},
        "",
    ),
    ("swift", "--advantage_estimator reinforce_plus_plus --scale_rewards none", {"algorithm.advantage": "group"}, ""),
    # ratios: delta bounds those of positive advantages, too
    ("swift", "--delta 1.1", {"algorithm.clip_high": 0.1, "algorithm.dual_clip": 1.2}, "bounds ratios of positive"),
    ("megatron", "--delta 4", {"algorithm.clip_high": 0.2, "algorithm.dual_clip": 4.0}, ""),
    ("swift", "--loss_type cispo --epsilon_high 5 --delta 3", {"algorithm.clip_high": 4.0}, "cispo does not read it"),
    ("swift", "--loss_type sapo --epsilon_high 0.3", {"algorithm.name": "sapo"}, "sapo does not read it"),
    ("swift", "--load_args true", {}, "what the args.json of a checkpoint says"),
    ("swift", "--custom_register_path a.py", {}, "a data set or model that it registers is not read"),
    ("swift", "--top_entropy_quantile 0.2", {"algorithm.top_entropy_quantile": 0.2}, "a micro-batch of one process"),
    # the reference
    ("swift", "--sync_ref_model true", {"algorithm.reference_interval": 512}, ""),
    ("swift", "--sync_ref_model true --tuner_type lora", {"algorithm.reference_interval": 0}, "refreshes nothing"),
    ("megatron", "--sync_ref_model true", {"algorithm.reference_interval": 0}, "refreshes no reference model"),
    # the gap between engine and trainer: log-probs of an engine are there with vLLM only
    (
        "swift",
        "--rollout_importance_sampling_mode token_mask",
        {"algorithm.correction": "none"},
        "where vLLM generates",
    ),
    ("swift vllm", "--rollout_importance_sampling_mode token_mask", {"algorithm.correction": "masked"}, ""),
    ("megatron", "--rollout_importance_sampling_mode token_mask", {"algorithm.correction": "masked"}, ""),
    (
        "swift",
        "--off_policy_sequence_mask_delta 1",
        {"algorithm.sequence_mask": 1.0},
        "the trainer's own old log-probs",
    ),
    # precision: ModelArguments._init_mixed_precision
    ("swift", "", {"model.dtype": "bfloat16"}, "weights are trained in bfloat16 there"),
    ("swift", "", {"model.dtype": "bfloat16"}, "torch_dtype is not given: the type in the model's config.json"),
    ("swift", "--torch_dtype float32", {"model.dtype": "float16"}, "ms-swift makes fp16 true"),
    ("swift", "--torch_dtype float32", {"model.dtype": "float16"}, "matrices alone in float16 (autocast)"),
    ("megatron", "--torch_dtype float32", {"model.dtype": "float16"}, "ms-swift makes fp16 true"),
    ("swift", "--torch_dtype float32 --fp16 false", {"model.dtype": "float32"}, ""),
    ("swift", "--torch_dtype float32 --bf16 true", {"model.dtype": "bfloat16"}, "matrices alone in bfloat16"),
    ("swift", "--bf16 false", {"model.dtype": "bfloat16"}, "compute in it there all the same"),
    # evaluation and what is held out: SftArguments._init_eval_strategy, DataArguments, DefaultFlowCallback
    (
        "swift",
        EVALUATED,
        {"eval.interval": 500, "eval.before": False, "eval.after": True},
        "evaluates at the last step",
    ),
    ("swift", f"{EVALUATED} --save_strategy no", {"eval.interval": None, "eval.after": False}, ""),
    ("swift", f"{EVALUATED} --save_strategy epoch", {"eval.after": True}, "it is evaluated once in an epoch there"),
    ("swift", f"{EVALUATED} --eval_steps 0.1 --max_steps 105", {"eval.interval": 11}, ""),
    ("swift", f"{EVALUATED} --eval_steps 0.1", {"eval.interval": None}, "it is a share of the steps"),
    ("swift", "--save_steps 0.2 --max_steps 100", {"checkpoint.interval": 20}, ""),
    ("swift", "--save_strategy no --split_dataset_ratio 0.1", {"data.train_ratio": 1.0}, "with save_strategy no"),
    ("swift", "--streaming true --split_dataset_ratio 0.1", {"data.train_ratio": 1.0}, "read it with streaming"),
    ("megatron", "--streaming true --split_dataset_ratio 0.1", {"data.train_ratio": 1.0}, "read it with streaming"),
    # steps: an epoch has the prompts that fill rollouts (RepeatSampler), and a warm-up is a share of lr_decay_iters
    ("swift", "--num_train_epochs 3 --dataset d.jsonl#1003", {"run.max_steps": 375}, ""),
    ("swift", "--num_train_epochs 3 --dataset d.jsonl#1003 --steps_per_generation 8", {"run.max_steps": 372}, ""),
    ("swift", "--num_train_epochs 1.5 --dataset d.jsonl#1003 --num_iterations 2", {"run.max_steps": 375}, ""),
    ("megatron", "--train_iters 100 --lr_warmup_fraction 0.1", {"optimizer.lr_warmup_steps": 10}, ""),
    (
        "megatron",
        "--train_iters 100 --lr_warmup_fraction 0.1 --lr_decay_iters 50",
        {"optimizer.lr_warmup_steps": 5},
        "lr_warmup_fraction 0.1 of 50 steps",
    ),
    ("megatron", "--train_iters 9 --max_epochs 2", {"run.max_epochs": 2}, "up to 3.10 train_iters 9 is the length"),
    # rollouts
    ("swift", "--steps_per_generation 8 --generation_batch_size 256", {"batch.steps_per_generation": 4}, ""),
    ("swift", "--truncation_strategy delete", {"data.overlong": "drop"}, "there another prompt takes its place"),
    ("swift", "--vllm_tensor_parallel_size 2", {"rollout.tensor_parallel_size": 1}, "makes it 1 without use_vllm"),
    ("swift vllm", "--vllm_tensor_parallel_size 2", {"rollout.tensor_parallel_size": 2}, "have the same seeds"),
    ("swift vllm", "--async_generate true", {"rollout.max_staleness": 0}, "refuses it without a server"),
    (
        "megatron",
        "--vllm_mode server --vllm_server_host h --async_generate true",
        {"rollout.max_staleness": 0},
        "Megatron-SWIFT refuses it",
    ),
    (
        "swift vllm",
        "--vllm_mode server --vllm_server_host h --sleep_level 1",
        {"rollout.sleep_level": 2},
        "engines of a server do not sleep there",
    ),
    # kernels and gradients of Megatron: MegatronArguments._init_attention_backend and _map_dtype
    ("megatron", "--use_vllm false", {"rollout.mode": "colocate"}, "vLLM always generates here"),
    ("megatron", "--moe_router_load_balancing_type aux_loss", {}, "so experts are balanced here, too"),
    ("megatron", "--attention_backend flash_3", {"model.attention_backend": "flash"}, "flash_3: the version"),
    ("megatron", "--attention_backend unfused", {"model.attention_backend": "unfused"}, ""),
    ("megatron", "--attention_backend local", {"model.attention_backend": "auto"}, "PyTorch's or Transformer Engine's"),
    ("megatron", "--main_grads_dtype bf16", {"optimizer.grad_reduce_in_fp32": False}, ""),
    (
        "megatron",
        "--accumulate_allreduce_grads_in_fp32 false",
        {"optimizer.grad_reduce_in_fp32": True},
        "gradients are summed in float32 here, as there with bf16",
    ),
    # prompts: TemplateArguments
    ("swift", r'--system "one\ntwo"', {"data.system_prompt": "one\ntwo"}, ""),
    ("swift", '--system ""', {"data.system_prompt": None}, "prompts have no system message then"),
]


def said(found: Converted) -> str:
    return " ".join(found.text.replace("#", " ").split())


@pytest.mark.parametrize(("program", "words", "settings", "note"), ROWS, ids=lambda value: str(value)[:80])
def test_an_argument_is_what_it_is_in_ms_swift(program: str, words: str, settings: dict[str, Any], note: str) -> None:
    found = convert(f"{RUNS[program]} {words}")
    assert {key: value_of(found.config, key) for key in settings} == settings
    assert note in said(found)


@pytest.mark.parametrize(
    ("model", "notes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("google/gemma-2-9b-it", True),
        ("Qwen/Qwen2.5-7B-Instruct", False),
        ("Qwen/Qwen3-8B", False),
        ("Qwen/Qwen2.5-7B", False),  # of which more is told
        ("m --use_chat_template false", False),
    ],
)
def test_templates_of_models_are_those_of_ms_swift(model: str, notes: bool) -> None:
    found = convert(HF.replace("--model m", f"--model {model}"))
    assert any("prompts have the template that ms-swift has" in line for line in found.differs) is notes


def test_a_python_file_of_ms_swift_is_refused_with_a_way_out() -> None:
    text = "from swift import RLHFArguments, rlhf_main\nrlhf_main(RLHFArguments(rlhf_type='grpo', model='m'))\n"
    with pytest.raises(ValueError, match="of ms-swift, commands and YAML are read: write the arguments"):
        convert(text, name="a.py")


@pytest.mark.parametrize(
    ("start", "nodes", "each"),
    [
        ("NPROC_PER_NODE=4 NNODES=2 swift rlhf", 2, 4),
        ("torchrun --nproc_per_node 4 --nnodes 2 swift/cli/rlhf.py", 2, 4),
        ("python -m torch.distributed.run --nproc_per_node 4 swift/cli/rlhf.py", 1, 4),
        ("accelerate launch --num_processes 8 --num_machines 2 swift/cli/rlhf.py", 2, 4),
        ("accelerate launch --num_processes 4 swift/cli/rlhf.py", 1, 4),
        ("deepspeed --num_gpus 4 swift/cli/rlhf.py", 1, 4),
    ],
)
def test_processes_are_those_of_any_launcher(start: str, nodes: int, each: int) -> None:
    found = convert(f"{start} {_BOTH}")
    assert (found.config.cluster.nodes, found.config.cluster.gpus_per_node) == (nodes, each)


@pytest.mark.parametrize(
    ("project", "names"),
    [
        ("swift_hf", "adalora_deltaT use_liger train_sampler_random metric limit_mm_per_prompt acc_steps"),
        ("swift", "seq_length use_flash_attn norm_epsilon hidden_dropout num_experts no_bias_swiglu_fusion"),
    ],
)
def test_arguments_of_version_3_are_known(project: str, names: str) -> None:
    known = load(project)
    assert [name for name in names.split() if not known.has(name) and name not in known.renamed] == []


@pytest.mark.parametrize(
    ("program", "words", "mistake"),
    [
        ("swift", "--steps_per_generation 8 --generation_batch_size 128", "must be steps_per_generation .8. x 32"),
        ("swift", "--advantage_estimator rloo --scale_rewards batch", "divided by the deviation of its group or by"),
        ("swift", "--delta 1", "--delta 1: must be above 1"),
    ],
)
def test_what_has_no_counterpart_or_does_not_start_there_is_refused(program: str, words: str, mistake: str) -> None:
    with pytest.raises(ValueError, match=mistake):
        convert(f"{RUNS[program]} {words}")


_BARE = "NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --dataset d.jsonl --reward_funcs a --num_generations 2 --beta 0.1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--model m", True),
        ("--model m --train_type full", True),  # which versions up to 3.6 have, too
        ("--model m --tuner_type full", False),
        ("--model m --train_type full --gradient_accumulation_steps 2", False),
        ("--model m --train_type full --importance_sampling_level sequence", False),
        ("--model Qwen/Qwen3.5-9B --train_type full", False),
    ],
)
def test_accumulation_that_versions_up_to_3_6_choose_is_told(words: str, told: bool) -> None:
    found = convert(f"{_BARE} {words}")
    assert any("ms-swift up to 3.6 chooses 8" in line for line in found.assumed) is told


@pytest.mark.parametrize(
    ("words", "top_k", "bounded"),
    [
        ("--model m --train_type full", 50, False),
        ("--model m --train_type full --model_type qwen3_5", -1, True),
        ("--model Qwen/Qwen3.5-9B --train_type full", -1, True),
        ("--model m --train_type full --template glm_ocr", -1, True),
        ("--model m --tuner_type full", -1, True),
        ("--model m --num_infer_workers 1", 50, False),
    ],
)
def test_train_type_is_of_4_0_too_where_the_model_is(words: str, top_k: int, bounded: bool) -> None:
    found = convert(f"{_BARE} {words}")
    assert found.config.rollout.top_k == top_k
    assert any("is an argument of ms-swift 3" in line for line in found.assumed) is not bounded
    assert any("is 10 at most there since 4.0.4" in line for line in found.differs) is bounded


@pytest.mark.parametrize(
    ("model", "thinks", "general"),
    [
        ("/w/Qwen3.5-9B-R0merged", True, False),
        ("./Qwen3-8B-sft", True, False),
        ("./qwen3_8b_sft", True, False),
        ("./mine --model_type qwen3_5", True, True),
        ("./mine --template qwen3", True, True),
        ("./mine --model_type qwen2_5", False, True),
        ("./Qwen3-8B-sft --template qwen3_nothinking", False, True),
        ("./qwen3-sft", False, True),
        ("Qwen/Qwen3-4B-Instruct-2507 --model_type qwen3", False, False),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", False, False),
        ("./Qwen3-8B-sft --enable_thinking false", False, False),
    ],
)
def test_models_that_ms_swift_does_not_let_think_are_told(model: str, thinks: bool, general: bool) -> None:
    found = convert(f"{_BARE} --model {model}")
    assert any("since 4.3.1 ms-swift does not let" in line for line in found.assumed) is thinks
    assert any("prompts have the template that ms-swift has" in line for line in found.differs) is general


@pytest.mark.parametrize(
    ("words", "drifts"),
    [
        ("", True),
        ("--deepspeed zero2", True),
        ("--deepspeed zero3", False),
        ("--fsdp fsdp2", False),
        ("--fsdp conf/my_fsdp2.json", False),
        ("--fsdp conf/f.json", True),
        ("--fsdp '{\"fsdp_version\": 2}'", False),
        ("--fsdp 'full_shard auto_wrap'", True),
    ],
)
def test_adapters_that_are_merged_into_copies_let_the_base_be(words: str, drifts: bool) -> None:
    run = VLLM.replace("--tuner_type full", "--tuner_type lora")
    assert any("base and reference drift" in line for line in convert(f"{run} {words}").differs) is drifts


def test_copies_are_merged_with_version_2_of_a_launchers_fsdp() -> None:
    run = f"accelerate launch --fsdp_version 2 --num_processes 2 swift/cli/rlhf.py {_BOTH} --use_vllm true"
    found = convert(run.replace("--tuner_type full", "--tuner_type lora --vllm_mode colocate"))
    assert not any("base and reference drift" in line for line in found.differs)


@pytest.mark.parametrize(
    ("name", "registered"),
    [("a.json", False), ("data/a.csv#500", False), ("d.jsonl", False), ("AI-ModelScope/clevr", True)],
)
def test_files_are_no_data_sets_that_ms_swift_registers(name: str, registered: bool) -> None:
    found = convert(f"{_BARE} --model m".replace("--dataset d.jsonl", f"--dataset {name}"))
    assert any("registers by name" in line for line in found.differs) is registered


def test_what_follows_without_vllm_is_said_as_a_condition_where_use_vllm_is_not_known() -> None:
    found = convert(f'{HF.replace("--tuner_type full", "--tuner_type lora")} --use_vllm "$USE"')
    assert any(line.startswith("if use_vllm is false: without use_vllm transformers") for line in found.differs)
    assert any("for every rollout (where use_vllm is true)" in line for line in found.differs)
    assert not any("sampled with adapters beside the weights there" in line for line in found.differs)


def test_a_local_variable_that_is_over_is_not_said_to_be_unset() -> None:
    count = 'f() {\n  local parts\n  read -r -a parts <<< "$D"\n  export NPROC_PER_NODE=${#parts[@]}\n}\nf\n'
    found = convert(f"{count}swift rlhf {_BOTH}")
    (line,) = [line for line in found.assumed if line.startswith("NPROC_PER_NODE=")]
    assert "$parts is read from the input by read" in line


@pytest.mark.parametrize("name", ["c-$(echo 3 | tr 3 4)B.yaml", "$NAME.yaml"])
def test_a_yaml_whose_name_only_the_script_knows_is_to_be_written_out(name: str) -> None:
    with pytest.raises(ValueError, match="is known only when the script runs: write its name out in the command"):
        convert(f"C={name}\nswift rlhf --rlhf_type grpo --config $C")
