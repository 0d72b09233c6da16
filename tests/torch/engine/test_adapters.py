"""Adapters reach vLLM's manager under the names of its layers, in every version; the model is stood in for.

A fraction of a second beside the import of vLLM. Catches an engine that refuses every weight sync, since its version of
vLLM maps names otherwise than the one that the tests run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_hpc.engine.adapters import loader
from gspo_hpc.engine.settings import EngineAdapters
from gspo_hpc.engine.updates import AdapterUpdate

LAYER = "model.layers.0.self_attn"
SHAPES = {"q_proj": (8, 4), "k_proj": (4, 4), "o_proj": (4, 8)}
MATRICES = {
    f"{LAYER}.{name}.lora_{which}": torch.randn((2, inputs) if which == "A" else (outputs, 2))
    for name, (outputs, inputs) in SHAPES.items()
    for which in "AB"
}
BUCKET = {"version": 3, "rank": 2, "alpha": 4.0}


class Manager:
    """A stand-in for vLLM's manager of adapters, as far as names go: those of a fused layer become one."""

    def __init__(self, *modules: str) -> None:
        self.modules = dict.fromkeys(modules)
        self.lora_config = SimpleNamespace(lora_dtype=torch.bfloat16)
        self.registered: dict[int, Any] = {1: None, 2: None}
        self.active: list[int] = []
        self.given: dict[str, Any] = {}

    def list_adapters(self) -> dict[int, Any]:
        """Return what there is."""
        return dict(self.registered)

    def add_adapter(self, made: Any) -> None:
        """Take a version, unless there is one of its number, as vLLM does."""
        if made.id in self.registered:
            return
        self.given = dict(made.loras)
        parts = [made.loras.pop(f"{LAYER}.{name}", None) for name in ("q_proj", "k_proj", "v_proj")]
        made.loras[f"{LAYER}.qkv_proj"] = parts
        self.registered[made.id] = made

    def activate_adapter(self, version: int) -> None:
        """Compute with it."""
        self.active.append(version)

    def remove_adapter(self, version: int) -> None:
        """Forget it."""
        del self.registered[version]


def model(manager: Manager) -> Any:
    """A model with a mapper of names that knows no method of any version for leaving fused layers out."""
    return SimpleNamespace(lora_manager=manager, hf_to_vllm_mapper=object())


def test_all_matrices_arrive_whatever_the_models_mapper_of_names_is() -> None:
    """Mappers of vLLM 0.26 and 0.29 leave out fused layers by methods of different names, and that of 0.22 has none."""
    manager = Manager(f"{LAYER}.qkv_proj", f"{LAYER}.o_proj")
    loader.install(model(manager), BUCKET, MATRICES)
    assert set(manager.given) == {f"{LAYER}.{name}" for name in SHAPES}
    for name in SHAPES:
        found = manager.given[f"{LAYER}.{name}"]
        assert torch.equal(found.lora_a, MATRICES[f"{LAYER}.{name}.lora_A"].bfloat16())
        assert torch.equal(found.lora_b, MATRICES[f"{LAYER}.{name}.lora_B"].bfloat16()) and found.scaling == 2.0
    assert manager.active == [3] and list(manager.registered) == [3]


def test_what_vllm_left_under_the_number_of_a_version_is_replaced() -> None:
    """Its trial runs use the first numbers, and it keeps what it has under a number that comes again."""
    manager = Manager(f"{LAYER}.qkv_proj", f"{LAYER}.o_proj")
    manager.registered[3] = None
    loader.install(model(manager), BUCKET, MATRICES)
    assert list(manager.registered) == [3] and manager.registered[3] is not None and manager.given


def test_a_matrix_without_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vLLM has no adapters on model.layers.0.self_attn.o_proj"):
        loader.install(model(Manager(f"{LAYER}.qkv_proj")), BUCKET, MATRICES)


def test_every_version_has_a_name_of_its_own() -> None:
    """vLLM's prefix cache has it in its keys: keys and values of one version are never taken for another's."""
    names = {loader.request(version).lora_name for version in range(1, 6)}
    numbers = {loader.request(version).lora_int_id for version in range(1, 6)}
    assert len(names) == len(numbers) == 5 and loader.request(None) is None


@pytest.mark.parametrize("loaded", [[], [[3], [2, 3]], [[2]], [[3], []]])
def test_a_sync_ends_only_where_all_workers_have_the_new_version_alone(loaded: list[list[int]]) -> None:
    def update() -> AdapterUpdate:
        made = AdapterUpdate(None, 1.0, EngineAdapters(2, 4.0, {}), 3)  # type: ignore[arg-type]  # nothing is sent
        return made

    complete = update()
    complete._take([[3], [3]])
    complete.finish()
    other = update()
    other._take(loaded)
    with pytest.raises(RuntimeError, match="and not of 3 alone"):
        other.finish()
