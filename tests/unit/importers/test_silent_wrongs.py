"""What was once converted wrongly without a word: whose YAML it is, what false means, lengths, nothing told (4 s).

Would catch a run of ms-swift taken for the other kind, a prompt that is another one, an engine's length that is not
carried over, a default of a batch system that is not told, and a config made of defaults alone.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml

from gspo_hpc.importers import tables
from gspo_hpc.importers.convert import Converted, convert

SHARED = {"rlhf_type": "grpo", "model": "m/m", "tuner_type": "full", "dataset": "a.jsonl", "num_generations": 8}
SWIFT = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --tuner_type full --num_generations 8 --model m/m "
MEGATRON = "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --num_generations 8 --global_batch_size 64 --model m/m "
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
    f"{ACTOR}.ppo_mini_batch_size=32 {ROLLOUT}.n=8 "
)
TRL: dict[str, Any] = {"num_generations": 8, "per_device_train_batch_size": 8, "max_steps": 10, "learning_rate": 2e-6}


def of(source: str | None = None, **given: Any) -> Converted:
    return convert(yaml.safe_dump({**SHARED, **given}), source, name="run.yaml")


def whys(found: Converted) -> dict[str, str]:
    return {item.name: item.why for item in found.left}


# -- whose YAML it is


@pytest.mark.parametrize(
    ("given", "project"),
    [
        ({"learning_rate": 2e-6}, "ms-swift"),
        ({"lr_scheduler_type": "constant"}, "ms-swift"),
        ({"deepspeed": "zero2"}, "ms-swift"),
        ({"max_steps": 5}, "ms-swift"),
        ({"lr": 2e-6}, "Megatron-SWIFT"),
        ({"train_iters": 5}, "Megatron-SWIFT"),
        ({"train": {"gpus": 8}}, "Megatron-SWIFT"),
        ({"micro_batch_size": 1, "global_batch_size": 64, "learning_rate": 2e-6}, "Megatron-SWIFT"),  # two against one
        ({"warmup_ratio": 0.1, "max_steps": 5, "lr": 2e-6}, "ms-swift"),
    ],
)
def test_a_yaml_is_that_of_the_kind_of_ms_swift_that_knows_more_of_it(given: dict[str, Any], project: str) -> None:
    for source in (None, "swift"):
        assert of(source, **given).project == project


def test_a_plain_yaml_of_ms_swift_means_what_its_command_means() -> None:
    given = {**SHARED, "learning_rate": 2e-6, "max_completion_length": 700, "warmup_ratio": 0.1, "max_steps": 30}
    alone = convert(yaml.safe_dump(given), gpus=8, name="run.yaml")
    command = convert("swift rlhf " + " ".join(f"--{name} {value}" for name, value in given.items()), gpus=8)
    assert alone.config == command.config and alone.config.optimizer.lr == 2e-6 and not alone.strange


@pytest.mark.parametrize("given", [{}, {"max_completion_length": 700}, {"lr": 1e-6, "learning_rate": 1e-6}])
def test_arguments_of_both_kinds_need_the_name(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--from megatron-swift or --from ms-swift"):
        of(**given)
    assert of("megatron-swift", **given).project == "Megatron-SWIFT"
    assert of("ms-swift", **given).project == "ms-swift"


def test_a_list_of_arguments_is_told_apart_in_the_same_way() -> None:
    both = "--rlhf_type grpo --num_generations 8 --model m/m "
    assert convert(f"{both} --learning_rate 1e-6", gpus=8).project == "ms-swift"
    assert convert(f"{both} --lr 1e-6", gpus=8).project == "Megatron-SWIFT"
    with pytest.raises(ValueError, match="--from megatron-swift or --from ms-swift"):
        convert(both, gpus=8)
    assert convert(f"{both} --max_completion_length 9", "ms-swift", gpus=8).project == "ms-swift"


def test_a_yaml_behind_a_command_sets_variables_and_may_hold_what_both_know(tmp_path: Any) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**SHARED, "ENV": {"NPROC_PER_NODE": "4"}}))
    script = "swift rlhf run.yaml --per_device_train_batch_size 2 --gradient_accumulation_steps 1"
    found = convert(script, folder=tmp_path, name="run.sh")
    assert found.project == "ms-swift" and found.config.cluster.gpus_per_node == 4
    assert found.config.batch.global_batch_size == 8 and not found.strange


# -- what false means


@pytest.mark.parametrize("command", [SWIFT, MEGATRON])
@pytest.mark.parametrize("value", [True, False])
def test_thinking_of_ms_swift_is_carried_over(command: str, value: bool) -> None:
    found = convert(f"{command} --enable_thinking {str(value).lower()}")
    assert found.config.data.chat_template_kwargs == {"enable_thinking": value}
    assert "enable_thinking" in {item.name for item in found.carried}


def test_a_model_that_thinks_or_not_is_told_where_ms_swift_decides_it() -> None:
    def warned(more: str) -> bool:
        return any("enable_thinking is not given" in line for line in convert(f"{MEGATRON} {more}").assumed)

    assert warned("--model Qwen/Qwen3-8B") and warned("--model /models/Qwen3-30B-A3B/")
    assert not warned("--model Qwen/Qwen3-8B --enable_thinking true")
    assert not warned("--model Qwen/Qwen3-30B-A3B-Instruct-2507") and not warned("--model Qwen/Qwen2.5-7B-Instruct")


def test_variables_of_verls_chat_template_are_carried_over() -> None:
    name = "data.apply_chat_template_kwargs"
    for given in (
        f"{name}.enable_thinking=False",
        f"+{name}.enable_thinking=false",
        f"+{name}={{enable_thinking:False}}",
    ):
        assert convert(VERL + given).config.data.chat_template_kwargs == {"enable_thinking": False}, given
    found = convert(f"{VERL} {name}.a.b=2 {name}.c=[1,2] {name}.effort=high")
    assert found.config.data.chat_template_kwargs == {"a": {"b": 2}, "c": [1, 2], "effort": "high"}
    found = convert(f"{VERL} {name}.enable_thinking=$(cat thinking)")
    assert found.config.data.chat_template_kwargs == {} and any("enable_thinking" in line for line in found.open)


@pytest.mark.parametrize("given", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_variables_of_trls_chat_template_are_carried_over(given: Any) -> None:
    found = convert(json.dumps({**TRL, "chat_template_kwargs": given}), gpus=8, name="run.yaml")
    assert found.config.data.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(ValueError, match="chat_template_kwargs=3: must be a mapping"):
        convert(json.dumps({**TRL, "chat_template_kwargs": 3}), gpus=8, name="run.yaml")


def test_a_text_that_prompts_end_with_is_warned_of() -> None:
    for given in ("''", "'<think>\\n'"):
        found = convert(f"{SWIFT} --response_prefix {given}")
        assert any("prompts end as the chat template has it" in line for line in found.assumed)
        assert "prompts end" in whys(found)["response_prefix"]


@pytest.mark.parametrize("source", ["swift", "swift_hf", "trl", "verl"])
def test_what_is_on_by_default_is_not_called_absent_where_it_is_off(source: str) -> None:
    table = tables.load(source)
    assert table.on
    for name in table.on:
        if source == "trl":
            found = convert(json.dumps({**TRL, name: False}), gpus=8, name="run.yaml")
        else:
            command = {"swift": MEGATRON, "swift_hf": SWIFT, "verl": VERL}[source]
            found = convert(f"{command} {name}=False" if source == "verl" else f"{command} --{name} false")
        reason = next((text for pattern, text in table.reasons.items() if fnmatch(name, pattern)), None)
        assert whys(found)[name] == (reason or "it has no counterpart here"), name


def test_a_switch_of_transformers_that_is_turned_off_by_another_name() -> None:
    run = "trl grpo --num_generations 8 --per_device_train_batch_size 8 --max_steps 9"
    assert convert(run, gpus=1).config.memory.recompute_granularity == "full"
    found = convert(f"{run} --no_gradient_checkpointing --no_remove_unused_columns", gpus=1)
    assert found.config.memory.recompute_granularity is None and not found.strange
    assert "no_gradient_checkpointing" in {item.given for item in found.carried}
    assert "no_remove_unused_columns" in {item.given for item in found.left}
    assert {item.name for item in convert(f"{run} --no_such_thing", gpus=1).strange} == {"no_such_thing"}
    assert convert(f"{MEGATRON} --no_save_optim").config == convert(MEGATRON + "--lr 1e-5").config  # a name of its own


def test_a_prompt_without_a_template_stays_one() -> None:
    assert convert(f"{SWIFT} --use_chat_template false").config.data.chat_template is False
    assert "always sampled" in whys(convert(f"{VERL} {ROLLOUT}.do_sample=False"))[f"{ROLLOUT}.do_sample"]


# -- lengths of verl's engine


def test_the_engines_own_lengths_go_before_those_of_the_data() -> None:
    both = f"{VERL} data.max_prompt_length=1024 data.max_response_length=4096"
    found = convert(f"{both} {ROLLOUT}.response_length=2048 {ROLLOUT}.prompt_length=512")
    assert (found.config.rollout.max_prompt_length, found.config.rollout.max_response_length) == (512, 2048)
    assert "is what the engine generates at most" in whys(found)["data.max_response_length"]
    assert any("more than 512 and at most 1024 tokens are cut from the left" in line for line in found.assumed)
    found = convert(f"{both} {ROLLOUT}.prompt_length=2048")
    assert (found.config.rollout.max_prompt_length, found.config.rollout.max_response_length) == (1024, 4096)
    assert "no prompt has more than data.max_prompt_length (1024)" in whys(found)[f"{ROLLOUT}.prompt_length"]
    same = convert(f"{both} {ROLLOUT}.prompt_length=1024 '{ROLLOUT}.response_length=${{data.max_response_length}}'")
    assert same.config == convert(both).config and not {f"{ROLLOUT}.prompt_length", "data.max_response_length"} & {
        *whys(same)
    }


def test_a_window_that_ends_responses_early_is_told() -> None:
    both = f"{VERL} data.max_prompt_length=1000 data.max_response_length=2000"
    for window, told in ((2999, True), (3000, False)):
        found = convert(f"{both} {ROLLOUT}.max_model_len={window}")
        assert any("an engine of verl stops there" in line for line in found.assumed) is told


@pytest.mark.parametrize(
    ("run", "window"),
    [
        ("swift rlhf --rlhf_type grpo --num_generations 4 --max_length 1000 --max_completion_length 2000", "len"),
        (
            "trl grpo --num_generations 4 --use_vllm --vllm_mode colocate --max_prompt_length 1000 "
            "--max_completion_length 2000",
            "length",
        ),
    ],
)
def test_a_window_that_ends_responses_early_is_told_of_ms_swift_and_trl(run: str, window: str) -> None:
    for size, told in ((2999, True), (3000, False)):
        found = convert(f"{run} --vllm_max_model_{window} {size}", gpus=1)
        text = "stops there, and here at 3000 tokens, prompt and response together"
        assert any(text in line for line in found.assumed) is told
    served = convert(f"{run} --use_vllm true --vllm_mode server --vllm_max_model_{window} 2999", gpus=1)
    assert not any("stops there" in line for line in served.assumed)


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("heat", [None, 0, 0.6])
def test_evaluation_of_verl_samples_as_often_as_there(samples: int, heat: float | None) -> None:
    """Two samples are the least; at temperature 0, which is verl's default, all of them are alike."""
    name = f"{ROLLOUT}.val_kwargs"
    words = f"{name}.n={samples}" + ("" if heat is None else f" {name}.temperature={heat}")
    found = convert(f"{VERL} {words} {name}.top_p=0.9 {name}.top_k=20")
    several = samples > 1 and bool(heat)
    assert (found.config.eval.top_p, found.config.eval.top_k) == ((0.9, 20) if several else (1.0, -1))
    assert (f"{name}.top_p" in whys(found)) is not several
    assert found.config.eval.samples == (samples if several else 1)
    assert found.config.eval.temperature == (heat if several else 1.0)
    assert (f"{name}.n" in whys(found)) is not several
    if samples > 1 and not heat:
        assert "one is enough" in whys(found)[f"{name}.n"]


def test_a_run_of_verl_that_only_evaluates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.val_only=True: nothing is trained"):
        convert(f"{VERL} trainer.val_only=True")
    assert convert(f"{VERL} trainer.val_only=False")


# -- what tells nothing, and what is told by another name


@pytest.mark.parametrize("given", [{"model": "x"}, {"dataset": "a.jsonl"}, {"model": "x", "output_dir": "o"}])
def test_a_run_that_tells_nothing_is_refused(given: dict[str, Any]) -> None:
    for source in ("megatron-swift", "ms-swift"):
        with pytest.raises(ValueError, match="that says how to train"):
            convert(yaml.safe_dump({"rlhf_type": "grpo", **given}), source, name="run.yaml")
        told = {"rlhf_type": "grpo", **given, "num_generations": 4}
        assert convert(yaml.safe_dump(told), source, name="run.yaml").config.batch.num_generations == 4
    with pytest.raises(ValueError, match="that says how to train"):
        convert("trl grpo --model_name_or_path x")


def test_what_the_chat_template_is_told_does_not_say_how_to_train() -> None:
    with pytest.raises(ValueError, match="that says how to train"):
        convert(json.dumps({"model_name_or_path": "x", "chat_template_kwargs": {"a": 1}}), "trl", name="run.yaml")


def test_a_model_and_its_data_are_a_run_with_defaults() -> None:
    for text in (
        "trl grpo --model_name_or_path x --dataset_name some/data",
        "trl grpo --model_name_or_path x --dataset_mixture some/data",
        "trl grpo --model_name_or_path x --datasets some/data",
        "megatron rlhf --rlhf_type grpo --model x --dataset some/data",
        "swift rlhf --rlhf_type grpo --model x --dataset a.jsonl",
    ):
        assert convert(text, gpus=8).config.model.path == "x"


def test_passes_over_the_data_are_told_by_the_name_that_is_given() -> None:
    ray = {**SHARED, "max_epochs": 2, "train": {"gpus": 8}, "rollout": {"gpus": 8}, "global_batch_size": 64}
    text = convert(yaml.safe_dump({**ray, "train_iters": 9}), rows=640, name="run.yaml").text
    assert "# max_epochs 2 of 640 prompts, before train_iters" in text and "num_train_epochs" not in text
    assert "max_epochs takes precedence over it" in text


def test_max_epochs_of_ms_swift_ends_the_run_and_never_makes_it_longer() -> None:
    run = f"{SWIFT} --per_device_train_batch_size 8"
    assert convert(f"{run} --max_epochs 2").config.run.max_epochs == 2  # of 3 by default
    assert convert(f"{run} --max_epochs 5").config.run.max_epochs == 3
    assert convert(f"{run} --max_epochs 5 --num_train_epochs 9").config.run.max_epochs == 5
    both = convert(f"{run} --max_epochs 1 --max_steps 70")
    assert both.config.run.max_steps == 70 and any("also ends after 1 passes" in line for line in both.assumed)


# -- scripts


@pytest.mark.parametrize(
    "nodes",
    ["${NNODES:-${SLURM_NNODES:-4}}", "${SLURM_NNODES:-${NNODES:-4}}", "${A:-${B-${SLURM_JOB_NUM_NODES:-4}}}",
     "${SLURM_NNODES:-4}"],
)  # fmt: skip
def test_a_default_for_a_variable_of_slurm_is_told_wherever_it_stands(nodes: str) -> None:
    found = convert(f"NNODES={nodes}\nexport NNODES\n{MEGATRON}")
    assert found.config.cluster.nodes == 4
    assert any("the script's default is taken, and decides NNODES" in line for line in found.assumed)
    assert not any(
        "default is taken" in line for line in convert(f"NNODES=${{N:-4}}\nexport NNODES\n{MEGATRON}").assumed
    )


@pytest.mark.parametrize(
    ("function", "call", "lr"),
    [
        ('f() { local n=$1; echo "$((n * 8))e-7"; }', "$(f 2)", 16e-7),
        ('f() { local a="$1" b=${2:-3}\n local c=$((a + b)); printf "%s" "${c}e-7"; }', "$(f 2)", 5e-7),
        ("f() { declare n=4; echo ${n}e-7; }", "$(f)", 4e-7),
        ("n=9\nf() { local n=1 m=$n; echo ${m}e-7; }", "$(f)", 9e-7),  # all are expanded before the first is set
        ("n=9\nf() { local n=2; echo 1; }\ng() { echo $n; }", "$(f)e-$(g)", 1e-9),  # it is gone after the function
        ("g() { echo ${n}e-7; }\nf() { local n=6; g; }", "$(f)", 6e-7),  # and there in those that it calls
        ("f() { local -i n=$1; echo ${n}e-7; }", "$(f 2)", None),
        ("f() { local n=$(date +%s); echo ${n}e-7; }", "$(f 2)", None),
        ("f() { local n=$1; n=3; echo ${n}e-7; }", "$(f 2)", None),
        ("f() { local n={1,2}; echo ${n}e-7; }", "$(f)", None),
        ("function local { :; }\nf() { local n=$1; echo ${n}e-7; }", "$(f 2)", None),
        ("declare -i n\nf() { local n=2+3; echo ${n}e-7; }", "$(f)", None),
        ("f() { local n=$1 & echo 1e-7; }", "$(f 2)", None),
    ],
)
def test_local_variables_of_a_function_are_followed(function: str, call: str, lr: float | None) -> None:
    found = convert(f"{function}\n{MEGATRON} --lr {call}")
    if lr is None:
        assert any("--lr" in line for line in found.open)
    else:
        assert found.config.optimizer.lr == pytest.approx(lr) and not found.open


# -- branches that no test went through


@pytest.mark.parametrize(("size", "processes", "update"), [(3, 2, 18), (5, 2, 20), (16, 1, 16), (3, 8, 24), (7, 1, 21)])
def test_accumulation_that_is_chosen_reaches_16_completions(size: int, processes: int, update: int) -> None:
    command = f"NPROC_PER_NODE={processes} swift rlhf --rlhf_type grpo --per_device_train_batch_size {size}"
    words = f"{command} --num_generations 2"
    assert convert(f"{words} --vllm_device auto").config.batch.global_batch_size == update  # a sign of 3.5 or before
    found = convert(words)  # since 3.7 there is no accumulation
    assert found.config.batch.global_batch_size == size * processes
    told = [line for line in found.assumed if line.startswith("gradient_accumulation_steps is not given: 1; ms-swift")]
    assert bool(told) is (update > size * processes)


@pytest.mark.parametrize("rollout", ["--steps_per_generation 2", "--generation_batch_size 64"])
def test_an_update_that_is_made_of_several_rollouts(rollout: str) -> None:
    run = "--num_processes 4 trl grpo --num_generations 8 --per_device_train_batch_size 8"
    run = f"accelerate launch {run} --gradient_accumulation_steps 6 {rollout}"
    found = convert(run)
    assert found.config.batch.global_batch_size == 8 * 4 * 6 and found.config.batch.steps_per_generation == 1
    assert any("an update is made of 3 rollouts in TRL" in line for line in found.differs)
    with pytest.raises(ValueError, match="2 micro-batches are no whole updates"):
        convert(f"{run} --num_iterations 2")
    with pytest.raises(ValueError, match="nearest: 6 or 12"):
        convert(
            run.replace("steps_per_generation 2", "steps_per_generation 7").replace("batch_size 64", "batch_size 224")
        )


def test_passes_over_each_rollout_make_more_steps_of_as_many_prompts() -> None:
    run = {**TRL, "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    for passes, steps in ((1, 800), (3, 2400)):
        text = json.dumps({**run, "num_iterations": passes})
        found = convert(text, gpus=1, rows=800, name="run.yaml")
        assert found.config.batch.num_iterations == passes and found.config.run.max_steps == steps


@pytest.mark.parametrize("given", ["tools=[search]", "environment_factory=lambda: Env()", "rollout_func=generate"])
def test_turns_of_trl_are_told_loudly(given: str) -> None:
    head = "from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig(num_generations=8)\n"
    found = convert(f"{head}GRPOTrainer('m/m', [f], args, ds, {given}).train()\n", gpus=1)
    assert any("the original goes on for several turns" in line for line in found.assumed)
    plain = convert(f"{head}GRPOTrainer('m/m', [f], args, ds, tools=None).train()\n", gpus=1)
    assert not any("several turns" in line for line in plain.assumed)


@pytest.mark.parametrize("made", ["dict(own(), beta=0.1)", "load('a.yaml')"])
def test_a_file_that_shows_no_argument_of_its_config_is_refused(made: str) -> None:
    """Arguments that may change before the config is made are not known: defaults would stand for all of them."""
    head = f"from trl import GRPOConfig, GRPOTrainer\nmore = {made}\nif wanted():\n    more['beta'] = 0.2\n"
    tail = "GRPOTrainer('m/m', [f], args, ds).train()\n"
    with pytest.raises(ValueError, match=r"line 5: GRPOConfig\(\*\*more\): the arguments of its GRPOConfig"):
        convert(f"{head}args = GRPOConfig(**more)\n{tail}", gpus=1)
    found = convert(f"{head}args = GRPOConfig(num_generations=8, **more)\n{tail}", gpus=1)
    assert "**more" in found.open and found.config.batch.num_generations == 8


def test_a_value_that_is_not_known_counts_only_where_a_value_counts() -> None:
    """The folder of a profiler has no counterpart, whatever it is."""
    found = convert(f"{VERL} trainer.npu_profile.options.save_path=$HOME/profile trainer.total_epochs=$EPOCHS")
    assert found.open == ("trainer.total_epochs=$EPOCHS",)
    assert not any("save_path" in line for line in found.assumed)
    assert whys(found)["trainer.npu_profile.options.save_path"] == "it has no counterpart here"
