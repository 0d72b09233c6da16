"""Runs of whole jobs on cards that count, and what the plan says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gspo_hpc.algorithms import objective
from gspo_hpc.checkpoint import shared_optimizer
from gspo_hpc.config import derived, paths
from gspo_hpc.config.constants import GATHER_BUCKET_BYTES
from gspo_hpc.config.schema import Config
from gspo_hpc.data.prompts import PromptStream
from gspo_hpc.data.records import Prompt
from gspo_hpc.engine import engine as engines
from gspo_hpc.models import architecture, catalog
from gspo_hpc.ops.weight_parts import ALIGNMENT
from gspo_hpc.planning.estimates.phases import Phase
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.policy import offload
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.rollout.scoring import RewardModels
from gspo_hpc.runs import journal
from gspo_hpc.runs.cursor import Cursor
from gspo_hpc.training import bringup, loop, phases, probe, reference, sync
from gspo_hpc.training import checkpoints as saves
from gspo_hpc.training.agreement.gap import Baseline
from gspo_hpc.training.agreement.watch import RolloutGapMonitor
from gspo_hpc.training.checkpoints import Checkpoints
from gspo_hpc.training.jobs import train
from gspo_hpc.training.observers.base import Observers
from gspo_hpc.training.phases import Evaluator, LogprobPasses
from gspo_hpc.training.progress import Progress
from gspo_hpc.training.recipe import PromptData, Recipe
from gspo_hpc.training.reference import Teacher
from gspo_hpc.training.sampling import colocated, scoring_engines
from gspo_hpc.training.sampling.base import Sampler
from gspo_hpc.training.sampling.colocated import ColocatedSampler
from gspo_hpc.training.session import Session
from gspo_hpc.training.sync import EngineWeights, WeightSync
from tests.torch.ledger import parts
from tests.torch.ledger.node import Node
from tests.torch.ledger.parts import Job, LedgerPolicy, LedgerWorker
from tests.torch.ledger.sizes import LEAST
from tests.torch.ledger.world import World

PRESETS = sorted(path.stem for path in paths.PRESETS.glob("*.yaml") if not path.stem.endswith("cpu"))
EVENTS = ["run.max_steps=9", "data.eval=eval.jsonl", "eval.interval=1", "eval.before=true", "checkpoint.interval=3"]
_NOTHING = SimpleNamespace(logprobs={})  # of a pass
PROMPT_LOGPROBS = engines.Engine.prompt_logprobs


def prompt(index: int) -> Prompt:
    return Prompt(index, np.arange(3, dtype=np.int32), "", {})


def run(job: Job, cursor: Cursor, monkeypatch: pytest.MonkeyPatch, model: Path) -> Cursor:
    """Run the job on all ranks of its node, from this position, and return where it ended."""
    config, world = job.config, job.world
    ends: dict[int, Cursor] = {}
    rollouts = Path("unused")
    simulate(job, monkeypatch, model)

    def rank() -> None:
        place = world.rank
        device = torch.device("cuda", place)
        ranks = Ranks(place, world.size, place, device, place, world.size, 0, 1, 0, 1, 0, 1, 1)
        teacher = parts.teacher(job, ranks) if config.algorithm.has_teacher else None
        policy = LedgerPolicy(job, ranks)
        if cursor.step > 0:
            parts.load(policy)

        clock: Any = parts.Clock()
        weight_sync = WeightSync(policy, [[1, 2, 3]], clock.monitor)
        console: Any = SimpleNamespace(note=lambda text: None)
        run: Any = SimpleNamespace(rollouts=rollouts)
        unused: Any = None  # its attempt
        started = train.TrainingJob(run, unused, config, ranks, console)._start_worker(
            weight_sync, clock.monitor, Baseline()
        )
        worker = LedgerWorker(**{name: vars(started)[name] for name in LedgerWorker.__dataclass_fields__})
        worker.job = job
        recipe = recipe_of(config)
        data = data_of(recipe)
        weights = EngineWeights(weight_sync, worker, clock)
        sampler = ColocatedSampler(recipe, data, worker, weights, rollouts, Observers(), clock)
        session = session_of(job, policy, recipe, data, sampler, worker, weights, clock, teacher)
        progress = Progress(cursor, job.groups.get(place), evaluated=cursor.step > 0)
        loop.train(session, progress)
        worker.close()
        ends[place], job.groups[place] = progress.cursor, progress.groups

    world.run(rank)
    assert len(set(map(repr, ends.values()))) == 1
    return ends[0]


def recipe_of(config: Config) -> Recipe:
    return Recipe(
        config,
        objective.resolve(config.algorithm),
        derived.passes_needed(config),
        int(make_plan(config).quantities["num_rollout_prompts"]),
        derived.updates_per_rollout(config.batch),
        attempt=1,
    )


def data_of(recipe: Recipe) -> PromptData:
    """Prompts of which a rollout takes all, and one that is unseen."""
    stream = PromptStream(recipe.num_rollout_prompts, 1, True, window=recipe.num_rollout_prompts)
    return PromptData(stream, [prompt(i) for i in range(stream.num_prompts)], [prompt(0)], {"": 1})


def session_of(
    job: Job,
    policy: LedgerPolicy,
    recipe: Recipe,
    data: PromptData,
    sampler: Sampler,
    worker: Any,
    weights: Any,
    clock: Any,
    teacher: Teacher | None = None,
) -> Session:
    """The parts of one training rank's loop, whose engines are the worker's."""
    observers = Observers()
    saver: Any = parts.Saver(policy)
    reference: Any = teacher or (parts.Reference() if job.config.algorithm.kl_beta > 0 else None)
    recorder: Any = SimpleNamespace(record=lambda before, progress, *a: {"step": progress.cursor.step})
    return Session(
        recipe=recipe,
        policy=policy,
        sampler=sampler,
        logprobs=LogprobPasses(recipe, policy, reference, clock),
        evaluator=Evaluator(job.config, data, worker, weights, observers, clock),
        weights=weights,
        watch=RolloutGapMonitor(job.config),
        checkpoints=Checkpoints(saver, lambda step: Path(), None, observers, clock, policy.ranks),
        recorder=recorder,
        observers=observers,
        clock=clock,
    )


def simulate(job: Any, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Have what follows run on the job's cards, with its ranks in place of torch.distributed's."""
    world, node = job.world, job.node
    store = dist.HashStore()
    unwritten = SimpleNamespace(close=lambda: None, append=lambda groups: None)
    monkeypatch.setattr(journal, "Journal", lambda *a, **k: unwritten)
    for module in (offload, bringup):
        monkeypatch.setattr(module, "barrier", world.wait)
    for module in (sync, loop, saves, colocated):
        monkeypatch.setattr(module, "any_rank", world.any)
    monkeypatch.setattr(sync, "shared_fingerprint", lambda found, ranks: world.first(found.text(found.values())))
    monkeypatch.setattr(probe, "dist", SimpleNamespace(all_reduce=world.largest, ReduceOp=dist.ReduceOp))
    on_cpu = {"tensor": lambda values, dtype, device: torch.tensor(values, dtype=dtype), "float64": torch.float64}
    monkeypatch.setattr(probe, "torch", SimpleNamespace(**on_cpu))
    known = {"PrefixStore": dist.PrefixStore, "Store": dist.Store}
    monkeypatch.setattr(bringup, "dist", SimpleNamespace(get_world_size=lambda: world.size, **known))
    monkeypatch.setattr(bringup, "store", lambda: store)
    monkeypatch.setattr(bringup, "largest", lambda values, device: list(map(max, *world.gather(values), values)))
    monkeypatch.setattr(bringup, "RewardPool", lambda *given, **named: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: node.empty_cache(world.rank))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(loop.update, "step", parts.train_step)
    monkeypatch.setattr(phases.update, "with_old_logprobs", lambda policy, *a, **k: _passed(policy, *a))
    monkeypatch.setattr(reference, "logprob_pass", lambda model, *a, **k: model.forward() or _NOTHING)
    monkeypatch.setattr(reference, "with_values", lambda groups, values, change: groups)
    monkeypatch.setattr(probe, "score", lambda policy, *a: SimpleNamespace(logprobs=probed(policy)))
    monkeypatch.setattr(probe, "rounding_gap", lambda policy, *a: shaken(policy))
    monkeypatch.setattr(engines.Engine, "cached_tokens", lambda self, tokens: 0)
    monkeypatch.setattr(engines.Engine, "top_logprobs", lambda self, sequences, count: [np.zeros((2, count))])
    settings_of = bringup.engine_settings
    monkeypatch.setattr(bringup, "engine_settings", lambda *a: parts.of_small_model(settings_of(*a), model))
    scoring_of = scoring_engines.settings
    monkeypatch.setattr(scoring_engines, "settings", lambda *a: parts.of_small_model(scoring_of(*a), model))
    reader = SimpleNamespace(model=SimpleNamespace(kind="classification"), tokens=lambda prompt, text: [1, 2])
    monkeypatch.setattr(scoring_engines, "Reader", SimpleNamespace(of=lambda *a: reader))
    score = RewardModels.score

    def scored(self: RewardModels, groups: Any, *keep: Any) -> Any:
        """Have ranks that own no engine keep their groups, which they hold in this ledger alone."""
        found, whole = score(self, groups, *keep)
        return found or groups, whole

    monkeypatch.setattr(RewardModels, "score", scored)
    monkeypatch.setattr(engines, "environment", lambda settings: {})
    monkeypatch.setattr(engines, "Client", lambda environment, log_path: parts.Client(job))
    if engines.Engine.prompt_logprobs is PROMPT_LOGPROBS:  # unless a test has its own answers
        monkeypatch.setattr(engines.Engine, "prompt_logprobs", lambda self, sequences: [np.zeros(2, np.float32)])
    monkeypatch.setattr(sync.transfer, "CudaBuffer", lambda: parts.Buckets(job))
    monkeypatch.setattr(shared_optimizer, "torch", parts.Torch(job))
    monkeypatch.setattr(shared_optimizer, "dist", parts.Sends())
    monkeypatch.setattr(shared_optimizer, "shares", lambda part: part.every)
    monkeypatch.setattr(sync, "engine_peers", lambda config, *_: world.peers(config.rollout.tensor_parallel_size))


def _passed(policy: Any, groups: Any, moved: Any, *unused: Any) -> Any:
    """Make the pass for old log-probs; what it notes of experts goes with the groups that it is over."""
    job = policy.job
    with job.passing(job.choices.noting if job.choices else 0):
        parts.logprob_pass(policy, repeats=True)
    job.noted = True
    if job.choices and derived.router_replay(job.config) == "old_logprobs":
        return groups.with_own({**groups.own, **job.marked(moved.own)})
    return groups


def shaken(policy: Any) -> None:
    """Make the pass over the probe that a trainer makes again in 16 bits."""
    parts.probe_pass(policy)


def probed(policy: Any) -> list[np.ndarray]:
    parts.probe_pass(policy)
    return [np.zeros(2, np.float32)]


def job_of(config: Config, model: Path, seed: int, script: Mapping[int, str], delay: float = 0.001) -> Job:
    """Return a job on one node of the cluster that the config names."""
    plan = make_plan(config)
    assert plan.valid and plan.memory is not None, [broken.message for broken in plan.broken]
    gpus = config.cluster.gpus_per_node
    tensors = load_file(model / "model.safetensors")
    arch = architecture.find(config)
    if arch is not None and not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    job = Job(config, plan.memory, Node(gpus, plan.memory.card), World(gpus, seed, delay), tensors, script)
    assert (job.choices is None) == (job.arch.experts is None or derived.router_replay(config) == "off")  # made once
    return job


def agree(job: Job, planned: Phase, peak: int) -> bool:
    """Return True if a phase takes what the plan says, or less by no more than what the plan rounds up.

    That is what is gathered at once of experts, and small blocks of logits, which are not charged.
    """
    loading = "sync" if job.config.rollout.mode == "colocate" else "generation"
    spare = {loading: GATHER_BUCKET_BYTES["cuda"]} if job.arch.experts is not None else {}
    spare |= dict.fromkeys(("probe", "logprobs", "teacher", "head_backward"), 2 * LEAST)
    return -ALIGNMENT <= planned.total - peak <= spare.get(planned.name, 0)


def host_of(job: Job) -> int:
    """Return what the plan says that a node's state takes of its own memory."""
    return sum(size for name, size in job.estimate.host.items() if name != "processes")


def absent(job: Job) -> set[str]:
    """Return the phase that a GPU without a head does not have."""
    last = job.config.parallel.pipeline_model_parallel_size - 1
    return set() if job.estimate.stage == last else {"head_backward"}


def odd_vocabulary(folder: Path, *, tied: bool = False) -> str:
    """The setting of a model with a vocabulary that vLLM pads, which the folder gets."""
    settings = catalog.content("Qwen2.5-7B") | {"vocab_size": 152_065, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"")
    return f"model.path={folder}"
