"""Folders of adapters in the format of peft: what is written is read, and adapters that compute something else are not.

It takes a second, and catches a run that begins with adapters of another scale or on other layers than it says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gspo_hpc.config.schema import Adapter
from gspo_hpc.models import peft_config
from gspo_hpc.ops import peft_folder

LAYER = "model.layers.0.self_attn"
SHAPES = {f"{LAYER}.q_proj.lora_A": (4, 8), f"{LAYER}.q_proj.lora_B": (6, 4)}


def adapter(path: Path | None = None, **settings: Any) -> Adapter:
    """The section of a config."""
    given = {"rank": 4, "alpha": 8.0, "targets": ("q_proj",), **settings}
    return Adapter(type="lora", path=None if path is None else str(path), **given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that a run has written."""
    drawn = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}
    peft_folder.write(tmp_path / "made", adapter(), "base", drawn)
    return tmp_path / "made"


def test_what_is_written_is_read(folder: Path) -> None:
    found = peft_folder.read(adapter(folder), SHAPES, "base")
    drawn = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}
    assert found.keys() == drawn.keys() and all(torch.equal(found[name], drawn[name]) for name in drawn)


def test_names_of_mixtral_are_its_own(tmp_path: Path) -> None:
    names = [f"model.layers.0.block_sparse_moe.experts.1.{one}" for one in ("w1", "w2", "w3")]
    matrices = {f"{name}.lora_{which}": torch.ones(4, 4) for name in names for which in "AB"}
    peft_folder.write(tmp_path / "made", adapter(targets=("all-linear",)), "base", matrices)
    content = json.loads((tmp_path / "made" / peft_config.CONFIG).read_text("utf-8"))
    assert content["target_modules"] == ["w1", "w2", "w3"]
    assert peft_folder.settings(tmp_path / "made").targets == ("gate_proj", "up_proj", "down_proj")


EMBEDDING = "model.embed_tokens"
OF_EMBEDDING = {f"{EMBEDDING}.lora_A": (4, 16), f"{EMBEDDING}.lora_B": (12, 4)}


def embedded(path: Path | None = None) -> Adapter:
    """The section of a run with an adapter on the embedding."""
    return adapter(path, targets=("q_proj", "embed_tokens"))


def test_peft_reads_an_adapter_of_the_embedding_and_its_own_folder_is_read(tmp_path: Path) -> None:
    """Beside it peft saves copies of the model's embedding and head: others than those of `model.path` are refused."""
    sizes = {"vocab_size": 16, "hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=3, num_key_value_heads=3, head_dim=2)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    shapes = OF_EMBEDDING | SHAPES | {f"{LAYER}.q_proj.lora_A": (4, 12)}
    drawn = {name: torch.randn(shape) for name, shape in shapes.items()}
    peft_folder.write(tmp_path / "ours", embedded(), str(tmp_path / "base"), drawn)
    tokens = torch.arange(16)[None]
    plain = model(tokens).logits
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "ours")
    weights = {key: weight for key, weight in theirs.named_parameters() if "lora_embedding" in key}
    assert len(weights) == 2 and not torch.allclose(theirs(tokens).logits, plain)
    theirs.save_pretrained(tmp_path / "theirs")
    found = peft_folder.read(embedded(tmp_path / "theirs"), shapes, tmp_path / "base")
    assert found.keys() == drawn.keys() and all(torch.equal(found[name], drawn[name]) for name in drawn)
    assert peft_folder.settings(tmp_path / "theirs").targets == ("q_proj", "embed_tokens")
    other = transformers.LlamaForCausalLM(config)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"has a .* of its own, other than that of model\.path"):
        peft_folder.read(embedded(tmp_path / "theirs"), shapes, tmp_path / "other")


def test_other_layers_are_refused_with_the_targets_that_fit(folder: Path) -> None:
    others = {name.replace("q_proj", "v_proj"): shape for name, shape in SHAPES.items()}
    with pytest.raises(ValueError, match=r"give adapter\.targets=\[q_proj\]"):
        peft_folder.read(adapter(folder, targets=("v_proj",)), others, "base")
    with pytest.raises(ValueError, match=r"lora_B is \(6, 4\), but the model needs \(12, 4\)"):
        peft_folder.read(adapter(folder), SHAPES | {f"{LAYER}.q_proj.lora_B": (12, 4)}, "base")


@pytest.mark.parametrize(
    ("changed", "settings", "words"),
    [
        ({"r": 16}, {}, "give adapter.rank=16"),
        ({"lora_alpha": 32}, {}, "give adapter.alpha=32"),
        ({"use_rslora": True}, {}, "give adapter.alpha=16"),  # 8 / sqrt(4) is 16 / 4
        ({"use_dora": True}, {}, "use_dora True"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, {}, "target_parameters"),
        *(
            ({"init_lora_weights": name}, {}, f"init_lora_weights {name}")
            for name in ("pissa_niter_4", "olora", "loftq")
        ),
        ({"alora_invocation_tokens": [1, 2]}, {}, "alora_invocation_tokens"),
        ({"use_qalora": True}, {}, "use_qalora True"),
        ({"something_of_next_year": {"scale": 2}}, {}, "something_of_next_year"),
        ({"peft_type": "LOHA"}, {}, "type LOHA"),
        ({"r": None}, {}, "cannot be read"),
        ({"r": 0}, {}, "has rank 0"),
    ],
)
def test_what_computes_something_else_is_refused(
    changed: dict[str, Any], settings: dict[str, Any], words: str, folder: Path
) -> None:
    file = folder / peft_config.CONFIG
    assert peft_config.obstacle(adapter(folder)) is None
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    found = peft_config.obstacle(adapter(folder, **settings))
    assert found is not None and words in found and "\n" not in found


@pytest.mark.parametrize("first", [True, False, "gaussian", "orthogonal"])
def test_what_peft_writes_of_plain_adapters_is_taken(first: bool | str, folder: Path) -> None:
    file = folder / peft_config.CONFIG
    made = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=first).to_dict()
    file.write_text(json.dumps(made | {"target_modules": ["q_proj"], "peft_type": "LORA"}))
    assert peft_config.obstacle(adapter(folder)) is None


@pytest.mark.parametrize("tied", [False, True])
def test_copies_beside_adapters_of_other_layers_have_to_be_the_base_s_own(tied: bool, tmp_path: Path) -> None:
    """So peft saves them where the vocabulary was resized, or where it is told to."""
    drawn = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    peft_folder.write(tmp_path / "made", adapter(), "base", drawn)
    own = {"model.embed_tokens.weight": torch.randn(16, 12)}
    own |= {} if tied else {"lm_head.weight": torch.randn(16, 12)}
    (tmp_path / "base").mkdir()
    save_file(own, tmp_path / "base" / "model.safetensors")
    copies = own | {"lm_head.weight": own.get("lm_head.weight", own["model.embed_tokens.weight"]).clone()}
    file, found = tmp_path / "made" / peft_config.WEIGHTS, None
    matrices = load_file(file)
    save_file(matrices | {f"base_model.model.{name}": copy for name, copy in copies.items()}, file)
    found = peft_folder.read(adapter(tmp_path / "made"), SHAPES, tmp_path / "base")
    assert found.keys() == SHAPES.keys()
    for name in copies:
        changed = copies | {name: copies[name] + 1}
        save_file(matrices | {f"base_model.model.{one}": copy for one, copy in changed.items()}, file)
        with pytest.raises(ValueError, match=f"has a {name} of its own, other than that of model.path"):
            peft_folder.read(adapter(tmp_path / "made"), SHAPES, tmp_path / "base")


def test_layers_are_named_as_the_config_has_them(tmp_path: Path) -> None:
    """Mixtral's w1 is gate_proj there; and a vector of DoRA is no matrix of other layers."""
    names = [f"model.layers.0.block_sparse_moe.experts.1.{one}" for one in ("w1", "w3")]
    shapes = {f"{name}.lora_{which}": (4, 4) for name in names for which in "AB"}
    peft_folder.write(tmp_path / "made", adapter(), "base", {name: torch.ones(4, 4) for name in shapes})
    with pytest.raises(ValueError, match=r"give adapter\.targets=\[gate_proj,up_proj\]"):
        peft_folder.read(adapter(tmp_path / "made"), SHAPES, "base")
    few = {name: shape for name, shape in shapes.items() if "w1" in name}
    same = adapter(tmp_path / "made", targets=("gate_proj", "up_proj"))
    with pytest.raises(ValueError, match="the model's are on others of its layers"):
        peft_folder.read(same, few, "base")
    vector = {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(4)}
    save_file(vector, tmp_path / "made" / peft_config.WEIGHTS)
    with pytest.raises(ValueError, match="lora_magnitude_vector, which is no matrix of plain LoRA"):
        peft_folder.read(adapter(tmp_path / "made"), SHAPES, "base")


def test_a_checkpoint_is_made_in_the_dtype_of_the_matrices(folder: Path) -> None:
    assert peft_folder.dtype_of(folder) == "float32"
    halves = {name: one.half() for name, one in load_file(folder / peft_config.WEIGHTS).items()}
    save_file(halves, folder / peft_config.WEIGHTS)
    assert peft_folder.dtype_of(folder) == "float16"


def test_a_folder_without_matrices_is_refused(tmp_path: Path) -> None:
    assert "has no adapter_config.json" in str(peft_config.obstacle(adapter(tmp_path)))
    assert peft_config.obstacle(adapter()) is None
