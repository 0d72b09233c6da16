"""The memory that a run takes of each GPU, phase by phase, and of each node, estimated before there is a GPU.

Weights, gradients and the optimizer are exact (parameters.py), activations are what autograd keeps (activations.py),
what a head takes is counted as the code takes it (head.py), and the buckets of weights are this package's own
constants. What torch's allocator reserves beyond its tensors is a share of them (phases.py). What CUDA, NCCL and vLLM
take for themselves is a figure of experience and marked so: it is the part that can be off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gspo_hpc.config.constants import (
    GATHER_BUCKET_BYTES,
    NCCL_BYTES,
    TRANSFER_BUCKET_BYTES,
)
from gspo_hpc.config.derived import engine_itemsize, has_unseen, offload_trainer, offloaded_parts
from gspo_hpc.config.schema import Config
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.models.parts import Piece, divide_experts
from gspo_hpc.planning.estimates import activations, adapters, devices, moments, parameters
from gspo_hpc.planning.estimates.phases import BESIDE_ENGINES, HEADROOM, OF_ENGINES, PASSES, Phase
from gspo_hpc.planning.estimates.serving import reward_models
from gspo_hpc.planning.estimates.serving.reward_models import Scorer
from gspo_hpc.planning.estimates.serving.sizes import ENGINE as ENGINE
from gspo_hpc.planning.estimates.serving.sizes import cache_bytes_per_token as cache_bytes_per_token
from gspo_hpc.planning.estimates.serving.sizes import cache_tokens as cache_tokens
from gspo_hpc.planning.estimates.serving.sizes import engine_bytes as engine_bytes
from gspo_hpc.planning.estimates.serving.sizes import engine_parts, tokens_in, weights_bytes
from gspo_hpc.system.text import GIB

# A figure of experience.
CONTEXT = int(1.0 * GIB)  # CUDA's context and the workspaces of matrix products, of one process

_TRAVELLING = frozenset({"buckets", "merged_weight", "padded_vocabulary"})  # parts that end with a weight sync


@dataclass(frozen=True)
class Estimate:
    """An estimate for the GPU that is worst off, and for a node.

    If GPUs are set apart for engines, generation is on one of these, and every other phase on one that trains.
    """

    card: int  # bytes of the GPU
    stage: int  # the pipeline stage that is worst off in the update
    phases: tuple[Phase, ...]
    host: dict[str, int]  # of one node, by what it is for
    cache_tokens: int  # that the KV cache of one engine holds; 0: there is no room for one
    sleep_level: int  # rollout.sleep_level, which `host` counts with
    host_otherwise: int  # bytes of a node's own memory, all of it, at the other sleep level
    scorers: tuple[Scorer, ...] = ()  # engines of reward models

    def phase(self, name: str) -> Phase:
        """Return the phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def peak(self) -> Phase:
        """The phase that takes most of the card, but for generation, in which vLLM fills it by itself."""
        own = (phase for phase in self.phases if phase.name not in BESIDE_ENGINES)
        return max(own, key=lambda phase: phase.total)

    @property
    def busiest(self) -> Phase:
        """The pass that takes most: one in which what is in use goes up and down."""
        return max((phase for phase in self.phases if phase.name in PASSES), key=lambda phase: phase.reserved)

    @property
    def beside_engine(self) -> int:
        """The most that a GPU holds beside an engine with its cache: a sync brings more than generation has."""
        awake = (phase.parts for phase in self.phases if "kv_cache" in phase.parts)
        return max(sum(size for name, size in parts.items() if name not in OF_ENGINES) for parts in awake)

    @property
    def headroom(self) -> float:
        """The share of the card that passes leave, below 0 where what the allocator reserves for them does not fit."""
        return 1.0 - self.busiest.reserved / self.card

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `gspo-hpc plan --json` prints them."""
        return {
            "card_bytes": self.card,
            "pipeline_stage": self.stage,
            "phases": {phase.name: {**phase.reserved_parts, "total": phase.reserved} for phase in self.phases},
            "headroom": self.headroom,
            "host_bytes": {**self.host, "total": sum(self.host.values())},
            "sleep_level": self.sleep_level,
            "host_bytes_at_other_sleep_level": self.host_otherwise,
            "cache_tokens_per_engine": self.cache_tokens,
        }


class _Stage(NamedTuple):
    """A pipeline stage: what a rank of it keeps between steps, and what its passes of an update take."""

    number: int
    state: parameters.Bytes
    passes: dict[str, dict[str, int]]

    @property
    def most(self) -> int:
        """The most that the stage takes in an update, beside what processes and engines take."""
        return max(_step(self.state), *(sum(one.values()) for one in self.passes.values()))


def estimate(arch: Architecture, config: Config, device: devices.Device) -> Estimate:
    """The layout must be one that the plan accepts; lengths are the longest that the config allows."""
    return _estimate(arch, config, device, max(_stages(arch, config), key=lambda stage: stage.most))


def fitting(arch: Architecture, config: Config, device: devices.Device) -> Estimate | None:
    """Return the estimate; None where the trainer's peak is above the card, which is known early in most cases.

    The stage of an estimate is the worst one, and there is a phase for whatever `most` counts. So the peak is at least
    what any stage takes.
    """
    if not holds_state(arch, config, device):
        return None
    found, room = list[_Stage](), device.memory - _beside_update(config)
    for stage in _stages(arch, config):
        if stage.most > room:
            return None
        found.append(stage)
    whole = _estimate(arch, config, device, max(found, key=lambda stage: stage.most))
    return whole if whole.peak.total <= device.memory else None


def holds_state(arch: Architecture, config: Config, device: devices.Device) -> bool:
    """Return whether a GPU of every stage holds what an optimizer's step takes: a peak is never less."""
    room = device.memory - _beside_update(config)
    return all(_step(parameters.state(arch, config, stage)) <= room for stage in stages(config))


def _beside_update(config: Config) -> int:
    """Return what is taken of a GPU in an update by others than the trainer's tensors."""
    asleep = ENGINE if config.rollout.mode == "colocate" else 0
    return _context(config) + asleep + sum(reward_models.asleep(config).values())


def of_evaluation(arch: Architecture, config: Config, device: devices.Device) -> Estimate:
    """Return the estimate of `gspo-hpc eval`: one rank, which has weights alone.

    `config` is that of the command, which puts the layout of one rank in place of the run's.
    """
    state = parameters.state(arch, config, 0)._replace(gradients=0, optimizer=0, gradient_copies=0)
    found = _estimate(arch, config, device, _Stage(0, state, {}))
    names = ("load", "engine_start", "sync", "probe", "reward_model")
    phases = [phase for phase in found.phases if phase.name in names]
    phases.append(Phase("evaluation", found.phase("generation").parts))
    host = {
        name: size
        for name, size in found.host.items()
        if name not in ("checkpoint_copy", "save_transit", "reference_and_policy", "teacher", "experts_to_replay")
    }
    return replace(found, phases=tuple(phases), host=host)


def _estimate(arch: Architecture, config: Config, device: devices.Device, worst: _Stage) -> Estimate:
    stage, state, passes = worst
    engine = engine_parts(arch, config, device)
    colocated = config.rollout.mode == "colocate"
    asleep = {"engine_asleep": ENGINE} if colocated else {}
    alone = {"cuda_and_nccl": _context(config)}
    own = alone | reward_models.asleep(config)  # from the start of engines on
    trainer = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
    resting = {name: size for name, size in trainer.items() if name not in offloaded_parts(config)}
    resting |= {"optimizer": 0} if "optimizer" in resting and config.memory.offload_optimizer else {}
    sync = {"weights": state.weights, "buckets": _buckets(arch, config), **own}
    sync |= {name: size for name, size in resting.items() if name != "weights"}
    if merging := adapters.merging(arch, config):
        sync["merged_weight"] = merging
    if colocated:
        sync["buckets"] += _loading(arch, config)
        # Engines sleep when the first sync begins, unless the trainer stays: then they have their cache by then.
        sync |= {"engine_weights": engine["engine_weights"], **asleep} if offload_trainer(config) else engine
    scoring = resting | own | asleep
    if colocated:
        generation = engine | own | resting
    else:  # on GPUs of their own, where nothing sleeps
        receiving = {"cuda_and_nccl": CONTEXT + NCCL_BYTES}  # of the rank that does, in a group of all that do
        # Of a weight sync, in which caches stay. Nobody takes the buckets on the GPU of a reward model: one is enough.
        generation = engine | {"buckets": _transfer(arch, config) + _loading(arch, config)} | receiving
        scoring = {"buckets": _transfer(arch, config, 1)} | receiving | reward_models.process(config)
    if waiting := parameters.waiting_vocabulary(arch):
        (sync if colocated else generation)["padded_vocabulary"] = waiting * engine_itemsize(config)
    probing = {name: size for name, size in sync.items() if name not in _TRAVELLING}
    probing |= moments.of_forward(arch, config, stage, *moments.probe_tokens(config))
    copies = {"gradient_copies": state.gradient_copies} if state.gradient_copies else {}
    stepping = Phase("optimizer_step", trainer | copies | own | asleep)
    taught, scorers = moments.of_teacher(config, stage), reward_models.scorers(config, device)
    transit = parameters.transit(config, state)
    coming_and_going = {"transit": 2 * transit} if transit else {}  # an owner that loads sends copies from the host
    phases = (
        Phase("load", trainer | alone | coming_and_going),
        *((Phase("engine_start", generation),) if colocated else ()),
        *(Phase(name, parts | own | asleep) for name, parts in passes.items()),
        *((stepping,) if config.memory.offload_optimizer or copies else ()),
        Phase("logprobs", moments.of_logprobs(arch, config, stage, state) | own | asleep),
        *((Phase("teacher", taught | resting | own | asleep),) if taught else ()),
        Phase("sync", sync),
        Phase("probe", probing),
        Phase("generation", generation),
        *((Phase("evaluation", generation),) if _evaluates(config) else ()),
        *((Phase("reward_model", reward_models.awake(scorers) | scoring),) if scorers else ()),
        Phase("save", trainer | own | asleep),
    )
    cache = tokens_in(arch, config, engine)
    level = config.rollout.sleep_level
    weights, copy = engine["engine_weights"], _copied(arch, config)
    choices = moments.choices(arch, config, cache)
    experts = choices.trainers, choices.generators + choices.engines
    node, otherwise = (
        parameters.of_node(arch, config, state, weights, copy, one, experts) | reward_models.of_node(config)
        for one in (level, 3 - level)
    )
    return Estimate(device.memory, stage, phases, node, cache, level, sum(otherwise.values()), scorers)


def of_node(arch: Architecture, config: Config) -> dict[str, int]:
    """Return the bytes of a node's own memory, by use, as `estimate` has them, but for choices of experts.

    They depend on no GPU.
    """
    state = max(_stages(arch, config), key=lambda stage: stage.most).state
    weights, copy = weights_bytes(arch, config), _copied(arch, config)
    return parameters.of_node(arch, config, state, weights, copy, config.rollout.sleep_level) | reward_models.of_node(
        config
    )


def _copied(arch: Architecture, config: Config) -> int:
    """Return what a node copies to save it in the background, if it does."""
    if not config.checkpoint.async_save:
        return 0
    return max(parameters.copied_by_node(arch, config, stage) for stage in stages(config))


def _stages(arch: Architecture, config: Config) -> Iterator[_Stage]:
    for number in stages(config):
        state = parameters.state(arch, config, number)
        yield _Stage(number, state, moments.of_update(arch, config, number, state))


def _step(state: parameters.Bytes) -> int:
    """Return what an optimizer's step takes, for which all is on the GPU, and activations are no longer."""
    return state.total + state.gradient_copies


def stages(config: Config) -> Iterable[int]:
    """Return the pipeline stages that differ: those in between are like the second, and keep less."""
    pp = config.parallel.pipeline_model_parallel_size
    return range(pp) if pp <= 2 else (0, 1, pp - 1)


def fits(found: Estimate, config: Config) -> bool:
    """Return whether the tensors of every phase fit on the card, a sequence in the cache, and the rest on a node.

    Whether there is room for fragmentation, too, is what the headroom says: short of memory, the allocator gives back
    what it does not use before it fails.

    The rules about memory say the same (planning/rules/memory.py); this takes a tenth of their time.
    """
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    if max(found.peak.total, found.phase("generation").total) > found.card or found.cache_tokens < longest:
        return False
    if found.scorers and (found.phase("reward_model").total > found.card or not all(one.fits for one in found.scorers)):
        return False
    return not lacks_host_memory(found, config)


def has_room(found: Estimate, config: Config) -> bool:
    """Return whether every phase fits, and leaves as much of the card and of a node as it should."""
    room = node_memory(config)
    return fits(found, config) and found.headroom >= HEADROOM and (room is None or sum(found.host.values()) <= room)


def lacks_host_memory(found: Estimate, config: Config) -> bool:
    """Return whether a node certainly has too little memory: even without what processes take for themselves."""
    room = node_memory(config)
    return room is not None and parameters.least(found.host) > room


def _evaluates(config: Config) -> bool:
    """Return whether a run evaluates, if its data has anything to evaluate on."""
    options = config.eval
    return (options.before or options.after or options.interval is not None) and has_unseen(config.data)


def _buckets(arch: Architecture, config: Config) -> int:
    """Return the bytes of a rank that gathers weights: those that they come into, and its shard of an expert.

    It keeps the shard where those of all ranks are gathered piece by piece.
    """
    pieces, parallel = _pieces(arch, config), config.parallel
    sharers = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    owners = parallel.expert_model_parallel_size
    parts = (piece for piece in pieces if piece.last - piece.first < owners)
    shard = max((piece.size // (piece.last - piece.first) // sharers for piece in parts), default=0)
    return _transfer(arch, config) + shard


def _transfer(arch: Architecture, config: Config, buckets: int = 2) -> int:
    """Return the bytes that weights come into: two buckets, or what is gathered at once if it is larger."""
    ranks = config.parallel.tensor_model_parallel_size
    whole = _largest_parameter(arch, ranks) * activations.itemsize(config)
    return max(buckets * TRANSFER_BUCKET_BYTES["cuda"], whole, *(piece.size for piece in _pieces(arch, config)))


def _pieces(arch: Architecture, config: Config) -> list[Piece]:
    """Return the pieces in which one expert of every expert-parallel rank is gathered."""
    if arch.experts is None:
        return []
    matrix = arch.experts.ffn_hidden_size * arch.hidden_size * activations.itemsize(config)
    owners = config.parallel.expert_model_parallel_size
    return list(divide_experts([2 * matrix, matrix], owners, TRANSFER_BUCKET_BYTES["cuda"]))


def _loading(arch: Architecture, config: Config) -> int:
    """Return the bytes that a worker of vLLM takes to load a layer: its share beside the one that it computes with.

    Besides, what was gathered at once is copied into one piece where ranks cut a tensor, and other layers wait for the
    next bucket.
    """
    tp, item = config.rollout.tensor_parallel_size, engine_itemsize(config)
    largest = _largest_parameter(arch)
    loading = (largest + largest // tp) * item
    if arch.experts is not None:
        experts = 3 * arch.experts.count * arch.experts.ffn_hidden_size * arch.hidden_size
        gathered = max(GATHER_BUCKET_BYTES["cuda"], *(piece.size for piece in _pieces(arch, config)))
        loading = max(loading, experts // tp * item + gathered)
    return loading


def _largest_parameter(arch: Architecture, ranks: int = 1) -> int:
    """Return its elements, with those that make the rows of a vocabulary equally many on all `ranks`."""
    heads, vocabulary = arch.num_attention_heads + 2 * arch.num_key_value_heads, -(-arch.vocab_size // ranks) * ranks
    return arch.hidden_size * max(vocabulary, (arch.mlp_matrices - 1) * arch.ffn_hidden_size, heads * arch.head_dim)


def _context(config: Config) -> int:
    parallel = config.parallel
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        config.world_size,
    )
    groups = sum(size > 1 for size in sizes) + (config.rollout.mode == "server")  # weights travel in one of rank 0's
    return CONTEXT + NCCL_BYTES * groups


def node_memory(config: Config) -> int | None:
    """Return the bytes of a node that slurm.mem gives a job; None if it is not given, or is all of the node (0)."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", (config.slurm.mem or "").strip(), re.IGNORECASE)
    if match is None:
        return None
    return int(match[1]) * 2 ** {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[match[2].upper()] or None
