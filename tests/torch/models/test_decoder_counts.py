"""Every decoder family of transformers is built without memory, and counted as a plan counts its config.json (15 s).

Catches a family whose MLPs have no gate, whose head is tied without its config.json saying so, or that has a mixture
under other names; and a note that says too little of a family that is not counted well. The embedding and the head
are compared apart, since a large vocabulary hides what is wrong with the layers.

The tolerance is 1 % of the layers: biases and the biases of norms are left out of most families. Those that differ
more are in decoders.APART with the difference, which is held to a point and a half.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo_hpc.models import decoders
from gspo_hpc.models.architecture import Architecture, counted
from gspo_hpc.models.parts import usual
from gspo_hpc.planning.estimates import parameters

TOLERANCE = 0.01
LAYERS = 8
# With all layers of the default: what is left out before the head would weigh more, or each layer has sizes of its own.
AS_IT_IS = {
    *("bert", "camembert", "data2vec-text", "ernie", "megatron-bert", "modernbert-decoder", "roberta"),
    *("roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
    *("gemma3n_text", "gpt_neo", "lfm2_moe", "longcat_flash"),
}
# What cannot be built from sizes alone, with the reason.
NOT_BUILT = {
    **dict.fromkeys(("falcon_mamba", "mamba", "rwkv"), "no attention: nothing is known of its sizes"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "no sizes by default: those of another model"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "made of other models"),
    **dict.fromkeys(("gemma3", "gemma4", "gemma4_unified", "gemma3n"), "its text_config is a family of its own here"),
    **dict.fromkeys(("llama4", "got_ocr2", "qwen3_5", "qwen3_5_moe"), "its text_config is a family of its own here"),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), "its default has no sizes"),
    "blt": "four transformers over bytes",
    "cohere_compass_text": "its default names no layers",
    "dbrx": "transformers 5 cannot build its default; tests/unit/models has its published count",
}
# The default of transformers lacks a size, is too small for the tolerance, or has no experts.
SIZES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_experts": 8},  # more hide what is left out of attention
    "bloom": {"hidden_size": 1024, "n_head": 16},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
# transformers makes the first matrix of experts that compute nothing, too; the published model has none (560 billion).
NOTHING_COMPUTED = {"longcat_flash": 28 * 256 * 2 * 6144 * 2048}


def built(family: str) -> tuple[PreTrainedConfig, PreTrainedModel]:
    layers = {} if family in decoders.APART or family in AS_IT_IS else {"num_hidden_layers": LAYERS}
    config = CONFIG_MAPPING[family](**layers | SIZES.get(family, {}))
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return config, model


def ours(config: PreTrainedConfig, model: PreTrainedModel, *leave_out: str) -> Architecture:
    raw = json.loads(json.dumps(config.to_dict(), default=str)) | {"architectures": [type(model).__name__]}
    return counted(usual({name: value for name, value in raw.items() if name not in leave_out}))


@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_BUILT))
def test_every_family_is_counted_as_its_note_says(family: str) -> None:
    config, model = built(family)
    arch, inputs, outputs = ours(config, model), model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is None or outputs.weight is inputs.weight
    ends = inputs.weight.numel() + (0 if tied else outputs.weight.numel())
    true = model.num_parameters() - NOTHING_COMPUTED.get(family, 0)
    found = parameters.parameters(arch)
    if family in decoders.APART:
        percent, _ = decoders.APART[family]
        assert 100 * (found / true - 1) == pytest.approx(percent, abs=1.5)
        assert f"by {abs(percent)} % with" in arch.about and ("too high" if percent > 0 else "too low") in arch.about
        return
    assert arch.tie_word_embeddings == tied == ours(config, model, "tie_word_embeddings").tie_word_embeddings
    counted_ends = arch.vocab_size * arch.hidden_size * (1 if tied else 2)
    assert counted_ends == pytest.approx(ends, rel=TOLERANCE)
    assert found - counted_ends == pytest.approx(true - ends, rel=TOLERANCE)
    assert "too" not in arch.about


def test_every_family_is_in_one_of_the_tables() -> None:
    """A new version of transformers may have more, or others."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_BUILT
    assert known <= decoders.KNOWN | {"mllama"}
    assert not decoders.CLOSE & decoders.APART.keys()
    assert decoders.KNOWN <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | {"mllama_text_model"}
    assert decoders.UNGATED | decoders.TIED | decoders.LEARNED.keys() <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
