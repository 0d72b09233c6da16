"""Megatron-Core on gloo ranks against Hugging Face and against itself on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.gloo import cases, ranks

FAMILIES = ["llama-tied", "llama-untied", "qwen2-tied", "qwen3-untied"]
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"parallel": {"tensor_model_parallel_size": 2}}),
    "pp2": (2, {"parallel": {"pipeline_model_parallel_size": 2}}),
}


def huggingface_logprobs(folder: Path) -> dict[str, np.ndarray]:
    """Each completion on its own, unpacked, through transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result = {}
    for group in cases.groups():
        for index, completion in enumerate(group.completions):
            tokens = torch.tensor(np.concatenate([group.prompt.tokens, completion.tokens]), dtype=torch.int64)
            with torch.no_grad():
                logits = model(tokens[None]).logits[0]
            all_logprobs = torch.log_softmax(logits[:-1].float(), -1).gather(1, tokens[1:, None])[:, 0]
            result[f"{group.slot}-{index}"] = all_logprobs[len(group.prompt.tokens) - 1 :].numpy()
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_hugging_face(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    ours = ranks.run("logprobs", 1, tmp_path, model=str(models[family]))
    theirs = huggingface_logprobs(models[family])
    assert ours.keys() == theirs.keys()
    worst = max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)
    assert worst < 1e-4, worst


def test_unshared_prompts_give_the_same_logprobs(models: dict[str, Path], tmp_path: Path) -> None:
    arguments = {"model": str(models["llama-tied"])}
    shared = ranks.run("logprobs", 1, tmp_path, **arguments)
    alone = ranks.run("logprobs", 1, tmp_path, **arguments, batch={"share_prompts": False})
    for key in shared:
        np.testing.assert_allclose(shared[key], alone[key], atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_stream_back_bit_for_bit(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    stored = load_file(models[family] / "model.safetensors")
    for world, sections in ((1, {}), LAYOUTS["tp2"], LAYOUTS["pp2"]):
        streamed = ranks.run("exported", world, tmp_path, model=str(models[family]), **sections)
        assert streamed.keys() == stored.keys()
        for name, tensor in stored.items():
            assert np.array_equal(streamed[name], tensor.numpy()), (world, name)


@pytest.fixture(scope="module")
def one_rank(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Three steps on one rank."""
    return ranks.run("steps", 1, tmp_path_factory.mktemp("one"), model=str(models["llama-tied"]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_equal_one_rank(
    layout: str, models: dict[str, Path], one_rank: dict[str, np.ndarray], tmp_path: Path
) -> None:
    world, sections = LAYOUTS[layout]
    many = ranks.run("steps", world, tmp_path, model=str(models["llama-tied"]), **sections)
    assert one_rank["grad_norm"].min() > 1e-3  # there was something to compare
    for name, expected in one_rank.items():
        np.testing.assert_allclose(many[name], expected, rtol=2e-4, atol=2e-5, err_msg=name)


def test_micro_batches_do_not_change_the_step(
    models: dict[str, Path], one_rank: dict[str, np.ndarray], tmp_path: Path
) -> None:
    model = str(models["llama-tied"])
    other = ranks.run("steps", 1, tmp_path, model=model, batch={"micro_batch_tokens": None, "micro_batch_size": 1})
    np.testing.assert_allclose(other["grad_norm"], one_rank["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(other["loss"], one_rank["loss"], atol=1e-5)


def test_a_nan_gradient_on_one_rank_is_skipped_on_all(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["llama-untied"]
    result = ranks.run("steps", 2, tmp_path, model=str(model), count=1, nan_rank=1)
    assert result["skipped"].all()
    stored = load_file(model / "model.safetensors")
    for name, tensor in stored.items():
        assert np.array_equal(result[name], tensor.numpy()), name


@pytest.mark.parametrize("layout", ["one", "dp2"])
def test_checkpoint_goes_on_bit_for_bit(layout: str, models: dict[str, Path], tmp_path: Path) -> None:
    world, sections = LAYOUTS.get(layout, (1, {}))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    arrays = ranks.run("roundtrip", world, tmp_path, model=str(models["llama-tied"]), folder=str(folder), **sections)
    names = [name.removeprefix("straight/") for name in arrays if name.startswith("straight/")]
    assert names
    for name in names:
        assert np.array_equal(arrays[f"straight/{name}"], arrays[f"resumed/{name}"]), name
    assert json.loads((folder / "rng-0.json").read_text())["python"]
