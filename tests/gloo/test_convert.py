"""Checkpoints to Hugging Face folders and back: what is in them, and how much memory that takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from gspo_hpc.system import direct_io
from tests.gloo.layouts import MOVES, Arrays


def test_there_and_back_is_the_same_bit_for_bit(
    models: dict[str, Path], results: dict[str, Arrays], folder: Path
) -> None:
    stored, again = (
        load_file(path / "model.safetensors") for path in (models["llama-large"], folder / "converted-large/again")
    )
    assert stored.keys() == again.keys()
    assert all(np.array_equal(stored[name].numpy(), again[name].numpy()) for name in stored)
    assert json.loads((folder / "converted-large/again/config.json").read_text())["dtype"] == "float32"
    transformers.AutoModelForCausalLM.from_pretrained(folder / "converted-large/again")


def test_it_takes_the_memory_of_layers_however_many_there_are(
    models: dict[str, Path], results: dict[str, Arrays]
) -> None:
    half, whole = ((models[f"llama-{name}"] / "model.safetensors").stat().st_size for name in ("half", "large"))
    layer = (whole - half) / 8
    grown = {name: results[f"converted-{name}"]["grown"] for name in ("half", "large")}
    assert (grown["large"] - grown["half"] < layer).all(), grown
    assert max(map(np.max, grown.values())) < direct_io.BUFFER + 3 * layer, (grown, layer)
    assert results["converted-large"]["dtype"].tolist() == ["float32"]


@pytest.mark.parametrize(("name", "model"), [move[:2] for move in MOVES])
def test_a_checkpoint_of_any_layout_becomes_a_folder(
    name: str, model: str, results: dict[str, Arrays], folder: Path
) -> None:
    saved = results[f"saved-{name}-{model}"]
    written = load_file(folder / f"folder-{name}-{model}" / "model.safetensors")
    names = [key.removeprefix("saved/") for key in saved if key.startswith("saved/")]
    assert set(names) == written.keys()
    for key in names:
        assert np.array_equal(written[key].numpy(), saved[f"saved/{key}"]), key
    assert results[f"folder-{name}-{model}"]["said"].size == 0  # others' checkpoints were refused


def test_transformers_finds_tensors_by_name(results: dict[str, Arrays], folder: Path) -> None:
    with safe_open(folder / "converted-large/again/model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert opened.get_slice("model.embed_tokens.weight").get_shape() == [101, 512]
