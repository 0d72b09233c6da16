"""Kernels that do several operations at once: asked for on GPUs only, and the formula is the same."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config, replace
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning.estimates import activations
from gspo_hpc.policy import bridged, layers, model, moe
from gspo_hpc.policy.model import transformer_config

# torch.compile would need a C++ compiler here; without it the same function runs as it is written.
PROGRAM = """
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
inputs = torch.randn(7, 1, 64, dtype=torch.float64, requires_grad=True)
again = inputs.detach().clone().requires_grad_()
gate, up = again.chunk(2, dim=-1)
expected, found = torch.nn.functional.silu(gate) * up, bias_swiglu_impl(inputs, None, False, False)
upstream = torch.randn_like(expected)
expected.backward(upstream)
found.backward(upstream)
torch.testing.assert_close(found, expected)
torch.testing.assert_close(inputs.grad, again.grad)
"""


@pytest.mark.parametrize(
    ("device", "layers_of", "expected"),
    [("cuda:3", "torch", ["cuda:3"]), ("cuda:3", "transformer_engine", []), ("cpu", "torch", [])],
)
def test_torchs_layers_get_the_newest_flash_attention_on_gpus(
    device: str, layers_of: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(catalog.content("Qwen2.5-7B")))
    raw = {"cluster": {"platform": device.partition(":")[0]}}
    events: list[str] = []
    monkeypatch.setattr(model.varlen, "use_newest_kernel", lambda device: events.append(str(device)))
    settings = SimpleNamespace(virtual_pipeline_model_parallel_size=None)
    monkeypatch.setattr(model, "transformer_config", lambda *arguments: settings)
    monkeypatch.setattr(model, "uses_transformer_engine", lambda config: layers_of == "transformer_engine")
    monkeypatch.setattr(model, "_chunk", lambda *arguments: events.append("chunk"))
    monkeypatch.setattr(model.compat, "accumulate_in_buffers", lambda chunks: None)
    model.build(architecture.read(tmp_path), from_dict(raw), torch.device(device))
    assert events == [*expected, "chunk"], "chosen before any layer is made"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_gpus_get_the_fused_swiglu(tmp_path: Path, platform: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(catalog.content("Qwen3-30B-A3B")))
    arch, raw = architecture.read(tmp_path), {"cluster": {"platform": platform}, "model": {"layers": "torch"}}
    found = transformer_config(arch, from_dict(raw))
    assert found.bias_activation_fusion == (platform == "cuda") and not found.moe_permute_fusion
    assert [moe.settings(arch, from_dict(raw), fused)["moe_permute_fusion"] for fused in (False, True)] == [False, True]


def bridge_settings(config: Config, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what mcore-bridge, which is not installed here, is given for a model."""
    made: dict[str, Any] = {}
    bridge, models = ModuleType("mcore_bridge"), ModuleType("mcore_bridge.model")
    vars(bridge).update(hf_to_mcore_config=lambda found: {"hf_model_type": "qwen2"})
    meta = SimpleNamespace(is_multimodal=False, config_cls=lambda **settings: made.update(settings))
    vars(models).update(get_mcore_model_type=lambda kind: kind, get_model_meta=lambda kind: meta)
    monkeypatch.setattr(bridged.hf_folder, "configuration", lambda folder: None)
    monkeypatch.setitem(sys.modules, "mcore_bridge", bridge)
    monkeypatch.setitem(sys.modules, "mcore_bridge.model", models)
    bridged._settings(config)
    return made


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused"])
def test_megatron_gets_the_kernels_of_attention_that_are_asked_for(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron sets Transformer Engine's variables by it, for models of both providers."""
    (tmp_path / "config.json").write_text(json.dumps(catalog.content("Qwen2.5-7B")))
    config = from_dict({"model": {"path": str(tmp_path), "layers": "torch", "attention_backend": backend}})
    found = [transformer_config(architecture.read(tmp_path), config).attention_backend]
    found.append(bridge_settings(config, monkeypatch)["attention_backend"])
    assert [one.name for one in found] == [backend] * 2


@pytest.mark.parametrize(
    ("platform", "provider", "inner_sizes"),
    [("cuda", "own", 3), ("cpu", "own", 5), ("cuda", "mcore_bridge", 5)],
)
def test_the_plan_counts_what_the_swiglu_in_use_keeps(
    platform: str, provider: str, inner_sizes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token keeps, in inner sizes, both halves and their product; without the fusion also its two factors."""
    raw = {"cluster": {"platform": platform}, "model": {"layers": "torch", "provider": provider}}
    (tmp_path / "config.json").write_text(json.dumps(catalog.content("Qwen2.5-7B")))
    arch, config = architecture.read(tmp_path), from_dict(raw)
    assert activations.layer(arch, config, 0).mlp == inner_sizes * arch.ffn_hidden_size
    if provider == "own":
        fused = transformer_config(arch, config).bias_activation_fusion
    else:
        made = bridge_settings(replace(config, model=replace(config.model, path=str(tmp_path))), monkeypatch)
        fused = made["bias_activation_fusion"]
    assert fused == (inner_sizes == 3)


@pytest.mark.parametrize(("platform", "made"), [("cuda", 1), ("cpu", 4)])
def test_recomputed_activations_of_experts_leave_the_halves(platform: str, made: int) -> None:
    """`moe_act` computes the weighted product again; without the fusion of SwiGLU also its factors."""
    config = from_dict({"cluster": {"platform": platform}, "model": {"path": "Qwen3-30B-A3B"}})
    arch = architecture.find(config)
    assert arch is not None and arch.experts is not None
    each, copies = activations.layer(arch, config, 0), arch.experts.top_k
    inner = arch.experts.ffn_hidden_size
    assert each.experts == copies * (arch.hidden_size + 2 * inner) and each.gates == copies * made * inner


def test_the_fused_swiglu_is_the_same_function() -> None:
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=120)


@pytest.mark.parametrize(
    ("section", "used"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float32"}, False),
        ({"dtype": "float32", "layers": "transformer_engine"}, True),
        ({"dtype": "bfloat16", "layers": "torch"}, False),
    ],
)
def test_transformer_engine_is_not_taken_for_float32(
    section: dict[str, str], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: object())
    assert layers.uses_transformer_engine(from_dict({"model": section})) == used


@pytest.mark.parametrize(("capability", "used"), [((7, 5), False), ((8, 0), True)])
def test_transformer_engine_is_not_taken_for_gpus_before_ampere(
    capability: tuple[int, int], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention on packed samples is not made for a T4; asked for by name it is refused by the plan."""
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(layers.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(layers.torch.cuda, "get_device_capability", lambda: capability)
    assert layers.uses_transformer_engine(from_dict({"model": {"dtype": "float16"}})) == used


def test_transformer_engines_layers_get_its_rotary_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron refuses to be without it where it is asked for, as here."""
    (tmp_path / "config.json").write_text(json.dumps(catalog.content("Qwen2.5-7B")))
    arch, config = architecture.read(tmp_path), from_dict({})
    monkeypatch.setattr(model, "uses_transformer_engine", lambda config: False)
    assert not transformer_config(arch, config).apply_rope_fusion
    monkeypatch.setattr(model, "uses_transformer_engine", lambda config: True)
    with pytest.raises(ValueError, match="apply_rope_fusion is not available"):
        transformer_config(arch, config)


@pytest.mark.parametrize("fused", [False, True])
def test_transformer_engines_layers_add_to_the_gradient_buffers(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its layers of every chunk are told; Megatron's own could not be built with the setting."""

    class Layer(torch.nn.Module):
        fuse_wgrad_accumulation = False

    def chunk(*unused: Any) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Sequential(Layer(), torch.nn.Linear(1, 1)), Layer())

    settings: Any = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    monkeypatch.setattr(model, "uses_transformer_engine", lambda config: fused)
    monkeypatch.setattr(model, "transformer_config", lambda *a: settings)
    monkeypatch.setattr(model, "_chunk", chunk)
    arch: Any = None
    found = [m for one in model.build(arch, from_dict({}), torch.device("cpu")) for m in one.modules()]
    assert [m.fuse_wgrad_accumulation for m in found if isinstance(m, Layer)] == [fused] * 4
    assert not any(hasattr(m, "fuse_wgrad_accumulation") for m in found if isinstance(m, torch.nn.Linear))


def test_megatrons_own_layers_refuse_to_add_to_the_gradient_buffers(tmp_path: Path) -> None:
    """Which is why its setting stays off: the output layer is one of these."""
    (tmp_path / "config.json").write_text(json.dumps(catalog.content("Qwen2.5-7B")))
    arch = architecture.read(tmp_path)
    settings = transformer_config(arch, from_dict({"model": {"layers": "torch"}}))
    assert not settings.gradient_accumulation_fusion
    made = inspect.getsource(ColumnParallelLinear.__init__)
    assert "if config.gradient_accumulation_fusion and not _grad_accum_fusion_available" in made
