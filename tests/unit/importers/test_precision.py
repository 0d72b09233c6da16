"""In which precision a run of TRL computes, and weights that it quantizes, as options, YAML and Python files say it."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert

HEAD = "import torch\nfrom transformers import AutoModelForCausalLM, BitsAndBytesConfig\n"
HEAD += "from trl import GRPOConfig, GRPOTrainer\nbnb = BitsAndBytesConfig(load_in_4bit=True)\n"
RUN = "m = AutoModelForCausalLM.from_pretrained('a/b'{})\nGRPOTrainer(m, [f], GRPOConfig(beta=0.1{}), ds{}).train()\n"
TRL = "trl grpo --num_generations 8 --max_steps 9"
QUANTIZED = "weights are never quantized here"


@pytest.mark.parametrize(
    ("text", "dtype", "told"),
    [
        (f"{TRL} --bf16 false", "float32", False),
        (f"{TRL} --bf16 false --dtype bfloat16", "bfloat16", True),
        (f"{TRL} --bf16 false --dtype float32", "float32", False),
        (f"{TRL} --dtype float32", "bfloat16", False),  # the weights: bf16 is on, and what is computed is in bfloat16
        (f"{TRL} --fp16", "float16", False),
        ("num_generations: 8\nbf16: false\nmodel_init_kwargs:\n  torch_dtype: bfloat16\n", "bfloat16", True),
        (HEAD + RUN.format("", ", bf16=False", ""), "float32", False),
        (HEAD + RUN.format(", torch_dtype=torch.bfloat16", ", bf16=False", ""), "bfloat16", True),
        (HEAD + RUN.format("", ", bf16=False, model_init_kwargs={'dtype': 'float16'}", ""), "float16", True),
        (HEAD + "k = dict(dtype=torch.float16)\n" + RUN.format(", **k", ", bf16=False", ""), "float16", True),
        (HEAD + RUN.format(", torch_dtype=torch.float32", "", ""), "bfloat16", False),
    ],
)
def test_without_bf16_a_run_computes_in_the_precision_of_its_weights(text: str, dtype: str, told: bool) -> None:
    found = convert(text, gpus=1)
    assert found.config.model.dtype == dtype
    assert any("here the optimizer keeps them in float32" in line for line in found.assumed) is told


def test_a_precision_that_is_not_certain_is_in_a_list() -> None:
    texts = {", torch_dtype=pick()": "torch_dtype=pick()", ", dtype=torch.float8": "dtype=torch.float8"}
    for given, name in texts.items():
        left = {item.name: item.why for item in convert(HEAD + RUN.format(given, "", ""), gpus=1).left}
        assert "the precision is model.dtype here" in left[f"AutoModelForCausalLM.from_pretrained {name}"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (RUN.format(", quantization_config=bnb", "", ""),
         "AutoModelForCausalLM.from_pretrained quantization_config=bnb"),
        (RUN.format(", load_in_8bit=True", "", ""), "AutoModelForCausalLM.from_pretrained load_in_8bit=True"),
        (RUN.format("", "", ", quantization_config=bnb"), "quantization_config"),
        (RUN.format("", ", model_init_kwargs={'quantization_config': bnb}", ""),
         "model_init_kwargs quantization_config=bnb"),
        ("k = {'quantization_config': bnb}\n" + RUN.format(", **k", "", ""),
         "AutoModelForCausalLM.from_pretrained quantization_config=bnb"),
    ],
)  # fmt: skip
def test_weights_that_a_file_quantizes_are_told(text: str, name: str) -> None:
    assert {item.name: item.why for item in convert(HEAD + text, gpus=1).left}[name] == QUANTIZED


def test_weights_that_stay_as_they_are_are_not_told() -> None:
    for more in (", quantization_config=None", ", load_in_4bit=False"):
        assert QUANTIZED not in {item.why for item in convert(HEAD + RUN.format(more, "", ""), gpus=1).left}


FLOAT32 = "weights are in float32 there"
FAST = "from unsloth import FastLanguageModel\nfrom trl import GRPOConfig, GRPOTrainer\nimport own\n"
FAST += "m, t = FastLanguageModel.from_pretrained('a/b'{})\n"
FAST += "GRPOTrainer(m, [f], GRPOConfig(beta=0.1, bf16=True), ds).train()\n"
ACCELERATE = "accelerate launch --num_processes 2 grpo.py --num_generations 8 --max_steps 9"


@pytest.mark.parametrize(
    ("text", "told", "sure"),
    [
        (
            "num_generations: 8\nbf16: true\nper_device_train_batch_size: 8\nscale_rewards: none\nmax_steps: 9\n",
            True,
            False,
        ),
        (ACCELERATE, True, False),  # its script is not at hand
        (f"{ACCELERATE} --dtype float32", True, True),
        (TRL, True, True),
        (HEAD + RUN.format("", "", ""), True, True),
        (HEAD + RUN.format(", load_in_4bit=True", "", ""), False, True),
        (HEAD + RUN.format(", quantization_config=pick()", "", ""), False, True),
        (f"{TRL} --load_in_8bit", False, True),
        (f"{TRL} --load_in_4bit $FEW", False, True),
        (f"{TRL} --load_in_4bit false", True, True),
        (FAST.format(", load_in_4bit=own.FEW, dtype=None"), False, True),
        (FAST.format(", load_in_16bit=True"), False, True),
    ],
)
def test_weights_are_said_to_be_float32_only_where_they_may_be(text: str, told: bool, sure: bool) -> None:
    lines = [line for line in convert(text, gpus=2).differs if line.startswith(FLOAT32)]
    assert len(lines) == told
    assert all(("unless its script loads them in 16 bits" in line) is (not sure) for line in lines)
