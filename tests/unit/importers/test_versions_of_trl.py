"""Defaults of TRL before and after 1.9: taken where the script shows the version, and told where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

TRL = "accelerate launch --num_processes 4 grpo.py --num_generations 4 --per_device_train_batch_size 4"
PYTHON = "from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig(num_generations=4{})\n"
PYTHON += "GRPOTrainer('m/m', [f], args, ds).train()\n"
LATER = "later ones have max_completion_length 512 (since 1.10)"


def told(run: str) -> list[str]:
    return [line for line in convert(run).assumed if line.startswith("defaults are those of ")]


def test_defaults_of_other_versions_are_told_where_they_may_count() -> None:
    own = (
        "defaults are those of TRL 1.9; earlier versions had gradient_accumulation_steps 8 (0.14); beta 0.04 (up to "
        "0.18); loss_type a mean over sequences (up to 0.15), bnpo (0.16 to 0.21); temperature 0.9 (up to 0.17); "
        "top_k 50 ({}0.17); max_prompt_length 512, with longer prompts cut from the left (up to 0.25); bf16 false, "
        "unless mixed_precision of accelerate is bf16 (up to 0.18)"
    )
    assert told(TRL) == [f"{own.format('up to ')}; {LATER}"]
    assert told(f"{TRL} --use_vllm") == [
        f"{own.format('0.16 to ')}; vllm_mode an engine on a GPU of its own (up to 0.15), server (0.16 to 0.29); "
        "vllm_gpu_memory_utilization 0.9 (up to 0.17); vllm_importance_sampling_correction none (up to 0.22), weights "
        f"of tokens of at most 2 (0.23 to 0.25); {LATER}"
    ]
    given = "--beta 0.1 --loss_type grpo --temperature 1 --top_k 0 --bf16"
    cut = "max_prompt_length 512, with longer prompts cut from the left (up to 0.25)"
    assert told(f"{TRL} {given}") == [f"defaults are those of TRL 1.9; earlier versions had {cut}; {LATER}"]
    assert not told(f"{TRL} {given} --max_completion_length 64 --max_prompt_length 64")
    assert not told(f"{TRL} {given} --max_prompt_length 64")  # which no version after 0.27 has


def test_trl_0_14_counted_prompts_in_the_batch_of_a_device() -> None:
    line = "per_device_train_batch_size=4: TRL 0.14 counts prompts in it"
    assert any(text.startswith(line) for text in convert(TRL).assumed)
    without = TRL.removesuffix(" --per_device_train_batch_size 4")
    assert "per_device_train_batch_size 1 prompt with all its completions (0.14)" in told(without)[0]
    for sign in ("--num_iterations 1", "--loss_type grpo", "--vllm_mode colocate"):  # of later versions
        assert not any(text.startswith(line) for text in convert(f"{TRL} {sign}").assumed)
        assert "(0.14)" not in told(f"{TRL} {sign}")[0]
    pinned = convert(f"pip install trl==0.14.0\n{TRL}").config.batch
    assert (pinned.micro_batch_size, pinned.global_batch_size) == (16, 4 * 16 * 8)
    default = convert(f"pip install 'trl[vllm]==0.14'\n{without} --gradient_accumulation_steps 2").config.batch
    assert (default.micro_batch_size, default.global_batch_size) == (4, 4 * 4 * 2)


@pytest.mark.parametrize(
    ("pin", "beta", "temperature", "dtype"),
    [
        ("pip install trl==0.14.0", 0.04, 0.9, "float32"),
        ("# requirements: trl>=0.16,<0.18", 0.04, 0.9, "float32"),
        ("# TRL ~= 0.18.1", 0.04, 1.0, "float32"),
        ("pip install git+https://github.com/huggingface/trl.git@v0.18-release", 0.04, 1.0, "float32"),
        ("pip install trl==0.19.0", 0.0, 1.0, "bfloat16"),
        ("pip install 'trl>=0.14'", 0.0, 1.0, "bfloat16"),
        ("pip install not-trl==0.14", 0.0, 1.0, "bfloat16"),
        ("pip install trl==0.14.0 trl==0.19.0", 0.0, 1.0, "bfloat16"),  # what excludes itself shows nothing
    ],
)
def test_a_version_that_the_script_names_decides(pin: str, beta: float, temperature: float, dtype: str) -> None:
    found = convert(f"{pin}\n{TRL}")
    ours = found.config
    assert (ours.algorithm.kl_beta, ours.rollout.temperature, ours.model.dtype) == (beta, temperature, dtype)
    assert any("defaults of that version are taken: " in line for line in found.assumed) or "float32" != dtype
    assert not {"beta", "bf16"} & {item.name for part in (found.carried, found.left) for item in part}


def test_an_argument_that_only_earlier_versions_have_decides() -> None:
    found = convert(PYTHON.format(", use_vllm=True, vllm_device='cuda:1'"), gpus=1)
    assert found.config.algorithm.kl_beta == 0.04
    assert any(line.startswith("vllm_device is an argument of TRL up to 0.17: ") for line in found.assumed)
    assert convert(PYTHON.format(", vllm_device=None"), gpus=1).config.algorithm.kl_beta == 0.0


def test_vllm_ran_as_a_server_by_default_from_0_16_to_0_29() -> None:
    assert convert(f"pip install trl==0.24.0\n{TRL} --use_vllm").config.rollout.mode == "server"
    assert convert(f"pip install trl==1.0.0\n{TRL} --use_vllm").config.rollout.mode == "colocate"


@pytest.mark.parametrize("more", ["--bf16", "--torch_dtype bfloat16", "--fp16", "--generation_kwargs {}"])
def test_bf16_is_told_only_where_it_is_open(more: str) -> None:
    assert "bf16 false" in told(TRL)[0]
    assert "bf16 false" not in told(f"{TRL} {more}".replace("{}", "{x:1}"))[0]
    assert "bf16 false" not in told(TRL.replace("launch", "launch --mixed_precision bf16"))[0]
    pinned = convert(f"pip install trl==0.18.0\n{TRL} {more}".replace("{}", "1"))
    assert pinned.config.model.dtype != "float32" or "generation" in more


def test_completions_have_512_tokens_since_1_10() -> None:
    assert convert(f"pip install 'trl>=1.9'\n{TRL}").config.rollout.max_response_length == 256
    for pin in ("trl==1.10.0", "'trl>=1.10'"):
        assert convert(f"pip install {pin}\n{TRL}").config.rollout.max_response_length == 512
    assert LATER not in told(f"pip install trl==1.9.0\n{TRL} --loss_type grpo")


def test_requirements_beside_a_script_show_the_version(tmp_path: Path) -> None:
    (folder := tmp_path / "scripts").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "requirements.txt").write_text("torch\n# trl==0.14.0 was slow\ntrl==0.15.2\n")
    (tmp_path / "requirements-dev.txt").write_bytes(b"\xff\xfe trl==0.20.0")
    found = convert(TRL, folder=folder, name="run.sh")
    assert found.config.algorithm.kl_beta == 0.04
    assert any(line.startswith("trl==0.15.2 in requirements.txt: defaults of that") for line in found.assumed)
    (folder / "pyproject.toml").write_text('dependencies = ["trl[vllm]>=1.9,<1.10"]\n')  # nearer
    assert convert(TRL, folder=folder, name="run.sh").config.algorithm.kl_beta == 0.0
    # what the script itself installs counts, and a text from standard input lies nowhere
    assert convert(f"pip install trl==0.19.0\n{TRL}", folder=tmp_path, name="run.sh").config.algorithm.kl_beta == 0.0
    assert convert(TRL, folder=tmp_path).config.algorithm.kl_beta == 0.0


def test_a_pin_of_one_version_wins_over_arguments_that_others_have() -> None:
    """A YAML with vllm_device (up to 0.17) beside vllm_mode (since 0.18) made a pin count no more."""
    words = "--use_vllm --vllm_mode colocate --vllm_device auto"
    found = convert(f"pip install trl==0.21.0\n{TRL} {words}")
    assert found.config.algorithm.correction == "none"
    assert any(line.startswith("trl==0.21.0: defaults of that version are taken") for line in found.assumed)


def test_a_file_above_the_script_is_found_in_an_archive_of_a_repository(tmp_path: Path) -> None:
    for folder in ("scripts", "configs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs" / "a.yaml").write_text("num_generations: 4\nbeta: 0.3\nper_device_train_batch_size: 4\n")
    run = "accelerate launch --num_processes 4 grpo.py --config configs/a.yaml"
    with pytest.raises(ValueError, match="put it beside the script"):
        convert(run, folder=tmp_path / "scripts", name="run.sh")
    (tmp_path / "LICENSE").write_text("MIT")
    assert convert(run, folder=tmp_path / "scripts", name="run.sh").config.algorithm.kl_beta == 0.3


def test_the_latest_of_several_defaults_is_taken_where_that_of_1_9_cannot_be() -> None:
    found = convert(f"{TRL} --use_vllm --vllm_device auto")  # up to 0.17, of which none has dapo
    assert found.config.algorithm.aggregation == "token" and found.config.rollout.mode == "server"
    assert any("loss_type bnpo, and before it a mean over sequences (up to 0.15)" in line for line in found.assumed)
    assert not any("earlier versions had loss_type" in line for line in found.assumed)


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config
import own
{0}
args = GRPOConfig(num_generations=8, per_device_train_batch_size=8{1})
GRPOTrainer(model="m/m", args=args, reward_funcs=[f], train_dataset=d, peft_config={2}).train()
"""


def test_adapters_that_another_module_makes_are_not_known() -> None:
    """They became adapters of rank 16, said to be TRL's default, in no list."""
    found = convert(SCRIPT.format("", "", "own.PEFT"))
    ours = found.config.adapter
    assert (ours.type, ours.rank, ours.targets) == ("lora", 8, ("all-linear",))
    assert "peft_config=$(own.PEFT)" in found.open
    assert any("the run is taken for one with adapters, with the defaults here" in line for line in found.assumed)
    assert not any("lora_dropout" in line for line in found.differs)
    assert "use_peft" not in found.values
    assert convert(SCRIPT.format("P = None", "", "P")).config.adapter.type is None


def test_adapters_of_a_model_config_are_read() -> None:
    made = "mc = ModelConfig(model_name_or_path='m/m', use_peft={}, lora_r=64, lora_alpha=48, load_in_4bit=True)"
    found = convert(SCRIPT.format(made.format("True"), "", "get_peft_config(mc)"))
    assert (found.config.adapter.type, found.config.adapter.rank, found.config.adapter.alpha) == ("lora", 64, 48)
    assert "weights are never quantized here" in {item.name: item.why for item in found.left}["load_in_4bit"]
    assert adapters_of(f"{made.format('True')}\np = get_peft_config(mc)", "p") == ("lora", 64)
    assert adapters_of(f"{made.format('True')}\np = get_peft_config(mc) if mc.use_peft else None", "p") == ("lora", 64)
    assert adapters_of(f"{made.format('True')}\nmc.lora_r = 4", "get_peft_config(mc)") == ("lora", 16)  # not known
    assert adapters_of(made.format("False"), "get_peft_config(mc)") == adapters_of(made.format("True"), "None")
    assert adapters_of(made.format("own.x"), "get_peft_config(mc)") == ("lora", 64)
    two = f"{made.format('True')}\nother = ModelConfig(lora_r=2)"
    assert adapters_of(two, "get_peft_config(mc)") == ("lora", 8)
    found = convert(SCRIPT.format(two, "", "get_peft_config(mc)"))
    assert "it is not told which one counts" in {item.name: item.why for item in found.left}["ModelConfig (lines 4, 5)"]


def adapters_of(lines: str, given: str) -> tuple[str | None, int]:
    """The type and the rank of the adapters of a file with these lines, whose trainer is given these adapters."""
    ours = convert(SCRIPT.format(lines, "", given)).config.adapter
    return ours.type, ours.rank


def test_the_command_says_which_adapters_a_parsed_model_config_has(tmp_path: Path) -> None:
    """By a name in between, those of the command were not read."""
    for given in ("get_peft_config(model_args)", "p", "p if model_args.use_peft else None"):
        (tmp_path / "grpo.py").write_text(PARSED.format(given))
        found = convert(f"{TRL} --use_peft --lora_r 64", folder=tmp_path, name="run.sh")
        assert (found.config.adapter.type, found.config.adapter.rank, found.open) == ("lora", 64, ())
        assert convert(TRL, folder=tmp_path, name="run.sh").config.adapter.type is None


PARSED = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
p = get_peft_config(model_args)
GRPOTrainer(model="m/m", args=training_args, reward_funcs=[f], train_dataset=d, peft_config={}).train()
"""


def test_what_is_not_known_is_not_called_absent() -> None:
    more = ", eval_strategy='steps', eval_steps=own.steps, max_prompt_length=own.longest"
    found = convert(SCRIPT.format("", more, "None"))
    why = {item.name: item.why for item in found.left}
    assert "known only when the script runs" in why["eval_steps"]
    assert found.config.data.overlong == "truncate_left"
    assert any(line.startswith("max_prompt_length is not known: ") for line in found.assumed)
    found = convert(SCRIPT.format("", ", max_prompt_length=None", "None"))
    assert any(line.startswith("max_prompt_length is None: ") for line in found.assumed)


@pytest.mark.parametrize(("version", "noted"), [("0.14.0", True), ("0.15.2", True), ("0.16.0", False)])
def test_log_probs_at_temperature_1_are_those_of_versions_up_to_0_15(version: str, noted: bool) -> None:
    found = convert(f"pip install trl=={version}\n{TRL} --temperature 0.7")
    assert any("computes log-probs at temperature 1" in text for text in found.differs) is noted
    assert not any(
        "temperature 1" in text for text in convert(f"pip install trl=={version}\n{TRL} --temperature 1").differs
    )
