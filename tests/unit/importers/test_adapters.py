"""LoRA adapters are carried over with their rank, scale and layers, and every argument of them is in a list.

A converter that lost them would train all weights at a rate made for adapters. It takes about two seconds.
"""

from __future__ import annotations

import math

import pytest

from gspo_hpc.importers.convert import Converted, convert
from gspo_hpc.models.adapter_table import TARGETS

HF = "swift rlhf --rlhf_type grpo --num_generations 4 --max_steps 10"
MEGATRON = "megatron rlhf --rlhf_type grpo --global_batch_size 32 --num_generations 4 --train_iters 10"
TRL = "trl grpo --num_generations 8 --max_steps 9"
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8"
)
MODEL, ON_MEGATRON = "actor_rollout_ref.model", "model_engine=megatron"
HEAD = "from peft import LoraConfig, get_peft_model\nfrom trl import GRPOConfig, GRPOTrainer\n"
HEAD += "args = GRPOConfig(beta=0.1)\n"
TRAINED = "GRPOTrainer('m/m', [f], args, ds{}).train()\n"
UNSLOTH = "from unsloth import FastLanguageModel\nfrom trl import GRPOConfig, GRPOTrainer\n"
UNSLOTH += "model, tok = FastLanguageModel.from_pretrained(model_name='q/q', max_seq_length=9{})\n"
UNSLOTH += "model = FastLanguageModel.get_peft_model(model{})\n"
UNSLOTH += (
    "GRPOTrainer(model=model, reward_funcs=[f], args=GRPOConfig(num_generations=8{}), train_dataset=ds).train()\n"
)
ALL, QV = ("all-linear",), ("q_proj", "v_proj")


def adapter(found: Converted) -> tuple[object, ...]:
    """Type, rank, alpha and targets."""
    ours = found.config.adapter
    return ours.type, ours.rank, ours.alpha, ours.targets


def given(text: str) -> Converted:
    """The run of a text, on one GPU where the text does not say how many there are."""
    return convert(text, gpus=None if "verl" in text else 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HF}", ("lora", 8, 32.0, ALL)),
        (f"{HF} --tuner_type full --lora_rank 4", (None, 8, 32.0, ALL)),
        (f"{HF} --train_type lora --lora_rank 16 --lora_alpha 64 --target_modules q_proj v_proj",
         ("lora", 16, 64.0, QV)),
        (f"{HF} --target_modules self_attn.q_proj mlp.up_proj", ("lora", 8, 32.0, ("q_proj", "up_proj"))),
        (f"{HF} --use_rslora true --lora_rank 16", ("lora", 16, 128.0, ALL)),
        (f"{MEGATRON}", (None, 8, 32.0, ALL)),
        (f"{MEGATRON} --tuner_type lora --lora_rank 4 --target_modules linear_proj linear_fc2",
         ("lora", 4, 32.0, ("o_proj", "down_proj"))),
        (f"{TRL} --use_peft", ("lora", 16, 32.0, QV)),
        (f"{TRL} --use_peft --lora_r 4 --lora_alpha 8 --lora_target_modules all-linear", ("lora", 4, 8.0, ALL)),
        (f"{TRL} --lora_r 4", (None, 8, 32.0, ALL)),
        (f"{VERL} {MODEL}.lora_rank=32", ("lora", 32, 16.0, ALL)),
        (f"{VERL} {MODEL}.lora_rank=32 {MODEL}.lora_alpha=64 {MODEL}.target_modules=[q_proj,v_proj]",
         ("lora", 32, 64.0, QV)),
        (f"{VERL} {MODEL}.lora_rank=0", (None, 8, 32.0, ALL)),
        (f"{VERL} {ON_MEGATRON} {MODEL}.lora.rank=16", ("lora", 16, 32.0, ALL)),
        (f"{VERL} {ON_MEGATRON} {MODEL}.lora.rank=16 {MODEL}.lora.target_modules=[linear_qkv]",
         ("lora", 16, 32.0, ("q_proj", "k_proj", "v_proj"))),
        (f"{VERL} {ON_MEGATRON} {MODEL}.lora_rank=16", (None, 8, 32.0, ALL)),
        (HEAD + TRAINED.format(""), (None, 8, 32.0, ALL)),
        (f"{HEAD}{TRAINED.format(', peft_config=LoraConfig(r=4)')}", ("lora", 4, 8.0, QV)),
        (f"{HEAD}c = LoraConfig(r=4, lora_alpha=5, target_modules=['q_proj', 'v_proj'])\n"
         f"{TRAINED.format(', peft_config=c')}", ("lora", 4, 5.0, QV)),
        (f"{HEAD}m = get_peft_model(base, LoraConfig(target_modules='all-linear'))\n{TRAINED.format('')}",
         ("lora", 8, 8.0, ALL)),
        (UNSLOTH.format("", "", ""), ("lora", 16, 16.0, ALL)),
        (UNSLOTH.format("", ", r=64, lora_alpha=32, target_modules=['q_proj', 'v_proj']", ""), ("lora", 64, 32.0, QV)),
    ],
)  # fmt: skip
def test_adapters_are_carried_over(text: str, expected: tuple[object, ...]) -> None:
    found = given(text)
    assert adapter(found) == (*expected[:2], pytest.approx(expected[2]), expected[3])
    assert not any("chosen for adapters" in line for line in found.assumed)


@pytest.mark.parametrize("named", ["all-linear all-embedding", "all-linear embed_tokens"])
def test_the_embedding_has_an_adapter_where_it_is_named(named: str) -> None:
    assert given(f"{HF} --target_modules {named}").config.adapter.targets == ("all-linear", "embed_tokens")
    assert given(f"{HF} --target_modules all-linear").config.adapter.targets == ("all-linear",)


def test_verl_begins_with_a_folder_whatever_rank_it_is_given() -> None:
    """Its engines need a rank, so both together is the usual way."""
    found = given(f"{VERL} {MODEL}.lora_rank=8 {MODEL}.lora_adapter_path=/adapters")
    assert (found.config.adapter.rank, found.config.adapter.path) == (8, "/adapters")
    assert any("takes rank, scale and layers from the folder" in line for line in found.assumed)
    assert given(f"{VERL} {MODEL}.lora_rank=8").config.adapter.path is None
    alone = given(f"{VERL} {MODEL}.lora_rank=0 {MODEL}.lora_adapter_path=/adapters")
    assert alone.config.adapter.path == "/adapters"
    assert any("adapter.rank, alpha and targets say so" in line for line in alone.assumed)


@pytest.mark.parametrize("start", ['"pissa"', '"olora"', '"eva"', "False", "INIT"])
def test_another_start_of_peft_is_told(start: str) -> None:
    found = given(f"{HEAD}{TRAINED.format(f', peft_config=LoraConfig(r=4, init_lora_weights={start})')}")
    assert any(line.startswith("init_lora_weights=") for line in found.assumed)


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}{TRAINED.format(', peft_config=LoraConfig(r=4, init_lora_weights=True)')}",
        f"{HEAD}{TRAINED.format(', peft_config=LoraConfig(r=4, init_lora_weights=`gaussian`)').replace('`', chr(34))}",
        f"{HF} --init_weights true",
        f"{HF} --init_weights orthogonal",
    ],
)
def test_a_start_as_here_is_no_warning_and_not_without_counterpart(text: str) -> None:
    found = given(text)
    (argument,) = (argument for argument in found.left if argument.name in ("init_weights", "init_lora_weights"))
    assert argument.why == "A is drawn and B is 0 here, too"
    assert not any("init_" in line for line in found.assumed)


def test_layers_of_which_one_is_not_known_are_the_default_and_open() -> None:
    found = given(f"{TRL} --use_peft --lora_target_modules $(t) v_proj")
    assert found.config.adapter.targets == ("q_proj", "v_proj") and any("$(t) v_proj" in line for line in found.open)


def test_the_scale_by_the_root_of_the_rank_becomes_one_by_the_rank() -> None:
    found = given(f"{TRL} --use_peft --use_rslora --lora_r 9 --lora_alpha 12").config.adapter
    assert found.alpha / found.rank == pytest.approx(12 / math.sqrt(9))


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        (f"{HF} --lora_dropout 0.1", "lora_dropout", "no dropout here"),
        (f"{HF} --init_weights pissa", "init_weights", "takes a part of the base into the adapters"),
        (f"{HF} --modules_to_save lm_head", "modules_to_save", "it changes what is trained"),
        (f"{HF} --target_regex x.*", "target_regex", "it changes what is trained"),
        (f"{HF} --target_modules q_proj lm_head", "target_modules", "lm_head cannot have an adapter here"),
        (f"{HF} --target_modules self_attn.q_proj layers.0.v_proj", "target_modules", "layers.0.v_proj cannot have"),
        (f"{HF} --target_modules model.*proj", "target_modules", "all linear layers get one (all-linear) unless"),
        (f"{HF} --tuner_type full --lora_rank 4", "lora_rank", "read with adapters only"),
        (f"{HF} --tuner_type adalora", "tuner_type", "all weights are trained here"),
        (f"{VERL} {ON_MEGATRON} {MODEL}.lora_rank=16", f"{MODEL}.lora_rank", "does not read it with this model_engine"),
        (f"{TRL} --use_peft --load_in_4bit", "load_in_4bit", "never quantized"),
        (f"{HEAD}{TRAINED.format(', peft_config=LoraConfig(bias=3)')}", "LoraConfig bias=3", "no counterpart"),
        (f"{HEAD}{TRAINED.format(', peft_config=LoraConfig(**more)')}", "LoraConfig **more", "any argument"),
        (f"{HEAD}m = PeftModel.from_pretrained(base, 'a/b')\n{TRAINED.format('')}",
         "PeftModel.from_pretrained(base, 'a/b')", "as a whole here, unless adapter.type is lora"),
        (f"{HEAD}m = PeftModel.from_pretrained(base, 'a/b')\nm = m.merge_and_unload()\n{TRAINED.format('')}",
         "PeftModel.from_pretrained(base, 'a/b')", "model.path has to be a folder of the merged model"),
        (f"{HEAD}m = PeftModel.from_pretrained(base, 'a/b')\n{TRAINED.format(', peft_config=LoraConfig(r=4)')}",
         "PeftModel.from_pretrained(base, 'a/b')", "adapter.path is a folder with those that they begin with"),
        (f"{HEAD}{TRAINED.format('')}PeftModel.from_pretrained(base, 'a/b').merge_and_unload()\n",
         "PeftModel.from_pretrained(base, 'a/b')", "it is loaded after the trainer is made"),
        (UNSLOTH.format("", ", random_state=7", ""), "get_peft_model random_state=7", "no counterpart"),
        (UNSLOTH.format("", "", ""), "FastLanguageModel.from_pretrained load_in_4bit=True (its default)", "quantized"),
        (UNSLOTH.format(", load_in_4bit=True", "", ""), "load_in_4bit", "quantized"),
    ],
)  # fmt: skip
def test_what_adapters_do_not_have_here_is_told(text: str, name: str, why: str) -> None:
    assert why in {item.name: item.why for item in given(text).left}[name]


@pytest.mark.parametrize("run", [f"{TRL} --use_peft --lora_target_modules", f"{HF} --target_modules"])
def test_a_comma_is_part_of_the_name_of_a_layer(run: str) -> None:
    found = given(f'{run} "q_proj", "k_proj", "v_proj"')
    assert found.config.adapter.targets == ("v_proj",)
    assert any('no layer is called "q_proj," and "k_proj,", with its comma' in line for line in found.assumed)
    assert any("a comma is part of a name there" in item.why for item in found.left)
    one = given(f"{run} q_proj,v_proj")
    assert one.config.adapter.targets == QV
    assert any("peft takes it for one name, which no layer has" in line for line in one.assumed)
    assert not any("no layer" in line for line in given(f"{run} q_proj v_proj").assumed)


def test_a_default_that_is_left_out_is_told() -> None:
    assert any(line.startswith("lora_dropout 0.05, the default there") for line in given(HF).differs)
    shared = given(f"{VERL} {ON_MEGATRON} {MODEL}.lora.rank=16 {MODEL}.lora.target_modules=[linear_qkv,linear_fc1]")
    assert "linear_qkv and linear_fc1: one first matrix for all of its layers there" in " ".join(shared.text.split())


def test_adapters_that_only_a_condition_makes_are_not_certain() -> None:
    text = f"{HEAD}m = base\nif lora:\n    m = get_peft_model(base, LoraConfig(r=4))\n{TRAINED.format('')}"
    found = given(text)
    assert adapter(found) == ("lora", 4, 8.0, QV) and found.open == ("peft_config=$(LoraConfig in line 6)",)
    assert any("the run is taken for one with these adapters" in line for line in found.assumed)
    assert "rank: 4\n  alpha: 8.0 # default of LoraConfig\n" in found.text
    made = "m = None\nif lora:\n    m = LoraConfig(r=4, lora_dropout=0.0)\n"
    assert adapter(given(f"{HEAD}{made}{TRAINED.format(', peft_config=m')}"))[:2] == ("lora", 4)
    fast = UNSLOTH.format("", ", r=64", "").replace("model = Fast", "if lora:\n    model = Fast")
    assert adapter(given(fast)) == ("lora", 64, 16.0, ALL)
    assert not any("lora_dropout" in line for line in (*found.differs, *given(fast).differs))
    assert adapter(given(f"{TRL} --use_peft $(which) --lora_r 4"))[:2] == ("lora", 4)
    assert adapter(given(f"{TRL} --use_peft $(which)"))[0] is None
    two = given(f"{HEAD}a = LoraConfig(r=4)\nb = LoraConfig(r=8)\n{TRAINED.format(', peft_config=a')}")
    assert "it is not told which one" in {item.name: item.why for item in two.left}["LoraConfig (lines 4, 5)"]


def test_a_run_with_the_adapters_of_a_folder_is_open() -> None:
    found = given(f"{HEAD}m = PeftModel.from_pretrained(base, 'a/b')\n{TRAINED.format('')}")
    assert adapter(found)[0] is None and found.open == ("peft_config=$(PeftModel.from_pretrained in line 4)",)
    assert any(line.startswith("peft_config=$(PeftModel") for line in found.assumed)
    merged = f"{HEAD}m = PeftModel.from_pretrained(base, 'a/b').merge_and_unload()\n{TRAINED.format('')}"
    assert not given(merged).open


def test_unsloths_own_defaults_count_where_it_is_imported() -> None:
    found = given(UNSLOTH.format("", "", ""))
    ours = found.config
    assert (ours.algorithm.kl_beta, ours.optimizer.lr, ours.optimizer.weight_decay) == (0.001, 5e-5, 0.001)
    assert ours.batch.global_batch_size == 8 and ours.model.path == "q/q" and ours.run.seed == 3407
    assert "replaces TRL's GRPOTrainer" in {item.name: item.why for item in found.left}["import unsloth"]
    own = given(UNSLOTH.format("", "", ", beta=0.3, learning_rate=1e-6")).config
    assert (own.algorithm.kl_beta, own.optimizer.lr) == (0.3, 1e-6)
    assert set(TARGETS) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
