"""The sizes of every decoder family of transformers are read from its config.json, whatever it calls them (20 s).

Catches names that are not known: GPT-2's n_embd, n_head and n_layer were not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo_hpc.config.loader import from_dict
from gspo_hpc.models import architecture, parts

# Families whose default config has no decoder with attention of its own, with the reason.
OTHERS = {
    **dict.fromkeys(("falcon_mamba", "mamba", "rwkv"), "no attention, so no heads"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "no sizes by default: those of another model"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "no default: made of other models"),
    "blt": "four transformers over bytes, with a config each",
}
ALIKE = {  # of usual names, those of the values that transformers gives under them
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
SEVERAL = ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart")
ENCODERS = (*SEVERAL, "prophetnet", "whisper")  # whose usual names mean the encoder


def found(folder: Path, raw: object) -> architecture.Architecture | None:
    (folder / "config.json").write_text(json.dumps(raw, default=str))
    return architecture.find(from_dict({"model": {"path": str(folder)}}))


@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - OTHERS))
def test_sizes_of_every_family_are_read(family: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[family]()
    arch = found(tmp_path, config.to_dict())
    assert arch is not None
    text = config.get_text_config(decoder=True)
    for name, ours in ALIKE.items() if family not in ENCODERS else ():
        if isinstance(theirs := getattr(text, name, None), int):
            assert getattr(arch, ours) == theirs, name


def test_every_name_of_a_size_that_a_decoder_maps_is_known() -> None:
    """Compare the names in the table: `attribute_map` of a new version of transformers may have more."""
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - OTHERS - {*ENCODERS}:
        mapped = getattr(CONFIG_MAPPING[family], "attribute_map", {})
        for usual in parts._NAMES.keys() & mapped.keys():
            raw = {mapped[usual]: 7}
            taken = parts.usual(raw).get(usual)
            # Parts of heads, and of experts, are read apart.
            special = {"qk_rope_head_dim", "moe_intermediate_size", "num_local_experts", "n_routed_experts"}
            assert taken == 7 or mapped[usual] in special, (family, usual, mapped[usual])


def test_the_sizes_of_gpt2_xl(tmp_path: Path) -> None:
    raw = {"n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257, "n_positions": 1024}
    arch = found(tmp_path, raw)
    assert arch is not None and (arch.num_layers, arch.hidden_size, arch.num_attention_heads) == (48, 1600, 25)
    assert arch.ffn_hidden_size == 6400 and arch.max_position_embeddings == 1024 and arch.head_dim == 64
