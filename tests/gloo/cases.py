"""What the ranks of tests/gloo do. A case is a function of keyword arguments that returns arrays; rank 0 saves them."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gspo_hpc.policy  # noqa: F401  # before Megatron, whose import alone loads torch's compiler into every rank

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from safetensors.torch import load_file, save_file

from gspo_hpc.algorithms import objective as algorithms
from gspo_hpc.algorithms.objective import Objective
from gspo_hpc.checkpoint import adapters, hugging_face, sharded, shared_optimizer
from gspo_hpc.checkpoint.saver import Saver
from gspo_hpc.config import schema
from gspo_hpc.config.derived import PassName, fuses_swiglu
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.table import ShardedGroups
from gspo_hpc.engine.engine import Engine, EngineSettings
from gspo_hpc.exchange.transport import gather_unordered
from gspo_hpc.models import architecture
from gspo_hpc.models.adapter_table import is_of_embedding
from gspo_hpc.ops import hf_folder, peft_folder
from gspo_hpc.ops.weight_parts import Part, Scratch
from gspo_hpc.policy import compat, passes, schedule
from gspo_hpc.policy import model as model_building
from gspo_hpc.policy import weight_stream as weights
from gspo_hpc.policy.adapters import matrices
from gspo_hpc.policy.adapters.lora import EmbeddingLora
from gspo_hpc.policy.passes import Abandoned, PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import (
    Ranks,
    barrier,
    broadcast_bytes,
    drop_layout,
    start,
    stop,
    store,
)
from gspo_hpc.policy.schedule import StepResult
from gspo_hpc.runs import commit
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system import progress
from gspo_hpc.training import probe as probing
from gspo_hpc.training import sync, update
from gspo_hpc.training.agreement import scoring
from gspo_hpc.training.jobs import train
from gspo_hpc.training.reference import Reference, Teacher, moving
from gspo_hpc.training.telemetry.accelerator import Accelerator
from gspo_hpc.training.telemetry.collectives import CollectiveTime
from gspo_hpc.training.telemetry.console import Console
from gspo_hpc.training.telemetry.meter import Meter
from gspo_hpc.training.telemetry.step_clock import StepClock
from tests.gloo import adapters_beside, mismatches, saves, sums, turns
from tests.storages import Storages

Arrays = dict[str, np.ndarray]


def config(
    model: str, world: int, model_dtype: str = "float32", model_norms_in_fp32: bool = True, **sections: Any
) -> Config:
    """A configuration of `world` ranks for the model folder: on CPUs, unless tools/acceptance runs this on GPUs."""
    base: dict[str, Any] = {
        "cluster": {"platform": os.environ.get("GSPO_HPC_TEST_PLATFORM", "cpu"), "gpus_per_node": world},
        "model": {"path": model, "dtype": model_dtype, "norms_in_fp32": model_norms_in_fp32},
        "batch": {"global_batch_size": 12, "num_generations": 4, "micro_batch_tokens": 96},
        "run": {"max_steps": 100},
        "optimizer": {"lr": 1e-4, "adam_eps": 1e-4},
        "algorithm": {"clip_low": 0.5, "clip_high": 0.5},  # wide: the later steps too must have a gradient
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return from_dict(base)


def groups(seed: int = 0, count: int = 3, samples: int = 4, vocabulary: int = 90) -> list[Group]:
    """Groups of very different lengths, whose prompts begin alike, with old log-probs near the truth of nobody.

    Some completions hold tokens of an environment.
    """
    rng = np.random.default_rng(seed)
    shared_prefix = rng.integers(0, vocabulary, 18)
    made = []
    for slot in range(count):
        own = rng.integers(0, vocabulary, rng.integers(2, 20))
        prompt = Prompt(slot, np.concatenate((shared_prefix, own)).astype(np.int32), "", {})
        completions = []
        for index in range(samples):
            length = int(rng.integers(1, 24))
            environment = None
            if index > 1 and length > 8:  # a conversation: the model, its environment once or twice, the model
                environment = np.zeros(length, np.uint8)
                environment[[2, 3, *range(5, length - 3)]] = 1
            sampled = length if environment is None else int((environment == 0).sum())
            completions.append(
                Completion(
                    tokens=rng.integers(0, vocabulary, length).astype(np.int32),
                    logprobs=np.full(sampled, -4.0, np.float32),
                    environment=environment,
                    text="",
                    finish_reason="stop",
                    seed=index,
                    reward=float(rng.integers(0, 2)) if index > 1 else float(index),
                )
            )
        made.append(Group(slot, prompt, tuple(completions)))
    return update.with_advantages(made, True)


def spread(made: Policy, rollout: Sequence[Group] | None = None) -> ShardedGroups:
    """The groups, each on one rank, as after a rollout: what a rank computes comes from other ranks."""
    mine, world = made.ranks.rank, made.ranks.world_size
    return made.ranks.exchange.gather_table(group for group in rollout or groups() if (group.slot + 1) % world == mine)


def everywhere(values: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
    """The values of all ranks, on all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, values)
    return {key: value for part in every for key, value in sorted(part.items())}


def policy(settings: Config) -> tuple[Policy, Ranks]:
    """The model with its weights and an optimizer."""
    ranks = start(settings)
    arch = architecture.read(str(settings.model.path))
    made = Policy(arch, settings, ranks)
    made.load(str(settings.model.path))
    made.make_optimizer()
    return made, ranks


def logprobs(model: str, world: int, **sections: Any) -> Arrays:
    """Log-probs and logits of all completions, in slot and index order."""
    settings = config(model, world, **sections)
    made, _ = policy(settings)
    passed = update.logprob_pass(made, spread(made), "old_logprobs", settings)
    own = {f"{slot}-{index}": array for (slot, index), array in everywhere(passed.logprobs).items()}
    return own | _logits(made, spread(made), settings)


def _logits(made: Policy, rollout: ShardedGroups, settings: Config) -> Arrays:
    """Logits [tokens, V] of all completions, on all ranks. The package never has them: the head is replaced by one that
    keeps them, and whose log-probs are numbers of rows. The pass brings these to their places."""
    kept: list[torch.Tensor] = []
    far = 1 << 14  # rows of one rank

    def keep(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        *,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [hidden @ weight.T]
        if tp_group is not None:
            mine = parts[0].contiguous()
            parts = [torch.empty_like(mine) for _ in range(tp_group.size())]
            dist.all_gather(parts, mine, group=tp_group)
        first = made.ranks.rank * far + sum(len(one) for one in kept)
        kept.append(torch.cat(parts, -1)[:, :vocab_size].float())
        places = torch.arange(first, first + len(targets), dtype=torch.float32, device=hidden.device)
        return places, torch.zeros_like(places)

    original, passes.token_logprobs = passes.token_logprobs, keep  # type: ignore[assignment]
    try:
        passed = update.logprob_pass(made, rollout, "old_logprobs", settings)
    finally:
        passes.token_logprobs = original
    every: list[Any] = [None] * made.ranks.world_size
    dist.all_gather_object(every, torch.cat(kept).cpu().numpy() if kept else None)
    rows = {key: array.astype(np.int64) for key, array in everywhere(passed.logprobs).items()}
    return {f"logits/{key[0]}-{key[1]}": np.stack([every[n // far][n % far] for n in rows[key]]) for key in rows}


def given_experts(rollout: list[Group], model: str) -> list[Group]:
    """The groups with experts for every token that no router would choose so."""
    arch = architecture.read(model)
    assert arch.experts is not None
    rng = np.random.default_rng(5)

    def draw(tokens: int) -> np.ndarray:
        ranked = rng.random((tokens, arch.num_layers, arch.experts.count)).argsort(-1)
        return ranked[..., : arch.experts.top_k].astype(np.uint8)

    return [
        replace(
            group,
            prompt_experts=draw(len(group.prompt.tokens)),
            completions=tuple(replace(c, experts=draw(len(c.tokens) - 1)) for c in group.completions),
        )
        for group in rollout
    ]


def routed(model: str, world: int, **sections: Any) -> Arrays:
    """Log-probs with experts that are given and with the router's own, and which those are."""
    settings = config(model, world, **sections)
    made, _ = policy(settings)
    rollout = groups()
    given = update.logprob_pass(made, spread(made, given_experts(rollout, model)), "old_logprobs", settings)
    own = update.logprob_pass(made, spread(made, rollout), "old_logprobs", settings, record=True)
    refused = spread(made, given_experts(rollout, model))
    again = update.logprob_pass(made, refused, "old_logprobs", settings, replay=False)
    found = {"given": given.logprobs, "own": own.logprobs, "refused": again.logprobs, "experts": own.experts}
    return {f"{name}/{key[0]}-{key[1]}": v for name, part in found.items() for key, v in everywhere(part).items()}


def shaken(model: str, world: int, **sections: Any) -> Arrays:
    """Gap that noise of the size of rounding makes on a probe, on every rank; and the log-probs before and after it."""
    made, ranks = policy(config(model, world, "bfloat16", **sections))
    probe = np.random.default_rng(1).integers(0, 90, (4, 24)).tolist()
    before = scoring.score(made, probe).logprobs
    gap = scoring.rounding_gap(made, probe, before, None)
    assert gap is not None
    mine = json.dumps(gap.values()).encode()
    gaps = [json.loads(one) for one in gather_unordered(ranks.exchange.transport, mine)]
    after = scoring.score(made, probe).logprobs
    return {"gaps": np.array(gaps), "before": np.concatenate(before), "after": np.concatenate(after)}


def steps(
    model: str,
    world: int,
    count: int = 3,
    nan_rank: int = -1,
    stop_rank: int = -1,
    given: bool = False,
    recorded: tuple[int, ...] = (),
    uneven: bool = False,
    **sections: Any,
) -> Arrays:
    """Logits, log-probs, losses, gradient norms and all weights after `count` optimizer steps on one rollout.

    `stop_rank`: a rank that is asked to stop in a log-prob pass and in a step before those, after a micro-batch.
    `uneven`: every second step is on one group, in other micro-batches than the step before.
    `given`: tokens go to experts that are given. `recorded`: slots whose log-probs the first step keeps on holders.
    """
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    objective = algorithms.resolve(settings.algorithm)
    rollout = spread(made, given_experts(groups(), model) if given else groups())
    rollout = update.with_old_logprobs(made, rollout, rollout, settings)
    logits = _logits(made, rollout, settings)
    passed = update.logprob_pass(made, rollout, "old_logprobs", settings)
    logits |= {f"logprobs/{slot}-{index}": array for (slot, index), array in everywhere(passed.logprobs).items()}
    results: list[StepResult] = []
    scales: list[float] = []
    if stop_rank >= 0:
        name: PassName = "old_logprobs"
        _abandon(
            ranks,
            stop_rank,
            settings,
            lambda monitor: update.logprob_pass(made, rollout, name, settings, monitor=monitor),
        )
        _abandon(
            ranks, stop_rank, settings, lambda monitor: update.step(made, rollout, objective, settings, monitor=monitor)
        )
    gradients: Arrays = {}
    if nan_rank < 0:
        gradients = _gradients(made, lambda: update.step(made, rollout, objective, settings))
    for number in range(count):
        if nan_rank == ranks.rank:
            _poison(made)
        part = rollout.at(rollout.table.slots[:1]) if uneven and number % 2 else rollout
        result = update.step(made, part, objective, settings, recorded=recorded)
        assert result is not None
        assert {slot for slot, _ in result.logprobs} <= {*rollout.own} & {*recorded}, "each holder has its own"
        results.append(result)
        scales.append(float(made.optimizer.get_loss_scale()))
    arrays = {name: tensor.float().cpu().numpy().copy() for name, tensor in made.stream()}
    arrays |= gradients | logits
    arrays["loss"] = np.array([r.sums["loss"][0] / r.sums["loss"][1] for r in results])
    arrays["entropy"] = np.array([r.sums["entropy"][0] / r.sums["entropy"][1] for r in results])
    arrays["grad_norm"] = np.array([r.grad_norm for r in results])
    arrays["overflowed"] = np.array([r.overflowed for r in results])
    arrays["loss_scale"] = np.array(scales)
    arrays["skipped"] = np.array([r.skipped for r in results])
    arrays |= {name: np.array([r.experts[name] for r in results]) for name in results[0].experts}
    if recorded:
        kept = everywhere(results[0].logprobs)
        arrays |= {f"kept/{slot}-{index}": array for (slot, index), array in kept.items()}
    return arrays


def adapted(model: str, world: int, count: int = 3, **sections: Any) -> Arrays:
    """Losses, gradient norms and log-probs of `count` steps on adapters; their first gradients, and what they are in
    the end; the weights that go to engines; and whether a base weight, or the log-probs without adapters, changed."""
    settings = config(model, world, **sections)
    made, _ = policy(settings)
    objective, rollout = algorithms.resolve(settings.algorithm), spread(made)
    drawn = matrices.first_values(7)

    def values(name: str, shape: tuple[int, int]) -> torch.Tensor:
        """Values of which none begins as zeros: else the other matrix has no gradient."""
        if is_of_embedding(name):
            return 0.1 * drawn(name.replace("lora_A", "lora_B"), shape)
        return drawn(name.replace("lora_B", "lora_A"), shape)

    matrices.fill(made.chunks, values)
    arrays = {f"first/{name}": whole.cpu().numpy().copy() for name, whole in made.adapter_matrices()}
    passed = update.logprob_pass(made, rollout, "old_logprobs", settings)
    arrays |= {f"logprobs/{slot}-{index}": array for (slot, index), array in everywhere(passed.logprobs).items()}
    with made.without_adapters():
        plain = everywhere(update.logprob_pass(made, rollout, "reference", settings).logprobs)
    rollout = update.with_old_logprobs(made, rollout, rollout, settings)
    arrays |= _adapter_gradients(made, lambda: update.step(made, rollout, objective, settings))
    results = [update.step(made, rollout, objective, settings) for _ in range(count)]
    assert all(result is not None and not result.skipped for result in results)
    _look_up_alike(made)
    arrays |= {f"last/{name}": whole.cpu().numpy().copy() for name, whole in made.adapter_matrices()}
    arrays |= {f"merged/{name}": tensor.float().cpu().numpy().copy() for name, tensor in made.stream()}
    arrays["loss"] = np.array([r.sums["loss"][0] / r.sums["loss"][1] for r in results if r is not None])
    arrays["grad_norm"] = np.array([r.grad_norm for r in results if r is not None])
    with made.without_adapters():
        again = everywhere(update.logprob_pass(made, rollout, "reference", settings).logprobs)
        arrays["changed"] = np.array([key for key in plain if not np.array_equal(plain[key], again[key])])
        arrays |= {f"plain/{slot}-{index}": array for (slot, index), array in plain.items()}
        arrays |= {f"base/{name}": tensor.float().cpu().numpy().copy() for name, tensor in made.stream()}
    return arrays


@torch.no_grad()
def _look_up_alike(made: Policy) -> None:
    """Assert that an embedding's adapter gives the same where kernels must be deterministic."""
    for one in (lora for chunk in made.chunks for lora in chunk.modules() if isinstance(lora, EmbeddingLora)):
        tokens = torch.arange(made.arch.vocab_size // 4 * 4)[None]  # as many for each of the ranks that share them
        plain = one(tokens)
        one._deterministic = True
        assert torch.equal(plain, one(tokens)) and bool(plain.any())
        one._deterministic = False


def adapters_saved(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """Adapters after two steps, where they are saved with a moving reference, and after two more."""
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    reference = Reference(made)
    _learn(made, settings, reference)
    reference.refresh(made, 0.25)
    _learn(made, settings, reference)
    Saver(made, background=False, reference=reference.weights).save(_empty(Path(folder), ranks), lambda known: None)
    barrier(ranks.device)
    return _adapters(made, settings, reference)


def adapters_loaded(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """The same from what another case has saved, and what is said where one number of the base is another."""
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    reference = Reference(made)
    sharded.load(made, Path(folder), reference.weights)
    found = _adapters(made, settings, reference)
    if ranks.rank == 0:
        other = Path(tempfile.mkdtemp()) / "other"
        shutil.copytree(model, other)
        weights = load_file(other / "model.safetensors")
        weights["model.norm.weight"][0] += 0.1
        save_file(weights, other / "model.safetensors", {"format": "pt"})
    made.load(broadcast_bytes(str(other).encode() if ranks.rank == 0 else b"", ranks.device).decode())
    try:
        sharded.load(made, Path(folder), reference.weights)
    except ValueError as error:
        found["refused"] = np.array([str(error)])
    return found


def adapters_exported(model: str, world: int, folder: str, out: str, **sections: Any) -> Arrays:
    """Convert what ranks have saved of adapters into a folder of peft and a merged one, and that folder back."""
    settings = config(model, world, **sections)
    start(settings)
    arch, shards, alone, again = (
        architecture.read(model),
        Path(folder) / "megatron",
        f"{out}-peft",
        Path(f"{out}-again"),
    )
    adapters.to_peft(shards, arch, settings, Path(alone))
    adapters.to_hugging_face(shards, arch, settings, Path(out))
    other = Path(shutil.copytree(model, f"{out}-other-base"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 0.1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    beside = schema.replace(settings, model=schema.replace(settings.model, path=str(other)))
    refused = []
    for write in (adapters.to_peft, adapters.to_hugging_face):
        try:
            write(shards, arch, beside, Path(f"{out}-of-another"))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) == 2 and all("has other weights than those that this run's adapters" in one for one in refused)
    again.mkdir()
    found = peft_folder.settings(Path(alone))
    adapters.from_peft(arch, schema.replace(settings, adapter=found), again)
    whole, _ = adapters.read(again, arch, settings)
    assert adapters.settings(again, None) == schema.replace(found, path=None)
    files = [f"again/{name}" for name in whole]
    arrays = dict(zip(files, (one.float().numpy() for one in whole.values()), strict=True))
    stored = load_file(Path(alone) / "adapter_model.safetensors")
    arrays |= {f"peft/{name}": one.float().numpy() for name, one in stored.items()}
    source = hf_folder.Folder(out)
    return arrays | {f"merged/{name}": source.read(name).float().numpy() for name in sorted(source.names())}


def adapters_merged(model: str, world: int, **sections: Any) -> Arrays:
    """Bytes that a sync takes at its worst moment, and of that the memory that weights are gathered into."""
    made, ranks = policy(config(model, world, **sections))
    memory = Scratch(ranks.device)
    with Storages(least=4096) as storages:
        for _ in made.parts(memory):
            pass
    return {"taken": np.array([storages.peak, memory.allocate(0).untyped_storage().nbytes()])}


def _adapters(made: Policy, settings: Config, reference: Reference) -> Arrays:
    """Adapters and those of the reference, and where two steps lead."""

    def present(which: str) -> Arrays:
        return {f"{which}/{name}": whole.cpu().numpy().copy() for name, whole in made.adapter_matrices()}

    with sharded._swapped_in(made, reference.weights):
        found = present("reference")
    found |= present("saved")
    _learn(made, settings, reference)
    return found | present("after")


def _learn(made: Policy, settings: Config, reference: Reference) -> None:
    """Two steps with a divergence from the reference."""
    objective = algorithms.resolve(settings.algorithm)
    for _ in range(2):
        rollout = reference.with_logprobs(made, spread(made), settings)
        assert update.step(made, rollout, objective, settings) is not None


def _adapter_gradients(made: Policy, step: Callable[[], object]) -> Arrays:
    """Gradients of all adapters in a step that takes place but for its end."""

    def keep(policy: Policy) -> tuple[float, bool]:
        if policy.config.optimizer.distributed:
            _gather_gradients(policy)
        found.update(
            (f"gradient/{name}", whole.cpu().numpy().copy())
            for name, whole in matrices.whole_matrices(
                policy.chunks, policy.arch, policy.config.adapter, lambda parameter: parameter.main_grad
            )
        )
        return 0.0, True

    found: Arrays = {}
    original, schedule._apply = schedule._apply, keep
    try:
        step()
    finally:
        schedule._apply = original
    return found


def taught(model: str, world: int, teacher: str, **sections: Any) -> Arrays:
    """Log-probs of a teacher of another size, losses and gradients that follow it alone and beside advantages, at the
    weights that sampled and after a step; and the bytes of its weights and of the policy's on each rank."""
    learning = {"teacher": teacher, "kl_beta": 0.7}
    settings = config(model, world, **sections, algorithm={"clip_low": 0.5, "clip_high": 0.5} | learning)
    ranks = start(settings)
    its = Teacher(settings, ranks)
    made = Policy(architecture.read(model), settings, ranks)
    made.load(model)
    made.make_optimizer()
    objective = algorithms.resolve(settings.algorithm)
    mixed = spread(made)
    alone = spread(
        made, [g.with_completions(tuple(replace(c, advantage=0.0) for c in g.completions)) for g in groups()]
    )
    arrays: Arrays = {"weights": np.array(its._model.held()["weights"]), "own": np.array(made.held()["weights"])}
    arrays["fingerprint"] = np.frombuffer(its.fingerprint.encode(), np.uint8).astype(np.float64)
    for name, rollout in (("alone", alone), ("mixed", mixed)):
        rollout = its.with_logprobs(made, rollout, settings)
        if name == "alone":
            found = {(s, i): c.reference_logprobs for s, g in rollout.own.items() for i, c in enumerate(g.completions)}
            arrays |= {f"logprobs/{slot}-{index}": array for (slot, index), array in everywhere(found).items()}
        arrays |= {f"{name}/{key}": value for key, value in _first_step(made, rollout, objective, settings).items()}
    alone = its.with_logprobs(made, alone, settings)
    rates = []
    for _ in range(6):
        result = update.step(made, alone, objective, settings)
        assert result is not None and not result.skipped
        rates.append(result.sums["reference_kl"][0] / result.sums["reference_kl"][1])
    arrays["divergences"] = np.array(rates)
    return arrays


def _first_step(made: Policy, rollout: ShardedGroups, objective: Objective, settings: Config) -> Arrays:
    """Gradients of a step that takes place but for its end, its loss, and the divergence from the reference."""
    results: list[StepResult | None] = []
    gradients = _adapter_gradients if made.has_adapters else _gradients
    found = gradients(made, lambda: results.append(update.step(made, rollout, objective, settings)))
    (result,) = results
    assert result is not None
    return found | {
        metric: np.array(result.sums[metric][0] / result.sums[metric][1]) for metric in ("loss", "reference_kl")
    }


OBJECTIVES: dict[str, dict[str, Any]] = {  # every part of an objective that sums over tokens, prompts or ranks
    "cispo": {"name": "cispo", "clip_high": 0.02},
    "dppo": {"name": "dppo", "clip_low": 0.001, "clip_high": 0.001},
    "sapo": {"name": "sapo"},
    "gmpo": {"name": "gmpo", "clip_low": 0.03, "clip_high": 0.03, "correction": "truncated"},
    "dr_grpo": {"name": "dr_grpo", "dual_clip": 1.3},
    "prompt": {"name": "grpo", "aggregation": "prompt", "kl_beta": 0.1, "kl_estimator": "unbiased"},
    "masked": {"name": "dapo", "correction": "masked", "correction_low": 0.97, "correction_high": 1.03},
    "rejection": {"correction": "rejection", "clip_low": 0.5, "clip_high": 0.5},
    "entropy": {"name": "dapo", "entropy_coef": 0.05},
    "sequence_mask": {"clip_low": 0.5, "clip_high": 0.5, "sequence_mask": 0.001},
}


def objectives(model: str, world: int, **sections: Any) -> Arrays:
    """Losses and gradients of one update by every objective, with log-probs near the model's own."""
    settings = config(model, world, **sections)
    made, _ = policy(settings)
    rollout = spread(made)
    passed = update.logprob_pass(made, rollout, "old_logprobs", settings).logprobs
    rng = {key: np.random.default_rng(key) for key in passed}

    def near(change: Callable[[Any, Any], Any]) -> None:
        nonlocal rollout
        noisy = {key: v + rng[key].normal(0, 0.05, len(v)).astype(np.float32) for key, v in sorted(passed.items())}
        rollout = update.with_values(rollout, noisy, change)

    near(lambda c, v: replace(c, old_logprobs=v))
    near(lambda c, v: replace(c, logprobs=v))
    near(lambda c, v: replace(c, reference_logprobs=v))
    arrays: Arrays = {}
    top = config(model, world, **sections, algorithm={"name": "gspo_token", "top_entropy_quantile": 0.3})
    chosen = update.with_old_logprobs(made, rollout, rollout.at([]), top)
    flags = {(slot, i): c.selected for slot, group in chosen.own.items() for i, c in enumerate(group.completions)}
    selected = everywhere(flags)
    entropies = everywhere(update.logprob_pass(made, rollout, "old_logprobs", settings, entropies=True).entropies)
    arrays["top_entropy/selected"] = np.concatenate([selected[key] for key in sorted(selected)])
    arrays["top_entropy/entropies"] = np.concatenate([entropies[key] for key in sorted(entropies)])
    for name, keys in (OBJECTIVES | {"top_entropy": top.algorithm.model_dump()}).items():
        objective = algorithms.resolve(from_dict({"algorithm": keys}).algorithm)
        given = chosen if name == "top_entropy" else rollout
        results: list[StepResult | None] = []

        def step(given: ShardedGroups = given, o: Objective = objective, r: list[StepResult | None] = results) -> None:
            r.append(update.step(made, given, o, settings))

        found = _gradients(made, step)
        arrays[f"{name}/gradient"] = np.concatenate([found[key].ravel() for key in sorted(found)])
        (result,) = results
        assert result is not None
        for metric in ("loss", "ratio", "clip_fraction"):
            arrays[f"{name}/{metric}"] = np.array(result.sums[metric][0] / result.sums[metric][1])
    return arrays


def exchanged(model: str, world: int, known: bool, **sections: Any) -> Arrays:
    """What `steps` returns, with the number of shapes sent ahead and of exchanges, seconds of the former and of all.

    `known`: stages know the shapes; else they ask each other, as Megatron does by itself.
    """
    shapes, communicate = P2PCommunicator._communicate_shapes, P2PCommunicator._communicate
    counts, seconds = [0, 0], 0.0

    def ask(self: Any, *arguments: Any) -> Any:
        nonlocal seconds
        counts[0] += 1
        began = time.perf_counter()
        found = shapes(self, *arguments)
        seconds += time.perf_counter() - began
        return found

    def count(self: Any, **arguments: Any) -> Any:
        counts[1] += 1
        return communicate(self, **arguments)

    own = compat.known_shapes if known else lambda previous, following: contextlib.nullcontext()
    began = time.perf_counter()
    with (
        mock.patch.object(P2PCommunicator, "_communicate_shapes", ask),
        mock.patch.object(P2PCommunicator, "_communicate", count),
        mock.patch.object(compat, "known_shapes", own),
    ):
        arrays = steps(model, world, **sections)
    return arrays | {"counts": np.array(counts), "time": np.array([seconds, time.perf_counter() - began])}


def scheduled(model: str, world: int, **sections: Any) -> Arrays:
    """The learning rates of four steps: one that moves the weights, one skipped, one empty, and another that moves."""
    settings = config(model, world, run={"max_steps": 4}, optimizer={"lr": 1e-4, "lr_decay_style": "linear"})
    made, _ = policy(settings)
    objective = algorithms.resolve(settings.algorithm)
    rollout = groups()
    empty = [g.with_completions(tuple(replace(c, advantage=0.0) for c in g.completions)) for g in rollout]
    rates: list[float] = []
    skipped: list[bool | None] = []
    for batch in (spread(made, part) for part in (rollout, rollout, empty, rollout)):
        rates.append(float(made.optimizer.param_groups[0]["lr"]))
        if len(rates) == 2:
            _poison(made)
        result = update.step(made, batch, objective, settings)
        skipped.append(None if result is None else result.skipped)
    assert skipped == [False, True, None, False], skipped
    return {"rates": np.array(rates)}


def _gradients(made: Policy, step: Callable[[], object]) -> Arrays:
    """Gradients of all Hugging Face tensors in a step that takes place but for its end: put into the place of the
    weights, they are gathered like them."""
    kept = [parameter.detach().clone() for parameter in made.parameters()]

    def keep(policy: Policy) -> tuple[float, bool]:
        if policy.config.optimizer.distributed:
            _gather_gradients(policy)
        for parameter in policy.parameters():
            parameter.data.copy_(parameter.main_grad)
        return 0.0, True

    original, schedule._apply = schedule._apply, keep
    try:
        step()
    finally:
        schedule._apply = original
    found = {f"gradient/{name}": t.float().cpu().numpy().copy() for name, t in made.stream()}
    for parameter, values in zip(made.parameters(), kept, strict=True):
        parameter.data.copy_(values)
    return found


def _gather_gradients(policy: Policy) -> None:
    """Have all of every gradient on all ranks, of which each has the part that its optimizer keeps the state of."""
    for wrapped in policy.wrapped:
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                parts = bucket.grad_data.view(group.size(), -1)
                dist.all_gather_into_tensor(bucket.grad_data, parts[group.rank()].clone(), group=group)


def _abandon(ranks: Ranks, rank: int, settings: Config, work: Callable[[PassMonitor], object]) -> None:
    """This rank leaves the work, with all others, once `rank` has computed one of several micro-batches; before the
    first of them where communication overlaps with the passes."""
    asked, computed = 0, 0 if settings.parallel.overlap_grad_reduce else 1

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return ranks.rank == rank and asked > computed

    try:
        work(PassMonitor(stop))
        raise AssertionError("it went on to the end")
    except Abandoned:
        assert asked > computed, "there was only one micro-batch"


def _poison(made: Policy) -> None:
    """One NaN in the gradient of the final norm of this rank, in the next backward pass."""
    parameter = made.chunks[-1].decoder.final_layernorm.weight
    handle = parameter.register_hook(lambda grad: (handle.remove(), torch.full_like(grad, float("nan")))[1])


def roundtrip(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """Weights after 2 + 2 steps, straight through and with a save and a load into a fresh policy in between."""
    shared_optimizer.SAVE_TRANSIT_BYTES = (
        10_000  # so little that the state of a shared optimizer travels in many batches
    )
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    objective = algorithms.resolve(settings.algorithm)
    rollout = spread(made)

    def advance(which: Policy) -> None:
        for _ in range(2):
            assert update.step(which, rollout, objective, settings) is not None

    advance(made)
    if settings.optimizer.distributed:  # else one of them would have nothing to exchange
        parts = made.optimizer.chained_optimizers
        assert all(any(len(share.pieces) > 1 for share in shared_optimizer.shares(part)) for part in parts)
    saver = Saver(made)
    saver.save(_empty(Path(folder), ranks), lambda known: None)
    saver.wait()
    # The first of the steps to come finds a copy that nobody has begun, and ranks that have exchanged nothing.
    with saves.held() as gate, saves.counted() as batches:
        saver.save(_empty(Path(folder), ranks), lambda known: None)  # into the memory that the first has used
        assert update.step(made, rollout, objective, settings) is not None
        assert not batches, "the loop has waited for other ranks"
        gate.set()
        assert update.step(made, rollout, objective, settings) is not None  # while it is written
        saver.wait()
        assert bool(batches) == settings.optimizer.distributed
    barrier(ranks.device)
    straight = {f"straight/{name}": t.float().clone().numpy() for name, t in made.stream()}
    fresh = Policy(made.arch, settings, ranks)
    fresh.make_optimizer()
    sharded.load(fresh, Path(folder))
    advance(fresh)
    return straight | {f"resumed/{name}": t.float().clone().numpy() for name, t in fresh.stream()}


def short_of_disk(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """Errors of saves where one rank's disk fills up while others need its pieces; see :mod:`tests.gloo.saves`."""
    shared_optimizer.SAVE_TRANSIT_BYTES = 10_000
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    assert update.step(made, spread(made), algorithms.resolve(settings.algorithm), settings) is not None
    return saves.short_of_disk(made, lambda: _empty(Path(folder), ranks))


def saved(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """Weights after two steps, where they are saved with a moving reference, and after two more."""
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    reference = Reference(made)
    _two_steps(made, settings)
    reference.refresh(made, 0.25)
    Saver(made, background=False, reference=reference.weights).save(_empty(Path(folder), ranks), lambda known: None)
    barrier(ranks.device)
    return _of_reference(made, reference) | _before_and_after(made, settings)


def loaded(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """The same from what another case has saved, by ranks of another layout."""
    settings = config(model, world, **sections)
    ranks = start(settings)
    made = Policy(architecture.read(model), settings, ranks)
    made.make_optimizer()
    reference = Reference(made)
    sharded.load(made, Path(folder), reference.weights)
    return _of_reference(made, reference) | _before_and_after(made, settings)


def probed(model: str, world: int, engine_ranks: int = 1, **sections: Any) -> Arrays:
    """What the probe says of weights that two steps have changed and that were then sent into an engine of rank 0, of
    `engine_ranks` tensor-parallel workers."""
    settings = config(model, world, rollout={"tensor_parallel_size": engine_ranks}, **sections)
    made, ranks = policy(settings)
    probe = np.random.default_rng(1).integers(0, 90, (4, 12)).tolist()
    weight_sync = sync.WeightSync(made, probe)
    fingerprint, _ = weight_sync.push(None)  # of the folder's weights
    _two_steps(made, settings)
    _probes.append(model)
    with torch.no_grad():
        for parameter in made.parameters():  # so that no two layouts have the same: all make the same steps
            parameter *= 1.0 + 0.02 * len(_probes)
    engine = _engine(model, engine_ranks) if ranks.rank == 0 else None
    with contextlib.suppress(probing.ProbeMismatch):  # of the weights that the engine has so far
        probing.check(made, engine, probe, None)
        raise AssertionError("the engine has these weights before it was given them")
    synced, death = weight_sync.run(engine)
    assert death is None
    sums = made.expert_sums()
    compared = np.zeros((0, 4))
    if sums is not None and engine is not None:
        held = engine.expert_sums(*sums.shape[:2])
        compared = (held / sums).reshape(-1, 4)
    found = {"gap": np.array([synced.gap.max, synced.gap.mean]), "fingerprint": np.array(fingerprint)}
    return found | {"experts": compared}


def slept(model: str, world: int, level: int) -> Arrays:
    """The trainer's own syncs around a sleep, with weights that nothing changes in between, and an engine of rank 0:
    how often they were pushed, what it says on the probe, and whether it would have said anything without a push."""
    settings = config(model, world, rollout={"sleep_level": level})
    made, ranks = policy(settings)
    _two_steps(made, settings)
    engine = _engine(model, 1) if ranks.rank == 0 else None
    probe = np.random.default_rng(1).integers(0, 90, (4, 12)).tolist()
    worker: Any = SimpleNamespace(engine=engine, recovery=None)
    meter: Any = SimpleNamespace(phase=lambda name: contextlib.nullcontext())
    clock = StepClock(meter, PassMonitor(), profile_steps=(), traces=Path(), rank=ranks.rank)
    engine_weights = sync.EngineWeights(sync.WeightSync(made, probe, clock.monitor), worker, clock)
    pushes = []
    parts = made.parts
    made.parts = lambda *args: pushes.append(1) or parts(*args)  # every rank takes part in a push
    fingerprints, counts = [], []

    def synced() -> list[np.ndarray]:
        fingerprints.append(engine_weights.sync().fingerprint)
        counts.append(len(pushes))
        return engine.prompt_logprobs(probe) if engine is not None else []

    first, again = synced(), synced()
    engine_weights.sleep()
    refused = False
    try:
        if engine is not None:
            engine.prompt_logprobs(probe)
    except RuntimeError:
        refused = True
    after = synced()
    same = [np.array_equal(a, b) and np.array_equal(a, c) for a, b, c in zip(first, again, after, strict=True)]
    assert len(set(fingerprints)) == 1
    return {"pushes": np.array(counts), "refused": np.array(refused), "same": np.array(same)}


_engines: dict[tuple[str, int], Engine] = {}
_probes: list[str] = []


def _engine(model: str, size: int) -> Engine:
    """One of this model, kept for the cases to come."""
    if (model, size) not in _engines:
        settings = EngineSettings(
            model_path=model, tensor_parallel_size=size, max_model_len=64, kv_cache_gb=0.1, threads=1
        )
        _engines[model, size] = Engine(settings)
        _engines[model, size].start()
    return _engines[model, size]


def _two_steps(made: Policy, settings: Config) -> None:
    objective = algorithms.resolve(settings.algorithm)
    for _ in range(2):
        assert update.step(made, spread(made), objective, settings) is not None


def _of_reference(made: Policy, reference: Reference) -> Arrays:
    """The reference's weights, by the way of the policy's own."""
    own = [parameter.detach().clone() for parameter in made.parameters()]
    with torch.no_grad():
        for parameter, weight in zip(made.parameters(), reference.weights, strict=True):
            parameter.copy_(weight)
        found = {f"reference/{name}": t.clone().numpy() for name, t in made.stream()}
        for parameter, weight in zip(made.parameters(), own, strict=True):
            parameter.copy_(weight)
    return found


def _before_and_after(made: Policy, settings: Config) -> Arrays:
    before = {f"saved/{name}": t.clone().numpy() for name, t in made.stream()}
    _two_steps(made, settings)
    return before | {f"after/{name}": t.clone().numpy() for name, t in made.stream()}


def _empty(folder: Path, ranks: Ranks) -> Path:
    """The folder without what is in it, once all ranks have come this far."""
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    barrier(ranks.device)
    return folder


def lent(model: str, world: int, **sections: Any) -> Arrays:
    """Weights after two steps between which the memory is lent again and again, and what that has freed. The
    optimizer's state is on the ranks while they go forward and back, or not, as configured."""
    settings = config(model, world, **sections)
    parts = settings.memory.offload_parts
    made, ranks = policy(settings)
    objective = algorithms.resolve(settings.algorithm)
    rollout = update.with_old_logprobs(made, spread(made), spread(made), settings)
    freed = []
    for _ in range(2):
        freed.append(made.offload())
        empty = sum(p.untyped_storage().nbytes() for p in made.parameters())
        assert (empty == 0) == ("weights" in parts), empty
        update.logprob_pass(made, rollout, "old_logprobs", settings)  # with the weights alone
        assert made.state_offload.is_offloaded == ("optimizer" in parts)
        assert made.gradient_offload.is_offloaded == ("gradients" in parts)
        assert not made.weight_offload.is_offloaded
        freed.append(made.offload())
        aside: list[bool] = []

        def note(aside: list[bool] = aside) -> bool:
            """Called before every micro-batch."""
            aside.append(made.state_offload.is_offloaded)
            return False

        assert update.step(made, rollout, objective, settings, monitor=PassMonitor(note)) is not None
        assert set(aside) == {settings.memory.offload_optimizer}, aside
        assert made.state_offload.is_offloaded == settings.memory.offload_optimizer
        freed.append(made.offload())
        made.offload()  # what is offloaded can be offloaded again
    held = sum(p.nbytes for p in made.parameters())
    return {name: tensor.float().numpy().copy() for name, tensor in made.stream()} | {
        "freed": np.array(freed),
        "held": np.array([held]),
    }


def streamed(model: str, world: int, **sections: Any) -> Arrays:
    """How much memory it takes to look at all weights in turn, in bytes, on the rank that it takes most."""
    made, ranks = policy(config(model, world, **sections))
    device = Accelerator(ranks.device)
    grown = []
    for _ in range(2):  # the first time, connections take some
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before is not there to be used again
        barrier(ranks.device)
        device.reset_peak()
        before = device.peak_memory()
        total = sum(tensor.nbytes for _, tensor in made.stream())
        grown.append(device.peak_memory() - before)
    value = torch.tensor(grown[1:])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return {"grown": value.numpy(), "total": np.array([total])}


def shared_peaks(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """Host memory that a save and a load of a shared optimizer take at their peaks, in bytes, on the rank that takes
    most; of the save beside the copy that is kept. Then its part of the optimizer's state in that copy, the state of
    all ranks, and what may travel at a time."""
    shared_optimizer.SAVE_TRANSIT_BYTES = transit = 4 << 20
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    objective = algorithms.resolve(settings.algorithm)
    assert update.step(made, spread(made), objective, settings) is not None  # moments that are in memory
    device, group, copies = Accelerator(ranks.device), dist.new_group(backend="gloo"), sharded.Copies()

    def grown(work: Callable[[], object]) -> int:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        barrier(ranks.device)
        device.reset_peak()
        before = device.peak_memory()
        work()
        barrier(ranks.device)
        return device.peak_memory() - before

    for _ in range(2):  # the first time, connections and the copy take some
        staging = _empty(Path(folder), ranks)
        found = [grown(lambda to=staging: sharded.prepare(made, to, group, copies)())]
    owned = sum(t.nbytes for (name, *_), t in copies._tensors.items() if name.endswith((".exp_avg", ".exp_avg_sq")))
    whole = 2 * sum(parameter.numel() * 4 for parameter in made.parameters())
    found.append(grown(lambda: sharded.load(made, Path(folder))))
    value = torch.tensor([*found, owned, whole, transit])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return {"bytes": value.numpy()}


LENGTHS = (1024, 2048, 4096)  # tokens


def long(model: str, world: int, **sections: Any) -> Arrays:
    """How much memory the log-prob pass and the update take for samples of LENGTHS tokens, in bytes."""
    settings = config(model, world, batch={"micro_batch_tokens": 8192}, **sections)
    made, ranks = policy(settings)
    objective, device = algorithms.resolve(settings.algorithm), Accelerator(ranks.device)
    grown: dict[str, list[int]] = {"logprobs": [], "update": []}
    for length in (LENGTHS[0], *LENGTHS):  # the first time, memory is found that the others use again
        (group,) = groups(count=1, samples=2)
        one, other = group.completions
        tokens = np.random.default_rng(length).integers(0, 90, length).astype(np.int32)
        one = replace(one, tokens=tokens, logprobs=np.full(length, -4.0, np.float32), advantage=1.0)
        rollout = spread(made, [group.with_completions((one, replace(other, advantage=-1.0)))])
        for name, work in (
            ("logprobs", lambda rollout=rollout: update.logprob_pass(made, rollout, "old_logprobs", settings)),
            ("update", lambda rollout=rollout: update.step(made, rollout, objective, settings)),
        ):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            device.reset_peak()
            before = device.peak_memory()
            work()
            grown[name].append(device.peak_memory() - before)
    return {name: np.array(values[1:]) for name, values in grown.items()}


def kept(model: str, world: int, fused: bool = False, **sections: Any) -> Arrays:
    """Bytes that autograd keeps of one micro-batch of one long sample, on each rank, and its tokens; and the stage.

    With `fused` SwiGLU is Megatron's function for GPUs, which runs here as it is written, without a compiler.
    """
    settings = config(model, world, batch={"micro_batch_tokens": 4096, "global_batch_size": 2}, **sections)
    with mock.patch.object(model_building, "fuses_swiglu", lambda config: fused or fuses_swiglu(config)):
        made, _ = policy(settings)
    (group,) = groups(count=1, samples=2)
    one, other = group.completions
    tokens = np.random.default_rng(3).integers(0, 90, 1000).astype(np.int32)
    one = replace(one, tokens=tokens, logprobs=np.full(1000, -4.0, np.float32), advantage=1.0)
    rollout = spread(
        made, [group.with_completions((one, replace(other, advantage=0.0)))]
    )  # the other one is not computed
    weights = {p.untyped_storage().data_ptr() for p in made.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and torch._C._current_graph_task_id() < 0:  # not what is computed again
            found[storage.data_ptr()] = storage  # held, so that no other comes to the same place
        return tensor

    uncompiled = torch.compiler.set_stance("force_eager") if fused else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), uncompiled:
        assert update.step(made, rollout, algorithms.resolve(settings.algorithm), settings) is not None
    total = sum(storage.nbytes() for storage in found.values())
    stage = parallel_state.get_pipeline_model_parallel_rank()
    every = [torch.empty(2, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(every, torch.tensor([stage, total]))
    return {"kept": torch.stack(every).numpy(), "tokens": np.array([len(group.prompt.tokens) + 999])}


def converted(model: str, world: int, folder: str, **sections: Any) -> Arrays:
    """How much memory it takes to make a checkpoint of a model, and a Hugging Face folder of that, in bytes."""
    settings = config(model, world, **sections)
    ranks = start(settings)
    arch, device = architecture.read(model), Accelerator(ranks.device)
    shards = Path(folder) / "checkpoint" / "megatron"
    shards.mkdir(parents=True)
    grown = []
    for work in (
        lambda: hugging_face.from_hugging_face(arch, settings, shards),
        lambda: hugging_face.to_hugging_face(shards, arch, settings, Path(folder) / "again"),
    ):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        device.reset_peak()
        before = device.peak_memory()
        work()
        grown.append(device.peak_memory() - before)
    return {"grown": np.array(grown), "dtype": np.array([hugging_face.dtype_of(shards)])}


def to_folder(model: str, world: int, folder: str, out: str) -> Arrays:
    """What ranks of any layout have saved as a Hugging Face folder; and what is said of another model's checkpoint."""
    settings = config(model, world)
    start(settings)
    arch = architecture.read(model)
    shards = Path(folder) / "megatron"
    hugging_face.to_hugging_face(shards, arch, settings, Path(out))
    said = []
    for other in (replace(arch, qk_norm=not arch.qk_norm), replace(arch, num_layers=arch.num_layers * 2)):
        with contextlib.suppress(ValueError):
            hugging_face.to_hugging_face(shards, other, settings, Path(f"{out}-other"))
            said.append("it did not refuse")
    assert not Path(f"{out}-other").exists()
    return {"said": np.array(said)}


def full(model: str, world: int, folder: str) -> Arrays:
    """Whether a save that finds no room says so in one line: files may have no more than a page here."""
    made, _ = policy(config(model, world))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        Saver(made, background=False).save(Path(folder), lambda known: None)
        said = ""
    except OSError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return {"said": np.array([said])}


def held(model: str, world: int, **sections: Any) -> Arrays:
    """The stage of each rank, its bytes of weights, gradients and optimizer after a step, and those that it copies for
    a save in the background: [ranks, 5]; and those of a reference and of what waits while it computes: [ranks]."""
    settings = config(model, world, **sections)
    made, ranks = policy(settings)
    rollout, beside, saved = spread(made), 0, None
    if settings.algorithm.kl_beta > 0:
        reference = Reference(made)
        rollout = reference.with_logprobs(made, rollout, settings)
        beside = sum(tensor.nbytes for tensor in (*reference.weights, *(reference._current or ())))
        saved = moving(reference, settings)
    assert update.step(made, rollout, algorithms.resolve(settings.algorithm), settings) is not None
    kept = made.held()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    copies, staging = sharded.Copies(), broadcast_bytes(tempfile.mkdtemp().encode(), ranks.device).decode()
    sharded.prepare(made, Path(staging), dist.new_group(backend="gloo"), copies, reference=saved)
    copied = sum(tensor.nbytes for tensor in copies._tensors.values())
    mine = torch.tensor([stage, *(kept[kind] for kind in ("weights", "gradients", "optimizer")), copied, beside])
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)
    found = torch.stack(every).numpy()
    return {"held": found[:, :5], "beside": found[:, 5]}


def same(model: str, world: int, **sections: Any) -> Arrays:
    """Which tensors of the folder do not come back bit for bit, and how many there are."""
    made, _ = policy(config(model, world, **sections))
    source = hf_folder.Folder(model)
    streamed = [(name, torch.equal(tensor, source.read(name))) for name, tensor in made.stream()]
    missing = source.names() - {name for name, _ in streamed}
    different = sorted(missing | {name for name, equal in streamed if not equal})
    return {"different": np.array(different), "count": np.array([len(streamed)])}


def exported(model: str, world: int, **sections: Any) -> Arrays:
    """Every Hugging Face tensor after a load: equal to the file bit for bit."""
    made, ranks = policy(config(model, world, **sections))
    found = {name: tensor.cpu().numpy().copy() for name, tensor in made.stream()}
    # Bytes: every parameter by itself, and some together; experts of all ranks, of a rank, and kinds of their tensors.
    for limit in ((1, None), (20_000, None), (20_000, 40_000), (20_000, 25_000), (1, 1)):
        memory = Scratch(ranks.device)
        parts = (part for parts in weights.stream(made.chunks, made.arch, memory, *limit) for part in parts)
        again = {name: tensor.cpu().numpy().copy() for part in parts for name, tensor in _in_place(part, memory)}
        assert again.keys() == found.keys() and all(np.array_equal(again[name], found[name]) for name in found), limit
    return found


def taken(model: str, world: int, half: int, **sections: Any) -> Arrays:
    """In which order weights are gathered, posted and loaded with two halves of so many bytes, and what arrives."""
    made, _ = policy(config(model, world, **sections))
    return turns.run(made, half)


def _in_place(part: Part, memory: Scratch) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a part, whose elements a worker must be able to see in the memory."""
    assert part.tensor.untyped_storage().data_ptr() == memory.allocate(0).untyped_storage().data_ptr(), part.name
    return part.tensors()


def metered(model: str, world: int) -> Arrays:
    """What the meter says of a step before which rank 1 sleeps within the phase: rank 0 waits for it."""
    settings = config(model, world)
    made, ranks = policy(settings)
    meter = Meter(CollectiveTime("cpu"), Accelerator(ranks.device), ranks.device)
    meter.begin(watch_memory=True)
    rollout, objective = spread(made), algorithms.resolve(settings.algorithm)
    monitor = PassMonitor()
    barrier(ranks.device)
    with meter.phase("update"):
        if ranks.rank == 1:
            time.sleep(1.0)
        assert update.step(made, rollout, objective, settings, monitor=monitor) is not None
    measured = meter.measured(monitor.counts["update"].flops)
    share = measured.shares["update"]
    assert measured.table(3).splitlines()[1].split()[0] == "update"
    return {
        "phases": np.array(list(measured.shares)),
        "share": np.array([share.seconds, share.computing, share.communicating, share.waiting, share.peak_memory]),
        "metrics": np.array(sorted(measured.metrics())),
        "flops": np.array([monitor.counts["update"].flops, measured.flops_per_second * share.seconds]),
    }


def awaited(model: str, world: int) -> Arrays:
    """Rank 0 looks for a checkpoint until rank 1 is known to wait for it, and says so."""
    ranks = start(config(model, world))
    seen = []

    def watch() -> None:
        while progress.marks()[2] != progress.WAITS:
            time.sleep(0.01)
        store().set("rank 1 waits", "")

    def slow(root: Path, *, put_aside: bool, verify: Any) -> tuple[None, list[str]]:
        store().wait(["rank 1 waits"], datetime.timedelta(seconds=60))
        seen.append(progress.marks()[2])
        return None, []

    barrier(ranks.device)
    if ranks.rank == 1:
        threading.Thread(target=watch, daemon=True).start()
    with mock.patch.object(commit, "newest_whole", slow):
        found = train.newest_checkpoint(RunDir("/nowhere"), ranks, Console(sys.stderr, 1))
    return {"found": np.array(str(found)), "rank 0": np.array([str(seen[0] if seen else ""), str(progress.marks()[2])])}


def verified(model: str, world: int, folder: str) -> Arrays:
    """The checkpoint that a run resumes from, where the newest is damaged in a file that rank 1 reads; what rank 0 says
    of it; and how often each rank hashes a file of the two."""
    ranks = start(config(model, world))
    run = RunDir(folder)
    if ranks.rank == 0:
        for step in (1, 2):
            staging = commit.begin(run.checkpoints, step)
            for number in range(5):
                (staging / f"shard-{number}").write_bytes(bytes(100 - number))
            commit.commit(staging, step)
        (run.checkpoints / "000002" / "shard-1").write_bytes(bytes(98) + b"1")
    barrier(ranks.device)
    console = mock.Mock()
    with mock.patch.object(commit, "_hash_in_steps", side_effect=commit._hash_in_steps) as hashed:
        found = train.newest_checkpoint(run, ranks, console)
    mine = json.dumps([ranks.rank, len(hashed.call_args_list)]).encode()
    counts = [count for _, count in sorted(json.loads(one) for one in gather_unordered(ranks.exchange.transport, mine))]
    warned = [str(call.args[0]) for call in console.warn.call_args_list]
    return {"found": np.array(str(found and found.name)), "warned": np.array(warned), "hashed": np.array(counts)}


def mismatched(model: str, world: int) -> Arrays:
    """Errors of the gate for faults that are planted in an engine, in bfloat16, and for rounded logits."""
    made, _ = policy(config(model, world, "bfloat16"))
    found = mismatches.run(made, model, "bfloat16") | mismatches.rounded_in_16_bits(made, model)
    found |= mismatches.with_overrides(made, model)
    drop_layout()
    made, _ = policy(config(model, world))
    return found | mismatches.rounded(made, model)


def gate(model: str, world: int) -> Arrays:
    """Errors of the gate for faults that are planted in an engine of a trained model, in bfloat16."""
    made, _ = policy(config(model, world, "bfloat16"))
    return mismatches.of_trained(made, model)


def beside(model: str, world: int, **sections: Any) -> Arrays:
    """Gaps of syncs in which adapters go beside an engine's weights, and of one in which they are merged into them."""
    made, _ = policy(config(model, world, **sections))
    return adapters_beside.run(made)


def ordered(model: str, world: int) -> Arrays:
    """Sums in the order of the ranks beside gloo's own, and three steps that are made with them."""
    ranks = start(config(model, world))
    found = {"sums": np.array(sums.compare(ranks.rank, world))}
    drop_layout()
    with sums.in_order():
        split = {"optimizer": {"distributed": True}, "parallel": {"tensor_model_parallel_size": 1}}
        return found | steps(model, world, **split)


def _empty_models() -> None:
    """Take from Megatron's wrappers of models that are no longer in use what they hold, their process groups above all.

    The hooks that they put on the gradients of parameters keep them alive, where Python's collector does not look. Each
    group has a thread that wakes a hundred times a second: those of all cases took half of the processors in the end.
    """
    for one in [found for found in gc.get_objects() if isinstance(found, DistributedDataParallel)]:
        vars(one).clear()


def main() -> None:
    """All cases of one file of work on this rank, in turn; rank 0 writes one .npz a case."""
    gc.freeze()  # what the imports made: half of a case's processor time went into collections over it
    begun: set[str] = set()
    functions: dict[str, Callable[..., Arrays]] = {
        f.__name__: f
        for f in (
            logprobs,
            routed,
            shaken,
            steps,
            objectives,
            adapted,
            adapters_saved,
            adapters_loaded,
            adapters_merged,
            adapters_exported,
            taught,
            exchanged,
            scheduled,
            roundtrip,
            short_of_disk,
            saved,
            loaded,
            probed,
            slept,
            full,
            exported,
            held,
            kept,
            same,
            taken,
            metered,
            awaited,
            verified,
            gate,
            mismatched,
            beside,
            ordered,
            lent,
            streamed,
            shared_peaks,
            long,
            converted,
            to_folder,
        )
    }
    for out, case, arguments in json.loads(Path(sys.argv[1]).read_text()):
        began, start_of_case = time.process_time(), time.perf_counter()
        arrays = functions[case](world=int(os.environ["WORLD_SIZE"]), **arguments)
        _empty_models()
        drop_layout()
        if case not in begun:
            begun.add(case)
            gc.freeze()  # what the first case of its kind has imported
        seconds, took = time.perf_counter() - start_of_case, time.process_time() - began
        print(f"{Path(out).stem}: {seconds:.2f} s, {took:.2f} s of processor time", flush=True)  # for who looks
        if os.environ["RANK"] == "0":
            np.savez(out, **arrays)
    for engine in _engines.values():
        engine.close()
    stop()


if __name__ == "__main__":
    main()
