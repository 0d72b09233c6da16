"""Settings of an engine for precision: the type of its head, and kernels that do not depend on the batch.

Costs nothing. Catches logits in 16 bits, and a run on CPUs that run.deterministic changes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.config.loader import from_dict
from gspo_hpc.engine import compat, settings
from gspo_hpc.engine.processes import START_SECONDS
from gspo_hpc.engine.settings import EngineSettings, arguments, environment
from gspo_hpc.training.bringup import engine_settings


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("float32", {}, None),
        ("bfloat16", {}, {"head_dtype": "float32"}),
        ("float16", {"rope_theta": 5.0}, {"head_dtype": "float32", "rope_theta": 5.0}),
        ("bfloat16", {"head_dtype": "model"}, {"head_dtype": "model"}),
    ],
)
def test_heads_are_in_fp32_unless_the_user_says_otherwise(dtype: str, given: dict[str, Any], expected: Any) -> None:
    extra = {"hf_overrides": given} if given else {}
    made = EngineSettings("model", dtype=dtype, engine_args=extra)
    assert arguments(made, "gspo_hpc").get("hf_overrides") == expected
    assert made.engine_args == extra, "what the user gave is left as it is"
    assert settings.has_exact_head(made) == (given.get("head_dtype") != "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_of_a_folder_in_fp8_computes_in_its_own_type(dtype: str) -> None:
    made = EngineSettings("model", dtype=dtype, dequantized=True, engine_args={"hf_overrides": {"rope_theta": 5.0}})
    overrides = arguments(made, "gspo_hpc")["hf_overrides"]
    assert overrides["quantization_config"] is None and overrides["rope_theta"] == 5.0
    assert ("head_dtype" in overrides) == (dtype != "float32")


def test_batch_invariance_is_for_gpus_that_are_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for platform, deterministic in (("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)):
        config = from_dict({"cluster": {"platform": platform}, "run": {"deterministic": deterministic}})
        values = environment(engine_settings(config, 1, experts=False))
        assert ("VLLM_BATCH_INVARIANT" in values) == (platform == "cuda" and deterministic)


def test_an_engine_on_a_gpu_starts_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runner V2 of vLLM 0.26 imports FlashInfer for sampling unless told not to, and never samples seeds with it."""
    monkeypatch.setattr(settings.torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = from_dict({"cluster": {"platform": "cuda"}})
    assert environment(engine_settings(config, 1, experts=False))["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_vllm_waits_for_its_processes_as_long_as_we_do(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own limit of ten minutes ends a start from a slow file system that is under way."""
    monkeypatch.setattr(settings.torch.cuda, "current_device", lambda: 0)
    config = from_dict({"cluster": {"platform": platform}})
    values = environment(engine_settings(config, 1, experts=False))
    assert float(values["VLLM_ENGINE_READY_TIMEOUT_S"]) == START_SECONDS >= 1800


def test_on_cpus_the_switch_changes_nothing_of_an_engine() -> None:
    plain, exact = (
        engine_settings(from_dict({"cluster": {"platform": "cpu"}, "run": {"deterministic": on}}), 1, experts=False)
        for on in (False, True)
    )
    assert plain == exact and environment(plain) == environment(exact)


class Older:
    """The counterpart of vLLM 0.22's LogitsProcessor: it multiplies in the type of the model."""

    org_vocab_size = 5

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def _get_logits(self, hidden: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None) -> torch.Tensor:
        return self._gather_logits(hidden @ lm_head.weight.t())[..., : self.org_vocab_size]

    def _gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Plain:
    """The counterpart of UnquantizedEmbeddingMethod."""


@pytest.mark.parametrize(("head", "exact"), [("float32", True), (None, False)])
def test_older_versions_multiply_in_fp32_as_well(
    head: str | None, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor: Any = type("LogitsProcessor", (Older,), dict(Older.__dict__))
    layers = "vllm.model_executor.layers"
    model = SimpleNamespace(hf_config=SimpleNamespace(head_dtype=head))
    for name, content in {
        f"{layers}.logits_processor": {"LogitsProcessor": processor},
        f"{layers}.vocab_parallel_embedding": {"UnquantizedEmbeddingMethod": Plain},
        "vllm.config": {"get_current_vllm_config": lambda: SimpleNamespace(model_config=model)},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):  # vLLM may load a plugin several times
        compat.compute_logits_in_fp32()
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator).bfloat16() for size in (3, 7))
    made = processor(7)
    expected = (hidden.float() @ weight.float().t())[:, :5]
    logits = made._get_logits(hidden, SimpleNamespace(weight=weight, quant_method=Plain()), None)
    assert logits.shape == (3, 5) and torch.equal(logits, expected) == exact
    quantized = SimpleNamespace(weight=weight, quant_method=object())
    assert made._get_logits(hidden, quantized, None).dtype == torch.bfloat16
    wide = made._get_logits(hidden, SimpleNamespace(weight=weight, quant_method=Plain()), torch.ones(7).bfloat16())
    assert not exact or torch.equal(wide, expected + 1.0)


@pytest.mark.parametrize(
    ("device", "size", "visible", "expected"),
    [
        (0, 1, None, "0"),
        (3, 1, None, "3"),
        (4, 2, None, "4,5"),
        (2, 2, "7,6,1,0", "1,0"),
        (1, 1, "GPU-a,GPU-b", "GPU-b"),
    ],
)
def test_an_engine_sees_no_gpu_but_its_own(
    device: int, size: int, visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of its processes that never chooses a device opens the first one that it sees, which is this rank's."""
    monkeypatch.setattr(settings.torch.cuda, "current_device", lambda: device)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = from_dict({"model": {"path": "m"}, "cluster": {"platform": "cuda", "gpus_per_node": 8}})
    asked = replace(engine_settings(config, 8 // size, experts=False), tensor_parallel_size=size)
    assert environment(asked)["CUDA_VISIBLE_DEVICES"] == expected
