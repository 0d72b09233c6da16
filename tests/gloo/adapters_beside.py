"""Adapters beside the weights of a real engine: what travels, what the gate says, and what merging would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gspo_hpc.config.section import replace
from gspo_hpc.engine.engine import Engine
from gspo_hpc.ops.weight_parts import Part
from gspo_hpc.policy.adapters import matrices
from gspo_hpc.policy.policy import Policy
from gspo_hpc.training import bringup, probe
from gspo_hpc.training.sync import WeightSync

SEQUENCES = [[(7 * place + 13 * number * (place % 5 + 1)) % 90 + 5 for place in range(48)] for number in range(3)]


def run(made: Policy) -> dict[str, np.ndarray]:
    """Return gaps and fingerprints of several syncs, bytes and names of what travelled, and what the gate says."""
    found: dict[str, Any] = {}
    engine = started(made)
    passes = _watched(made)
    weight_sync = WeightSync(made, SEQUENCES)
    for name, seed in (("first", 1), ("second", 2), ("again", 1)):
        learn(made, seed)
        synced, death = weight_sync.run(engine)
        assert death is None
        found[f"gap-{name}"], found[f"fingerprint-{name}"] = synced.gap.values(), synced.fingerprint
        found[f"logprobs-{name}"] = logprobs(engine)
    found["passes"], found["bytes"] = [name for name, _ in passes], [size for _, size in passes]
    learn(made, 3)
    found["stale"] = _said(weight_sync, engine, _without_update)
    found["gap-healed"] = weight_sync.run(engine)[0].gap.values()
    if engine is not None:
        engine.sleep(2)
    passes.clear()
    learn(made, 1)
    weight_sync.run(engine)
    found["logprobs-refilled"], found["passes-refilled"] = logprobs(engine), [name for name, _ in passes]
    if engine is not None:
        engine.restart()
    passes.clear()
    weight_sync.run(engine)
    found["logprobs-restarted"], found["passes-restarted"] = logprobs(engine), [name for name, _ in passes]
    if engine is not None:
        engine.close()
    found |= {"lost-beside": _lost(made, beside=True), "lost-merged": _lost(made, beside=False)}
    made.config = replace(made.config, adapter=replace(made.config.adapter, engine="merged"))
    engine = started(made)
    passes.clear()
    merged = WeightSync(made, SEQUENCES).run(engine)[0]
    found["gap-merged"], found["logprobs-merged"] = merged.gap.values(), logprobs(engine)
    found["passes-merged"], found["bytes-merged"] = [name for name, _ in passes], [size for _, size in passes]
    if engine is not None:
        engine.close()
    return {name: np.asarray(value) for name, value in found.items()}


def _lost(made: Policy, *, beside: bool) -> float:
    """Return how much of what adapters add to weights is rounded away in what is sent, as a share of its size."""
    base = _sent(made.base_parts())
    exact = dict(made.adapter_matrices())
    sent = _sent(made.adapter_parts() if beside else made.parts())
    scale, lost, size = made.config.adapter.alpha / made.config.adapter.rank, 0.0, 0.0
    for name in (name.removesuffix(".lora_A") for name in exact if name.endswith(".lora_A")):
        added = scale * exact[f"{name}.lora_B"] @ exact[f"{name}.lora_A"]
        weight = f"{name}.weight"
        arrived = scale * sent[f"{name}.lora_B"] @ sent[f"{name}.lora_A"] if beside else sent[weight] - base[weight]
        lost, size = lost + float((arrived - added).square().sum()), size + float(added.square().sum())
    return float((lost / size) ** 0.5)


def _sent(stream: Iterator[Sequence[Part]]) -> dict[str, torch.Tensor]:
    """Return what a stream has, in float32."""
    return {name: one.float().clone() for parts in stream for part in parts for name, one in part.tensors()}


def learn(made: Policy, seed: int) -> None:
    """Give the adapters other values, which add little to most weights."""
    drawn = matrices.first_values(seed)
    matrices.fill(
        made.chunks,
        lambda name, shape: drawn(name.replace("lora_B", "lora_A"), shape) * (0.1 if name.endswith("lora_B") else 1.0),
    )


def started(made: Policy) -> Engine | None:
    """Return the engine of rank 0, which has no weights yet."""
    if made.ranks.rank:
        return None
    settings = bringup.engine_settings(made.config, 1, experts=False)
    engine = Engine(dataclasses.replace(settings, kv_cache_gb=0.1, threads=1, max_model_len=256))
    engine.start()
    return engine


def logprobs(engine: Engine | None) -> np.ndarray:
    """Return what an engine computes of the probe."""
    return np.zeros(0) if engine is None else np.concatenate(engine.prompt_logprobs(SEQUENCES))


def _watched(made: Policy) -> list[tuple[str, int]]:
    """Return a list that gets the name and the bytes of every pass over weights or adapters from now on."""
    passes: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        original: Callable[..., Iterator[Sequence[Part]]] = getattr(made, name)

        def counted(*memory: Any) -> Iterator[Sequence[Part]]:
            size = 0
            for parts in original(*memory):
                size += sum(part.tensor.nbytes for part in parts)
                yield parts
            passes.append((name, size))

        setattr(made, name, counted)

    for name in ("parts", "adapter_parts"):
        watch(name)
    return passes


def _said(weight_sync: WeightSync, engine: Engine | None, plant: Callable[[Engine], Callable[[], None]]) -> str:
    """Return the error of a sync with a fault planted; an empty text without an error."""
    undo = plant(engine) if engine is not None else lambda: None
    try:
        weight_sync.run(engine)
    except probe.ProbeMismatch as error:
        return str(error)
    finally:
        undo()
    return ""


def _without_update(engine: Engine) -> Callable[[], None]:
    """Have the engine keep the adapters that it has."""

    def only_read(stream: Any, sender: Any = None) -> None:
        for _ in stream():
            pass
        engine.reset_prefix_cache()

    engine.update_adapters = only_read  # type: ignore[method-assign]
    return lambda: delattr(engine, "update_adapters")
