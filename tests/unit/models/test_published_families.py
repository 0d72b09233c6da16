"""Families that are counted from a local config.json, against what their makers publish (1 s).

Each config has the keys of the file on the Hub that say a size; many of them do not say tie_word_embeddings. Catches
MLPs that are counted with a gate that they have not, and a tied head that is counted twice.
"""

from __future__ import annotations

from typing import Any

import pytest

from gspo_hpc.models.architecture import counted
from gspo_hpc.models.parts import usual
from gspo_hpc.planning.estimates import parameters


def gpt2(layers: int, hidden: int, heads: int, vocabulary: int, positions: int, **more: Any) -> dict[str, Any]:
    return {
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": positions,
        **more,
    }


def plain(layers: int, hidden: int, heads: int, inner: int | None, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocabulary}
    return sizes | ({} if inner is None else {"intermediate_size": inner}) | more


PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {  # millions
    "gpt2": (124.4, gpt2(12, 768, 12, 50257, 1024, model_type="gpt2")),
    "gpt2-xl": (1557.6, gpt2(48, 1600, 25, 50257, 1024, model_type="gpt2")),
    "gpt-j-6b": (6050.9, gpt2(28, 4096, 16, 50400, 2048, model_type="gptj", tie_word_embeddings=False)),
    "codegen-2B": (2779.7, gpt2(32, 2560, 32, 51200, 2048, model_type="codegen", tie_word_embeddings=False)),
    "starcoder": (15517.5, gpt2(40, 6144, 48, 49152, 8192, model_type="gpt_bigcode", multi_query=True)),
    "bloom-7b1": (
        7069.0,
        {"n_layer": 30, "hidden_size": 4096, "n_head": 32, "vocab_size": 250880, "model_type": "bloom"},
    ),
    "bloom-560m": (
        559.2,
        {"n_layer": 24, "n_embed": 1024, "num_attention_heads": 16, "vocab_size": 250880, "model_type": "bloom"},
    ),
    "Hunyuan-A13B": (  # most sizes are lists
        80393.2,
        {
            **{"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 3072, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "attention_head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32},
            **{"moe_intermediate_size": [3072] * 32, "num_shared_expert": [1] * 32, "vocab_size": 128167},
            **{"tie_word_embeddings": True, "model_type": "hunyuan_v1_moe"},
            "architectures": ["HunYuanMoEV1ForCausalLM"],
        },
    ),
    "mpt-7b": (6649.3, {"n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432, "model_type": "mpt"}),
    "falcon-7b": (6921.7, plain(32, 4544, 71, None, 65024, model_type="falcon", multi_query=True)),
    "falcon-7b of 2023": (6921.7, plain(32, 4544, 71, None, 65024, model_type="RefinedWebModel", multi_query=True)),
    "falcon-40b": (
        41303.3,
        plain(60, 8192, 128, None, 65024, num_kv_heads=8, new_decoder_architecture=True, model_type="falcon"),
    ),
    "opt-350m": (
        331.2,
        plain(
            24,
            1024,
            16,
            None,
            50272,
            ffn_dim=4096,
            word_embed_proj_dim=512,
            max_position_embeddings=2048,
            model_type="opt",
        ),
    ),
    "opt-6.7b": (
        6658.5,
        plain(32, 4096, 32, None, 50272, ffn_dim=16384, max_position_embeddings=2048, model_type="opt"),
    ),
    "gpt-neox-20b": (20554.6, plain(44, 6144, 64, 24576, 50432, model_type="gpt_neox", tie_word_embeddings=False)),
    "pythia-6.9b": (6857.3, plain(32, 4096, 32, 16384, 50432, model_type="gpt_neox", tie_word_embeddings=False)),
    "phi-2": (2779.7, plain(32, 2560, 32, 10240, 51200, model_type="phi", tie_word_embeddings=False)),
    "starcoder2-7b": (7173.9, plain(32, 4608, 36, 18432, 49152, num_key_value_heads=4, model_type="starcoder2")),
    "gemma-7b": (8537.7, plain(28, 3072, 16, 24576, 256000, head_dim=256, model_type="gemma")),
    "nemotron-4-340b": (341000, plain(96, 18432, 96, 73728, 256000, num_key_value_heads=8, model_type="nemotron")),
    "llama-4-maverick, without the part that sees": (
        400712.2,
        plain(
            48,
            5120,
            40,
            8192,
            202048,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size_mlp=16384,
            num_local_experts=128,
            interleave_moe_layer_step=2,
            tie_word_embeddings=False,
            model_type="llama4_text",
            architectures=["Llama4ForCausalLM"],
        ),
    ),
    "dbrx": (
        131596.5,
        {
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
            "tie_word_embeddings": False,
            "model_type": "dbrx",
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    millions, raw = PUBLISHED[name]
    arch = counted(usual(raw))
    assert parameters.parameters(arch) / 1e6 == pytest.approx(millions, rel=0.01)
    assert "to within about 1 %" in arch.about


def test_layers_with_a_mixture_may_be_listed_one_by_one() -> None:
    """As MiMo-V2-Flash does; a list was no number, so that nothing was known of its sizes."""
    sizes = {"n_routed_experts": 16, "moe_intermediate_size": 512, "model_type": "mimo_v2_flash"}
    arch = counted(usual(plain(4, 1024, 8, 4096, 32000, **sizes, moe_layer_freq=[0, 1, 0, 1])))
    assert [arch.has_experts(layer) for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize("named", [{"architectures": ["GPT2LMHeadModel"]}, {"model_type": "gpt2"}])
def test_a_family_is_known_by_either_name(named: dict[str, Any]) -> None:
    arch = counted(usual(gpt2(12, 768, 12, 50257, 1024) | named))
    assert arch.mlp_matrices == 2 and arch.tie_word_embeddings and arch.first_parameters == 1024 * 768


def test_a_family_that_nobody_knows_is_said_to_be_too_high_where_it_has_less_than_llama() -> None:
    raw = plain(32, 4096, 32, 11008, 32000, architectures=["FooForCausalLM"], model_type="foo")
    arch = counted(raw)
    assert arch.mlp_matrices == 3 and not arch.tie_word_embeddings
    assert "FooForCausalLM is not known here" in arch.about and "tied" in arch.about
    assert "tied" not in counted(raw | {"tie_word_embeddings": False}).about


def test_a_head_that_is_said_not_to_be_tied_is_counted() -> None:
    raw = gpt2(12, 768, 12, 50257, 1024, model_type="gpt2")
    found = [parameters.parameters(counted(usual(raw | {"tie_word_embeddings": tied}))) for tied in (True, False)]
    assert found[1] - found[0] == 768 * 50257


def test_a_family_with_code_of_its_own_is_counted_by_its_names_of_sizes() -> None:
    """Nothing was known of GLM-4-9B's sizes, whose vocabulary is that of padded_vocab_size."""
    raw = {"num_layers": 40, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32}
    raw |= {"kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 151552}
    arch = counted(usual(raw | {"tie_word_embeddings": False, "model_type": "chatglm"}))
    assert arch.num_key_value_heads == 2
    assert parameters.parameters(arch) / 1e6 == pytest.approx(9399.9, rel=0.01)
