"""The parts that every job of a rank begins with: configuration, checkpoint, prompts, engine and reward pool."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from gspo_hpc.config import derived
from gspo_hpc.config.derived import role_of
from gspo_hpc.config.engine_arguments import adapters_beside_weights
from gspo_hpc.config.schema import Config, Parallel
from gspo_hpc.data import prompts
from gspo_hpc.data.records import Group, Prompt
from gspo_hpc.data.replies import Replies
from gspo_hpc.data.rows import Row, load_parts
from gspo_hpc.data.sources import parts, unseen
from gspo_hpc.engine.engine import Engine, EngineDied, EngineSettings
from gspo_hpc.engine.settings import EngineAdapters, threads_of
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.exchange.peers import engine_place
from gspo_hpc.models import adapter_table, architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops import hf_folder
from gspo_hpc.policy.passes import never
from gspo_hpc.policy.process_groups import Ranks, barrier, largest, store
from gspo_hpc.rewards.environments import tools
from gspo_hpc.rewards.environments.tools import Toolbox
from gspo_hpc.rewards.environments.turns import turn_pool
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rollout.generation import always
from gspo_hpc.rollout.notices import NodeTopology, Notices
from gspo_hpc.rollout.recovery import EngineRecovery, InFlightWeights
from gspo_hpc.rollout.scoring import RewardModels, ScoringEngine
from gspo_hpc.rollout.worker import RolloutWorker
from gspo_hpc.runs import commit, spending
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.progress import limited, waiting
from gspo_hpc.system.signals import signals_default_in_children
from gspo_hpc.training.probe import probe_sequences
from gspo_hpc.training.sampling import scoring_engines

# Exporting and evaluating need one rank, whatever the layout of the run was. So this rank hashes a whole checkpoint by
# itself (`whole_checkpoint`); only in training are there others to share that with.
ONE_RANK = (
    "cluster.nodes=1",
    "cluster.gpus_per_node=1",
    "cluster.generation_nodes=0",
    "cluster.generation_gpus_per_node=null",
    "rollout.mode=colocate",
    "rollout.max_staleness=0",
    *(f"parallel.{name}={json.dumps(one.default)}" for name, one in Parallel.model_fields.items()),
    "optimizer.distributed=false",
    "rollout.tensor_parallel_size=1",
    "rollout.engines_per_node=1",
)


def read_architecture(config: Config) -> Architecture:
    """Return the architecture of the model; only its outline if mcore-bridge provides the model."""
    read = architecture.read if config.model.provider == "own" else architecture.outline
    return read(str(config.model.path))


def whole_checkpoint(run: RunDir, step: int | None, remark: Callable[[str], None]) -> Path:
    """Return the checkpoint of a step, or the newest whole one; raise ValueError if there is none.

    `remark` is called with a line for each damaged checkpoint that is passed over.
    """
    if step is None:
        whole, remarks = commit.newest_whole(run.checkpoints)
        for text in remarks:
            remark(text)
        if whole is None:
            raise ValueError(f"{run.path} has no complete checkpoint")
        return whole
    path = run.checkpoints / f"{step:06d}"
    if problems := commit.verify(path):
        steps = ", ".join(str(int(path.name)) for path in commit.list_committed(run.checkpoints)) or "none"
        wrong = (
            f"the checkpoint of step {step} is not whole: {problems[0]}"
            if path.exists()
            else f"there is no checkpoint of step {step}"
        )
        raise ValueError(f"{wrong}; checkpoints of these steps exist: {steps}")
    return path


def set_threads(config: Config) -> None:
    """Set torch's number of threads, and deterministic algorithms: always on the CPU, and on GPUs if configured."""
    if config.cluster.threads_per_rank:
        torch.set_num_threads(config.cluster.threads_per_rank)
    cpu = config.cluster.platform == "cpu"
    if cpu or derived.deterministic_kernels(config):
        if cpu:  # the other function would import torch's compiler, of which nothing is used here: a second of a start
            torch.set_deterministic_debug_mode("warn")
        else:
            # An operation without such an algorithm ends the run; with warnings only, torch's FlashAttention would go
            # on adding gradients in the order in which they arrive.
            torch.use_deterministic_algorithms(True)
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # helps to find bugs, and costs a twentieth of an update


def read_prompts(config: Config) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """Return the training prompts, and the unseen prompts by their evaluation set, as tokens."""
    tokenizer, shown = hf_folder.tokenizer(str(config.model.path)), tools.shown(config.environment)

    def build(rows: list[Row]) -> list[Prompt]:
        if not rows:
            return []
        longest, read = config.rollout.max_prompt_length, bool(config.reward.scored)
        return prompts.build_prompts(rows, tokenizer, config.data, longest, tools=shown, keeps_messages=read)

    train = load_parts(parts.training(config.data), config.data, config.run.seed)
    held_out: list[Row] = []
    if config.data.train_ratio < 1:
        train, held_out = prompts.split(train, config.data, config.run.seed)
    rows = held_out + load_parts(parts.unseen(config.data), config.data, config.run.seed)
    return build(train), unseen.by_set(build(rows), config)


@dataclass(frozen=True)
class LoadedPrompts:
    """The prompts on rank 0, which reads the data; engines of other ranks fetch theirs while they generate."""

    count: int  # for training
    sizes: Mapping[str, int]  # of them by source; those of data.train have the name ""
    prior: npt.NDArray[np.float64] | None  # [count] pass rates that rows have, NaN where one has none
    train: list[Prompt]  # on rank 0; empty elsewhere
    unseen: list[Prompt]  # on rank 0; empty elsewhere
    unseen_sizes: Mapping[str, int]  # by evaluation set, in their order
    probe: list[list[int]]  # tokens of its sequences


def load_prompts(config: Config, exchange: Exchange) -> LoadedPrompts:
    """Return the prompts as rank 0 reads them. Collective."""
    train: list[Prompt] = []
    asked: list[Prompt] = []
    found = b""
    if exchange.transport.rank == 0:
        train, by_set = read_prompts(config)
        asked = [prompt for own in by_set.values() for prompt in own]
        rates = prompts.prior_rates(train, config.data)
        probe = probe_sequences(train, config.rollout.probe_tokens)
        found = json.dumps(
            [prompts.sizes(train, config.data), {k: len(v) for k, v in by_set.items()}, probe, rates]
        ).encode()
    with waiting():  # for rank 0
        sizes, unseen_sizes, probe, rates = json.loads(
            exchange.transport.tree_all_reduce(found, lambda parts: parts[0])
        )
    prior = None if rates is None else np.array(rates, np.float64)  # None in it becomes NaN
    return LoadedPrompts(sum(sizes.values()), sizes, prior, train, asked, unseen_sizes, probe)


def conversation_parts(config: Config) -> tuple[Replies, Toolbox | None]:
    """Return what conversations need of the chat template. Raises ValueError for a template that does not fit."""
    tokenizer, settings = hf_folder.tokenizer(str(config.model.path)), config.environment
    template = prompts.template_of(tokenizer, config.data)
    try:
        toolbox = Toolbox.of(settings, template) if settings.tools else None
    except ValueError as mistake:
        raise ValueError(f"environment.tools: {mistake}") from None
    return Replies(tokenizer, config.data, tools.shown(settings), users=settings.name is not None), toolbox


def start_rollout_worker(
    config: Config,
    ranks: Ranks,
    *,
    experts: bool,
    make_room: Callable[[], None],
    sync_weights: Callable[[Engine | None], EngineDied | None],
    stop_requested: Callable[[], bool] = never,
    note: Callable[[str], None] = lambda text: None,
    rollouts: Path | None = None,
    has_signal: Callable[[Group], bool] = always,
    in_flight: InFlightWeights | None = None,
) -> RolloutWorker:
    """Start this rank's engine and reward pool, if it is to have one, and return its part in generation. Collective.

    `experts`: the model is a mixture of experts. `make_room`: the trainer leaves the GPUs' memory on all ranks, because
    an engine that starts refuses to share what it was promised. `sync_weights`: see :class:`EngineRecovery`.
    `rollouts`: the folder of journals, where a rollout may go on with groups of the one before; requests to judges are
    noted beside it. `has_signal` tells of a graded group whether there is anything to learn from it. `in_flight`: where
    newer weights come from while engines generate.
    """
    make_room()
    per_node, place = derived.engines_per_node(config), _topology(config, ranks)
    num_engines = per_node * place.nodes
    engine = pool = turns = replies = toolbox = None
    scoring = dict[str, ScoringEngine]()
    if engine_place(config, ranks.local_rank) == 0:
        with signals_default_in_children(), limited():  # by the engines' own patience
            if config.reward.scored:  # first: they sleep before the policy's engine takes the GPUs
                note("starting the engines of reward models")
                scoring = scoring_engines.start(config, per_node)
            note("starting the vLLM engine")
            engine = Engine(engine_settings(config, per_node, experts))
            engine.start()
            if set(range(len(config.reward.functions))) - config.reward.scored.keys():
                account = None if rollouts is None else spending.file_of(rollouts.parent, ranks.rank)
                sources, judges = config.data.named, config.judges
                pool = RewardPool(config.reward, num_engines, config.sandbox, sources, judges, account)
            if config.environment.talks:
                replies, toolbox = conversation_parts(config)
                turns = turn_pool(config, num_engines)
    if dist.get_world_size() > 1:
        with waiting():  # for engines that take longer
            barrier(ranks.device)
    shared = _shared_store(ranks)
    # Much longer than a rank may be silent: what holds its interpreter's lock, such as an engine's restart, holds the
    # thread too that copies notices. An error of that thread is told at once.
    notices = Notices(shared, place, patience=10 * config.faults.heartbeat_timeout)
    recovery = EngineRecovery(
        engine,
        notices,
        ranks.rank,
        config.faults.max_engine_restarts,
        sync_weights,
        stop_requested=stop_requested,
        agree=lambda values: largest(values, ranks.device),
        shares_memory=derived.offload_trainer(config),
        sleep_level=config.rollout.sleep_level,
        in_flight=in_flight,
    )
    models = None
    if config.reward.scored:
        models = RewardModels(config, scoring, recovery, lambda values: largest(values, ranks.device), stop_requested)
    return RolloutWorker(
        config=config,
        ranks=ranks,
        store=shared,
        notices=notices,
        engine=engine,
        pool=pool,
        models=models,
        turns=turns,
        replies=replies,
        toolbox=toolbox,
        num_engines=num_engines,
        prompts_come_from_outside=ranks.job_store is not None,
        recovery=recovery,
        stop_requested=stop_requested,
        has_signal=has_signal,
        rollouts=rollouts,
    )


def _topology(config: Config, ranks: Ranks) -> NodeTopology:
    """Return the place of this rank among those that meet for generation: all, or those that do nothing else."""
    if ranks.job_store is None:
        return NodeTopology(ranks.local_rank, config.cluster.gpus_per_node, config.cluster.nodes)
    role = role_of(config, int(os.environ["RANK"]))
    return NodeTopology(role.local_index, role.per_node, role.nodes)


def _shared_store(ranks: Ranks) -> dist.Store:
    """Return the store in which a call of generation is kept; in server mode the trainer looks there, too."""
    return store() if ranks.job_store is None else generation_store(ranks.job_store)


def generation_store(job_store: dist.Store) -> dist.Store:
    """Return the part of a job's store in which calls of generation are kept, for ranks of both roles."""
    return dist.PrefixStore("calls", job_store)


def engine_settings(config: Config, per_node: int, experts: bool) -> EngineSettings:
    """Return the settings of one of `per_node` engines of a node."""
    rollout = config.rollout
    model = architecture.planned(str(config.model.path))[0] or {}
    return EngineSettings(
        model_path=str(config.model.path),
        dtype=derived.engine_dtype(config),
        tensor_parallel_size=rollout.tensor_parallel_size,
        max_model_len=rollout.max_prompt_length + rollout.max_response_length,
        platform=config.cluster.platform,
        kv_cache_gb=rollout.kv_cache_gb,
        threads=threads_of(model, per_node * rollout.tensor_parallel_size),
        seed=config.run.seed % 2**32,  # vLLM takes no more; every completion has a seed of its own
        timeout=config.faults.engine_timeout,
        starts_asleep=derived.offload_trainer(config),  # the first sync needs room for the trainer's weights
        # That sync brings all of them: reading them twice takes minutes.
        loads_weights=rollout.engine.get("load_format", "dummy") != "dummy",
        dequantized=architecture.is_block_fp8(model),
        whole_distribution=derived.samples_part_of_distribution(rollout),  # as the trainer measures them
        adapters=_engine_adapters(config, experts),
        report_experts=experts and derived.router_replay(config) == "rollout",
        batch_invariant=derived.deterministic_kernels(config),
        engine_args=dict(rollout.engine),
    )


def _engine_adapters(config: Config, experts: bool) -> EngineAdapters | None:
    """Return the adapters that an engine keeps beside its weights; None where it has none, or gets them merged."""
    if not adapters_beside_weights(config, experts=experts):
        return None
    arch, adapter = architecture.find(config), config.adapter
    assert arch is not None, "a model that is trained is known"
    return EngineAdapters(adapter.rank, adapter.alpha, adapter_table.shapes(arch, adapter.rank, adapter.targets))
