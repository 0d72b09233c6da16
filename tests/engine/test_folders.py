"""Folders with more than what is trained: layers that predict several tokens, weights in FP8, files of other formats.

Catches a first weight sync that waits for tensors that no trainer sends, an engine that computes in FP8 with weights in
32 bits, and one that reads a pickle beside safetensors. Starts two engines, about 12 seconds each.
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gspo_hpc.config.loader import from_dict
from gspo_hpc.engine.engine import Engine, EngineSettings
from gspo_hpc.engine.transfer import checkpoint_shapes
from gspo_hpc.ops.weight_parts import stream_of
from gspo_hpc.training.bringup import engine_settings
from tests.torch.checkpoint.test_handed_over import KINDS, marks

BLOCK = 128
LAYERS = 2  # of the tiny model
NOT_TRAINED = (
    f"model.layers.{LAYERS}.eh_proj.weight",  # DeepSeek-V3, GLM-4.5
    f"model.layers.{LAYERS}.mlp.experts.0.up_proj.weight",
    "mtp.layers.0.self_attn.q_proj.weight",  # Qwen3-Next
    "model.mtp_layers.0.input_proj.weight",  # MiMo
    "model.mtp_block.0.mlp.up_proj.weight",  # Ernie
    "model.layers.0.self_attn.rotary_emb.inv_freq",
)


@pytest.fixture(scope="module")
def folder(model_path: Path, weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as DeepSeek publishes its own: matrices in FP8 with a scale for each block, and what is above."""
    made = tmp_path_factory.mktemp("fp8") / "model"
    shutil.copytree(model_path, made)
    tensors = {name: torch.ones(4) for name in NOT_TRAINED}
    for name, tensor in weights.items():
        if "_proj" in name:
            blocks = [-(-size // BLOCK) for size in tensor.shape]
            tensors |= {f"{name}_scale_inv": torch.ones(blocks), name: tensor.to(torch.float8_e4m3fn)}
        else:
            tensors[name] = tensor
    save_file(tensors, made / "model.safetensors")
    save_file({"layers.0.attention.wq.weight": torch.ones(4)}, made / "consolidated.safetensors")  # Mistral's own
    settings = json.loads((made / "config.json").read_text())
    settings["quantization_config"] = {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        "weight_block_size": [BLOCK, BLOCK],
    }
    (made / "config.json").write_text(json.dumps(settings))
    return made


def test_only_what_is_trained_is_waited_for(folder: Path, model_path: Path) -> None:
    assert checkpoint_shapes(folder) == checkpoint_shapes(model_path)


def test_layers_count_in_the_part_of_a_model_that_reads_text(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({"text_config": settings}))
    assert checkpoint_shapes(tmp_path / "model") == checkpoint_shapes(folder)


def test_an_engine_computes_with_what_is_sent_to_it(
    folder: Path,
    engine: Engine,
    settings: EngineSettings,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    """Bit for bit as one that was started from the weights in 32 bits."""
    config = from_dict({"model": {"path": str(folder), "dtype": "float32"}, "cluster": {"platform": "cpu"}})
    found = engine_settings(config, 1, experts=False)
    assert found.dequantized and not found.loads_weights
    made = Engine(
        replace(
            settings,
            model_path=str(folder),
            dequantized=found.dequantized,
            loads_weights=found.loads_weights,
            log_path=tmp_path / "engine.log",
        )
    )
    try:
        made.start()
        made.update_weights(stream_of(weights.items()))
        tokens = list(range(5, 45))
        theirs, ours = made.prompt_logprobs([tokens])[0], engine.prompt_logprobs([tokens])[0]
        assert np.array_equal(theirs, ours)
    finally:
        made.close()


def test_an_engine_reads_no_pickle_that_lies_beside_the_weights(
    model_path: Path, engine: Engine, settings: EngineSettings, tmp_path: Path
) -> None:
    """Files of the names that transformers, torch and vLLM know."""
    made, marked = tmp_path / "model", tmp_path / "marks"
    shutil.copytree(model_path, made)
    marked.mkdir()
    names = ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin", "optimizer.pt", "vocab.txt")
    for name, make in zip(names, itertools.cycle(KINDS.values()), strict=False):
        (made / name).write_bytes(make(marked / name))
    loaded = Engine(replace(settings, model_path=str(made), log_path=tmp_path / "engine.log"))
    try:
        loaded.start()
        tokens = list(range(5, 45))
        assert np.array_equal(loaded.prompt_logprobs([tokens])[0], engine.prompt_logprobs([tokens])[0])
    finally:
        loaded.close()
    assert marks(marked) == []
