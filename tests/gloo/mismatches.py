"""Faults of an engine, planted one after another: what the gate says of each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from gspo_hpc.config import section
from gspo_hpc.engine.engine import Engine, EngineSettings
from gspo_hpc.models.parts import Rope
from gspo_hpc.ops.rope import inverse_frequencies
from gspo_hpc.ops.weight_parts import Part
from gspo_hpc.policy import provider
from gspo_hpc.policy.policy import Policy
from gspo_hpc.training import probe
from gspo_hpc.training.agreement.gap import Gap
from gspo_hpc.training.sync import WeightSync

CANDIDATES = 2048  # sequences
SWAPPED = (".layers.2.", 3, 6)  # layer and experts
_ROPES = {"theta": Rope(1e6), "scaling": Rope(5000.0, "linear", 4.0)}  # of the trainer; the model has theta 5000
OVERRIDES: dict[str, dict[str, Any]] = {  # of config.json, by an engine
    "engine-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "engine-yarn": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 5000.0},
            **{"factor": 4.0, "original_max_position_embeddings": 64},
        }
    },
    "engine-partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}},
    "engine-norm": {"rms_norm_eps": 1e-5},
}


def sequences(model: str) -> list[list[int]]:
    """Return four sequences of random tokens, of CANDIDATES those that are farthest from a tie of any router.

    Near a tie rounding alone decides which experts a token goes to, one way in the trainer and the other in the engine,
    and by the processor.
    """
    made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 90, (CANDIDATES, 24)))
    with torch.no_grad():
        routers = made(tokens, output_router_logits=True).router_logits
    taken = made.config.num_experts_per_tok
    ranked = [logits.unflatten(0, tokens.shape).sort(-1, descending=True).values / logits.std() for logits in routers]
    distance = torch.stack([one[..., taken - 1] - one[..., taken] for one in ranked]).amin((0, 2))
    found: list[list[int]] = tokens[distance.argsort(descending=True)[:4]].tolist()
    return found


def run(made: Policy, model: str, dtype: str) -> dict[str, np.ndarray]:
    """Return the gap without a fault, and what is said of every fault."""
    found: dict[str, Any] = {}
    engine = started(model, dtype, {})
    weight_sync = WeightSync(made, sequences(model))
    clean, _ = weight_sync.run(engine)
    found["clean"] = np.array(clean.gap.values())
    found["healthy"] = [said(WeightSync(made, drawn), engine, None) for drawn in _drawn()]
    found["again"] = np.array(weight_sync.run(engine, clean.gap)[0].gap.values())
    found["stale"] = said(weight_sync, engine, clean.gap, _without_reset)
    if made.arch.experts is not None:
        found["swapped"] = said(weight_sync, engine, clean.gap, _with_swapped_experts)
        with _any_gap_allowed(made):  # as among so many experts that log-probs do not show it
            found["unseen"] = said(weight_sync, engine, None, _with_swapped_experts)
            found["scaled"] = said(weight_sync, engine, None, _with_a_scaled_expert)
            found["none"] = said(weight_sync, engine, None)
        with mock.patch.object(engine, "expert_sums", lambda *unused: None):  # as of an engine that is quantized
            found["guessed"] = said(weight_sync, engine, clean.gap, _with_swapped_experts)
    for name, rope in _ROPES.items():
        with _rotated_by(made, rope):
            found[name] = said(weight_sync, engine, clean.gap)
    found["weights"] = said(weight_sync, engine, clean.gap, _with_noise)
    found["healed"] = np.array(weight_sync.run(engine, clean.gap)[0].gap.values())
    engine.close()
    return {name: np.asarray(value) for name, value in found.items()}


def of_trained(made: Policy, model: str) -> dict[str, np.ndarray]:
    """Return what is said of an engine of a trained dense model in bfloat16: without a fault, and with some.

    Random tokens are improbable ones to such a model, and rounding moves their log-probs more than those of a text.
    """
    engine = started(model, "bfloat16", {})
    tokens, size = transformers.AutoTokenizer.from_pretrained(model), made.arch.vocab_size
    texts = [tokens(text)["input_ids"][:24] for text in _TEXTS]
    drawn = [np.random.default_rng(seed).integers(0, size, (4, 32)).tolist() for seed in range(8)]
    found: dict[str, Any] = {"healthy": [said(WeightSync(made, one), engine, None) for one in (texts, *drawn)]}
    first = WeightSync(made, texts).run(engine)[0].gap
    weight_sync = WeightSync(made, texts)
    middle = made.arch.num_layers // 2
    for name, layers in {"first": (0, 1), "middle": (middle, middle + 1), "apart": (3, middle)}.items():
        found[f"layers-{name}"] = said(weight_sync, engine, first, functools.partial(_with_swapped_layers, layers))
    found["weights"] = said(weight_sync, engine, first, _with_noise)
    found["stale"] = said(weight_sync, engine, first, _without_reset)
    engine.close()
    engine = started(model, "bfloat16", {"hf_overrides": {"head_dtype": "model"}})
    engine.settings = replace(engine.settings, engine_args={})
    found["head"] = said(WeightSync(made, texts), engine, first)
    engine.close()
    rope = {"rope_type": "default", "rope_theta": 2.0 * made.arch.rope.theta}
    engine = started(model, "bfloat16", {"hf_overrides": {"rope_parameters": rope}})
    found["rope"] = said(WeightSync(made, texts), engine, first)
    engine.close()
    return {name: np.asarray(value) for name, value in found.items()}


_TEXTS = (
    "The capital of France is Paris, which lies on the river Seine, and is the largest city of the country.",
    "To make bread one needs flour, water, salt and yeast; the dough has to rest for an hour before it is baked.",
    "If a train leaves at nine and arrives at noon, it has been on its way for three hours, and at 80 km/h for 240 km.",
    "def add(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n    return total\n",
)


def _drawn() -> list[list[list[int]]]:
    """Return probes of random tokens, wherever routers are near a tie."""
    return [np.random.default_rng(seed).integers(0, 90, (4, 24)).tolist() for seed in range(3)]


def with_overrides(made: Policy, model: str) -> dict[str, np.ndarray]:
    """Return what is said of engines that compute with other constants, and the gap that they make."""
    found: dict[str, Any] = {}
    for name, overrides in OVERRIDES.items():
        engine, weight_sync = (
            started(model, "bfloat16", {"hf_overrides": overrides}),
            WeightSync(made, sequences(model)),
        )
        found[name] = said(weight_sync, engine, None)
        with mock.patch.object(engine, "constants", list):  # as of an engine that does not say them
            found[f"{name}-unsaid"] = said(weight_sync, engine, None)
        engine.close()
    return {name: np.asarray(value) for name, value in found.items()}


def rounded_in_16_bits(made: Policy, model: str) -> dict[str, np.ndarray]:
    """Return what is said of an engine in bfloat16 that rounds its logits, and the gap where it is allowed to.

    vLLM obeys here, so it is told to round, and the gate that it was told not to.
    """
    engine, probed = started(model, "bfloat16", {"hf_overrides": {"head_dtype": "model"}}), sequences(model)
    allowed = WeightSync(made, probed).run(engine)[0].gap
    told, engine.settings = engine.settings, replace(engine.settings, engine_args={})
    first = said(WeightSync(made, probed), engine, None)
    resumed = said(WeightSync(made, probed), engine, allowed)  # an attempt that has the gap of the run's first sync
    engine.settings = told
    engine.close()
    found = {"allowed": allowed.values(), "head16-first": first, "head16-resumed": resumed}
    return {name: np.asarray(value) for name, value in found.items()}


def rounded(made: Policy, model: str) -> dict[str, np.ndarray]:
    """Return what is said of an engine that differs from a trainer in float32 by the type of its head alone."""
    engine = started(model, "float32", {"hf_overrides": {"head_dtype": "bfloat16"}})
    found = said(WeightSync(made, sequences(model)), engine, Gap())
    engine.close()
    return {"head": np.asarray(found)}


def started(model: str, dtype: str, arguments: dict[str, Any]) -> Engine:
    """Return an engine of the model."""
    engine = Engine(
        EngineSettings(
            model_path=model, dtype=dtype, max_model_len=256, kv_cache_gb=0.1, threads=1, engine_args=arguments
        )
    )
    engine.start()
    return engine


def said(
    weight_sync: WeightSync,
    engine: Engine,
    first: Gap | None,
    plant: Callable[[Policy, Engine], Callable[[], None]] | None = None,
) -> str:
    """Return the error of a sync with a fault planted; an empty text without an error."""
    undo = plant(weight_sync.policy, engine) if plant is not None else lambda: None
    try:
        weight_sync.run(engine, first)
    except probe.ProbeMismatch as error:
        return str(error)
    finally:
        undo()
    return ""


def _without_reset(made: Policy, engine: Engine) -> Callable[[], None]:
    engine.reset_prefix_cache = lambda: None  # type: ignore[method-assign]
    return lambda: delattr(engine, "reset_prefix_cache")


def _with_swapped_experts(made: Policy, engine: Engine) -> Callable[[], None]:
    layer, one, other = SWAPPED

    def swapped(part: Part) -> Part:
        if not part.experts or layer not in part.name:
            return part
        return replace(part, experts=tuple({one: other, other: one}.get(number, number) for number in part.experts))

    return _stream(made, swapped)


def _with_swapped_layers(layers: tuple[int, int], made: Policy, engine: Engine) -> Callable[[], None]:
    names = [f".layers.{layer}." for layer in layers]

    def swapped(part: Part) -> Part:
        for one, other in (names, names[::-1]):
            if one in part.name:
                return replace(part, name=part.name.replace(one, other))
        return part

    return _stream(made, swapped)


def _with_a_scaled_expert(made: Policy, engine: Engine) -> Callable[[], None]:
    layer, one, _ = SWAPPED

    def scaled(part: Part) -> Part:
        for name, tensor in part.tensors():
            if f"{layer}mlp.experts.{one}.down_proj" in name:
                tensor.mul_(1.02)
        return part

    return _stream(made, scaled)


@contextlib.contextmanager
def _rotated_by(made: Policy, rope: Rope) -> Iterator[None]:
    """Have the trainer compute with other rotary embeddings within the block."""
    arch, maker = made.arch, made.provider
    rotaries = [chunk.rotary_pos_emb for chunk in made.chunks]
    before = [rotary.inverse for rotary in rotaries]
    made.arch = replace(arch, rope=rope)
    made.provider = provider.Own(made.arch, made.config)
    for rotary in rotaries:
        rotary.inverse = inverse_frequencies(rope, arch.head_dim)
    yield
    made.arch, made.provider = arch, maker
    for rotary, inverse in zip(rotaries, before, strict=True):
        rotary.inverse = inverse


@contextlib.contextmanager
def _any_gap_allowed(made: Policy) -> Iterator[None]:
    config = made.config
    made.config = section.replace(
        config, rollout=section.replace(config.rollout, probe_max_gap=1e6, probe_mean_gap=1e6)
    )
    yield
    made.config = config


def _with_noise(made: Policy, engine: Engine) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(3)

    def noisy(part: Part) -> Part:
        noise = torch.randn(part.tensor.shape, generator=generator)
        part.tensor.add_((0.2 * part.tensor.float().std() * noise).to(part.tensor.dtype))
        return part

    return _stream(made, noisy)


def _stream(made: Policy, change: Callable[[Part], Part]) -> Callable[[], None]:
    original = made.parts

    def changed(*memory: Any) -> Iterator[Sequence[Part]]:
        for parts in original(*memory):
            yield [change(part) for part in parts]

    made.parts = changed  # type: ignore[method-assign]
    return lambda: delattr(made, "parts")
