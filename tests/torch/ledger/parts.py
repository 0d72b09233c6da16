"""The parts of a job, on cards that count: each part charges them in the order in which the real one does.

The loop, the syncs, the turns, the recovery, the sampler, the evaluator, the policy's moves between GPU and host, the
sender of weights, the step around Megatron's optimizer, and the engine object are the package's own. Replaced are the
tensors, Megatron's passes, vLLM and what writes files. Buckets, what a head takes and what vLLM takes to load a layer
have the sizes that the code gives them (sizes.py); activations, weights in FP8, the context, and an engine's weights,
cache and workspaces have those of the plan. docs/gpu.md says which of these are measured elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from gspo_hpc.checkpoint import shared_optimizer
from gspo_hpc.checkpoint.assembly import Assembly
from gspo_hpc.checkpoint.shared_optimizer import Piece, Share
from gspo_hpc.config import derived
from gspo_hpc.config.constants import SAVE_TRANSIT_BYTES, TRANSFER_BUCKET_BYTES
from gspo_hpc.config.derived import pass_sizes
from gspo_hpc.config.engine_arguments import adapters_beside_weights
from gspo_hpc.config.schema import Config
from gspo_hpc.config.sections.reward_models import first_gpu
from gspo_hpc.data.records import Completion, Group
from gspo_hpc.engine.engine import EngineDied, EngineSettings
from gspo_hpc.engine.weight_buffers import HostBuffer
from gspo_hpc.evaluation.evaluate import EVAL_ROLLOUT
from gspo_hpc.exchange.prompts import SharedPrompts
from gspo_hpc.models import architecture
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.ops.host_memory import HostCopy
from gspo_hpc.ops.weight_parts import Memory, Part, Scratch, stream_of
from gspo_hpc.planning.estimates import engines, moments, parameters
from gspo_hpc.planning.estimates.memory import ENGINE, Estimate
from gspo_hpc.policy import schedule
from gspo_hpc.policy.model import DTYPES
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.policy.schedule import StepResult
from gspo_hpc.rollout.generation import Request
from gspo_hpc.rollout.worker import Generated, Interrupted, RolloutWorker
from gspo_hpc.runs.journal import Journal
from gspo_hpc.training import reference
from tests.torch.ledger.node import Node
from tests.torch.ledger.sizes import ITEMS, Choices, Travelling, choices, merging, of_head, travelling
from tests.torch.ledger.world import World

OWN, ASLEEP = "cuda_and_nccl", "engine_asleep"  # parts of the plan's phases that stay on the card all the time
KEYS = ("param", "exp_avg", "exp_avg_sq")  # of a parameter that the optimizer has a master of
STATE = ("weights", "gradients", "optimizer")
SCORING = "reward model"  # how names of what its engine has on a card begin
_NUMBERS = itertools.count()
MATRICES = {"model.layers.0.self_attn.q_proj.lora_A": (2, 8), "model.layers.0.self_attn.q_proj.lora_B": (8, 2)}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass
class Job:
    """One start of a run on one node."""

    config: Config
    estimate: Estimate  # of the plan
    node: Node
    world: World
    tensors: Mapping[str, torch.Tensor]  # of a small model: what is streamed
    script: Mapping[int, str] = field(default_factory=dict)  # call of generation -> "death" or "stop"
    deaths: Mapping[int, str] = field(default_factory=dict)  # sync -> the call in it that ends rank 0's engine
    syncs: int = 0  # of rank 0's engines
    groups: dict[int, Any] = field(default_factory=dict)  # of the rollout in which the job ended, by rank
    noted: bool = False  # whether a pass for old log-probs has noted choices of experts
    stopped_in: str = ""  # the phase in which the script has stopped it
    saved_away: set[int] = field(default_factory=set)  # GPUs whose trainer had to come back for a save

    def parts(self, phase: str) -> dict[str, int]:
        """Return the parts of a phase of the plan."""
        return next(one.parts for one in self.estimate.phases if one.name == phase)

    @functools.cached_property
    def arch(self) -> Architecture:
        """The architecture of the planned model."""
        arch = architecture.find(self.config)
        assert arch is not None
        return arch

    @functools.cached_property
    def choices(self) -> Choices | None:
        """The sizes of choices of experts that are repeated, if any are."""
        repeats = derived.router_replay(self.config) != "off" and self.arch.experts is not None
        return choices(self.arch, self.config, self.estimate.stage) if repeats else None

    @property
    def repeated(self) -> Choices | None:
        """The same of an update; None where none are known: it has those of the engines, or what a pass has noted."""
        return self.choices if self.noted or derived.router_replay(self.config) == "rollout" else None

    def marked(self, groups: Mapping[int, Group]) -> dict[int, Group]:
        """Return groups with a mark each, whose choices of experts are in host memory as long as anything has it.

        The engines of all nodes have sampled them, each its share of the slots.
        """
        assert self.choices is not None
        tp, gpu, found = self.config.rollout.tensor_parallel_size, self.world.rank, dict(groups)
        for slot, group in groups.items():
            if gpu % tp == 0 and slot % engines.count(self.config) == gpu // tp:
                mark, name = np.zeros(1, np.uint8), f"choices of group {next(_NUMBERS)}"
                self.node.keep_on_host(gpu, name, self.choices.group)
                weakref.finalize(mark, self.node.leave_host, gpu, name)
                found[slot] = replace(group, prompt_experts=mark)
        return found

    @contextlib.contextmanager
    def passing(self, size: int) -> Iterator[None]:
        """Hold the choices of a pass in host memory, on all ranks at once."""
        if size:
            self.node.keep_on_host(self.world.rank, "choices of a pass", size)
            self.world.wait()
        yield
        if size:
            self.world.wait()
            self.node.leave_host(self.world.rank, "choices of a pass")

    @functools.cached_property
    def merging(self) -> int:
        """The bytes in which adapters are merged into a weight; 0 where engines get them beside their weights."""
        return 0 if adapters_beside_weights(self.config, experts=self.arch.experts is not None) else self._merging

    @functools.cached_property
    def _merging(self) -> int:
        return merging(self.arch, self.config)

    @functools.cached_property
    def travelling(self) -> Travelling:
        """The sizes of a weight sync."""
        return travelling(self.arch, self.config)

    def head(self, tokens: int, *, with_gradient: bool) -> dict[str, int]:
        """Return what log-probs of so many tokens take, on a stage that has a head; with a gradient by its names."""
        parallel = self.config.parallel
        if self.estimate.stage != parallel.pipeline_model_parallel_size - 1:
            return {}
        rows = -(-self.arch.vocab_size // parallel.tensor_model_parallel_size)
        item = ITEMS[self.config.model.dtype]
        frozen = self.config.adapter.type is not None
        everything = of_head(tokens, self.arch.hidden_size, rows, item, with_gradient=with_gradient, frozen=frozen)
        if not with_gradient:
            return {"blocks of logits": everything}
        gradient = rows * self.arch.hidden_size * item * (not frozen)
        return {"the head's gradient": gradient, "the head's pass": everything - gradient}

    def responses(self, name: str) -> int:
        """Return the tokens that a rank predicts in a micro-batch of a pass, at most."""
        rollout, cp = self.config.rollout, self.config.parallel.context_parallel_size
        if name == "probe":
            return -(-min(rollout.probe_tokens, 4 * rollout.max_prompt_length) // cp)
        if name in ("update", "teacher"):
            passes = ["reference" if name == "teacher" else name]
        else:
            own = ("old_logprobs",) if self.config.algorithm.has_teacher else ("old_logprobs", "reference")
            passes = [p for p in own if self.sizes[p].needed]
        sizes = [self.sizes[one] for one in passes or ["old_logprobs"]]
        return max(
            -(-(one.micro_batch_tokens or (one.micro_batch_size or 1) * rollout.max_response_length) // cp)
            for one in sizes
        )

    @functools.cached_property
    def sizes(self) -> Mapping[str, Any]:
        """The sizes of micro-batches, by pass."""
        return {str(name): size for name, size in pass_sizes(self.config).items()}

    def engine_gpus(self) -> list[int]:
        """Return the GPUs of the engine that this rank owns."""
        return list(range(self.world.rank, self.world.rank + self.config.rollout.tensor_parallel_size))

    def update(self) -> None:
        """Hold what the passes of an update take beside the model's state: those of the head, then those of layers."""
        waiting, given = {}, {}
        if found := self.repeated:
            flight = moments.in_flight(self.config, self.estimate.stage) if found.kept else 1
            given = {"choices of experts": int(found.given * flight)}
        if any(phase.name == "head_backward" for phase in self.estimate.phases):
            head = self.head(self.responses("update"), with_gradient=True)
            self._hold("head_backward", self._borrowed("head_backward") | head | given)
            if self.arch.tie_word_embeddings and self.estimate.stage == 0:
                waiting = {"the head's gradient": head["the head's gradient"]}
        self._hold("update", self._borrowed("update") | waiting | given)

    def forward(self, name: str, *, repeats: bool = False) -> None:
        """Hold what a pass without gradient takes beside the model's state; with `repeats` also choices of experts."""
        noted = {"choices of experts": self.choices.noted} if self.choices and repeats else {}
        self._hold(name, self._borrowed(name) | self.head(self.responses(name), with_gradient=False) | noted)

    def _borrowed(self, phase: str) -> dict[str, int]:
        """Return what this ledger has from the plan: what layers and an embedding take."""
        parts = self.parts(phase)
        borrowed = ("activations", "embedding_gradient", "fp8_weights", "unused_gradients")
        return {name: parts[name] for name in borrowed if name in parts}

    def _hold(self, phase: str, passing: Mapping[str, int]) -> None:
        gpu, world = self.world.rank, self.world
        with self.node.phase(gpu, phase):
            for name, size in passing.items():
                world.dawdle()
                self.node.put(gpu, name, size)
            for name in passing:
                self.node.drop(gpu, name)


class Buffer:
    """The counterpart of OffloadBuffer for one kind of state."""

    def __init__(self, job: Job, name: str, size: int) -> None:
        self._job, self._name, self._size = job, name, size
        self.is_offloaded = False
        job.node.put(job.world.rank, name, size)

    def offload(self, kept: Any, dropped: Any = ()) -> int:
        """Leave the card, and return what torch kept."""
        assert not self.is_offloaded
        self._job.world.dawdle()
        self.is_offloaded = True
        if self._name != "gradients":  # which are dropped
            self._job.node.keep_on_host(self._job.world.rank, self._name, self._size)
        self._job.node.drop(self._job.world.rank, self._name)
        self._job.node.empty_cache(self._job.world.rank)
        return self._size

    def restore(self) -> None:
        """Come back."""
        if self.is_offloaded:
            self._job.world.dawdle()
            self._job.node.put(self._job.world.rank, self._name, self._size)
            self.is_offloaded = False


class LedgerPolicy(Policy):
    """The policy's own moves, with buffers that count."""

    def __init__(self, job: Job, ranks: Ranks, *, trains: bool = True) -> None:
        self.job, self.config, self.ranks = job, job.config, ranks
        self.chunks, self.wrapped = [], []
        self.state_copy = HostCopy(())
        self.base = "that of the small model"
        matrices = {name: torch.zeros(shape, dtype=DTYPES[job.config.model.dtype]) for name, shape in MATRICES.items()}
        self.adapter_matrices = lambda: iter(matrices.items())  # type: ignore[method-assign]
        provider: Any = SimpleNamespace(stream=lambda chunks, memory: self._stream(memory))
        self.provider, self.arch = provider, job.arch
        state = parameters.state(self.arch, job.config, job.estimate.stage)
        if all(phase.name != "update" for phase in job.estimate.phases):  # of the command that evaluates
            state = state._replace(optimizer=0, gradients=state.gradients * trains)
        self.optimizer = Optimizer(job, state.optimizer)
        job.node.put(job.world.rank, OWN, job.parts("load")[OWN])
        buffers: Any = [Buffer(job, name, getattr(state, name)) for name in STATE]
        self.weight_offload, self.gradient_offload, self.state_offload = buffers

    def load(self, folder: str | Path, *, begins: bool = True) -> None:
        """Load weights into what there is for them, beside all that a new model has."""
        with self.job.node.phase(self.job.world.rank, "load"):
            pass

    def parts(self, memory: Memory | None = None) -> Iterator[Sequence[Part]]:
        """Hold the buckets while weights travel, where no engine's memory holds them."""
        self.settle()
        if memory is not None:
            yield from super().parts(memory)
            return
        buckets = Buckets(self.job)
        if self.job.travelling.alone:
            buckets.reserve(self.job.travelling.alone)
        yield from super().parts(memory)
        buckets.close()

    def adapter_parts(self, memory: Memory | None = None) -> Iterator[Sequence[Part]]:
        """Stream the adapters of the small model."""
        return super().adapter_parts(memory or Scratch(torch.device("cpu")))

    def expert_sums(self) -> None:
        """Take no memory: weights are read where they lie, one expert at a time."""

    def constants(self) -> None:
        """Take no memory: they are a few numbers."""

    def _adapter_shapes(self) -> dict[str, tuple[int, int]]:
        return MATRICES

    def _stream(self, memory: Memory | None) -> Iterator[Sequence[Part]]:
        """Stream a small model through memory that is reserved for the planned one, as weight_stream does."""
        job, node, gpu = self.job, self.job.node, self.job.world.rank
        if memory is not None:
            memory.reserve(job.travelling.largest)
        node.put(gpu, "shard", job.travelling.shard)
        node.put(gpu, "merged weight", job.merging)
        yield from stream_of(job.tensors.items())(Reserved(memory or Scratch(torch.device("cpu"))))
        if memory is not None and job.merging:
            memory.allocate(TRANSFER_BUCKET_BYTES["cuda"])  # a bucket is loaded while weights of the next are merged
        node.drop(gpu, "merged weight")
        node.drop(gpu, "shard")


class Reserved:
    """Memory of which nothing more is reserved."""

    def __init__(self, memory: Memory) -> None:
        self.allocate = memory.allocate

    def reserve(self, largest: int) -> None:
        """Do nothing."""


class Optimizer:
    """Megatron's, as policy.schedule sees it: it has fp32 copies of gradients in 16 bits until it drops them."""

    chained_optimizers = ()

    def __init__(self, job: Job, state: int) -> None:
        self._job = job
        narrow = not job.config.optimizer.grad_reduce_in_fp32 and job.config.model.dtype != "float32"
        self._copies = state // 3 * narrow  # of moments and master, each in fp32

    def prepare_grads(self) -> bool:
        """Copy gradients, as `main_param.grad = main_grad.float()` does."""
        if self._copies:
            self._job.node.put(self._job.world.rank, "copies of gradients", self._copies)
        return False

    def get_grad_norm(self) -> float:
        """Return a norm."""
        return 1.0

    def step_with_ready_grads(self) -> None:
        """Do nothing."""

    def zero_grad(self) -> None:
        """Drop the copies."""
        if self._copies:
            self._job.node.drop(self._job.world.rank, "copies of gradients")


def of_small_model(settings: EngineSettings, model: Path) -> EngineSettings:
    """Return the settings of an engine that is sent a small model, and two matrices of adapters if it gets any."""
    adapters = settings.adapters and replace(settings.adapters, shapes=MATRICES)
    return replace(settings, model_path=str(model), adapters=adapters)


class Buckets(HostBuffer):
    """The counterpart of CudaBuffer: on the card from the first bucket of a sync until the worker has let go of it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job, self._phase = job, contextlib.ExitStack()
        self._taken = False

    def reserve(self, size: int) -> torch.Tensor:
        """See WeightBuffer."""
        gpu, node = self._job.world.rank, self._job.node
        assert not self._taken, "memory is taken beside what is there, which the plan does not count"
        self._taken = True
        self._phase.enter_context(node.phase(gpu, "sync"))
        node.put(gpu, "buckets", size)
        return super().reserve(size)

    def release_unused(self, *, unmapped: bool) -> None:
        """See WeightBuffer."""
        if self._taken:
            self._taken = False
            self._job.node.drop(self._job.world.rank, "buckets")
            self._phase.close()
        super().release_unused(unmapped=unmapped)

    def close(self) -> None:
        """See WeightBuffer."""
        self.release_unused(unmapped=False)
        super().close()


def train_step(policy: LedgerPolicy, *unused: Any, **options: Any) -> StepResult:
    """Move the state as the real step does: for the passes, then for the optimizer."""
    policy.restore_for_update()
    with policy.job.passing(policy.job.repeated.update if policy.job.repeated else 0):
        policy.job.update()
    with policy.job.node.phase(policy.job.world.rank, "optimizer_step"):
        schedule._apply(policy)
    return StepResult({}, {}, {}, 1.0, False, False, 1e-6)


def logprob_pass(policy: LedgerPolicy, *, repeats: bool = False) -> None:
    """Move the state as a log-prob pass does; one that `repeats` choices of experts, or notes them, takes more."""
    policy.settle()
    policy.job.forward("logprobs", repeats=repeats)


def probe_pass(policy: LedgerPolicy) -> None:
    """Move the state as the trainer's pass over the probe does, beside engines that have their weights."""
    policy.settle()
    policy.job.forward("probe")


class Taught:
    """The model of a teacher, as training.reference has it: its weights come to the card and leave it."""

    def __init__(self, job: Job, ranks: Ranks) -> None:
        """Load the weights, beside nothing but the context."""
        self.job, self.ranks = job, ranks
        job.node.put(job.world.rank, OWN, job.parts("load")[OWN])
        self._weights = Buffer(job, "teacher", parameters.teacher_weights(job.config, job.estimate.stage))

    def restore(self) -> None:
        """See Policy."""
        self._weights.restore()

    def offload(self, parts: Any) -> None:
        """See Policy."""
        assert parts == {"weights"}
        self._weights.offload(())

    def forward(self) -> None:
        """Hold what its pass takes: a head of its own, and layers as the plan has them."""
        job, arch = self.job, parameters.teacher(self.job.config)
        assert arch is not None
        parallel, head = job.config.parallel, {}
        if job.estimate.stage == parallel.pipeline_model_parallel_size - 1:
            rows = -(-arch.vocab_size // parallel.tensor_model_parallel_size)
            item = ITEMS[job.config.model.dtype]
            size = of_head(job.responses("teacher"), arch.hidden_size, rows, item, with_gradient=False, frozen=False)
            head = {"blocks of logits": size}
        job._hold("teacher", {"activations": job.parts("teacher")["activations"]} | head)


def teacher(job: Job, ranks: Ranks) -> reference.Teacher:
    """Return a teacher with its own moves, of a model that counts."""
    made = object.__new__(reference.Teacher)
    made._layout = None  # the trainer's
    model: Any = Taught(job, ranks)
    made._model, made.fingerprint = model, ""
    made._leave()
    return made


class Reference:
    """The reference model in host memory, beside which the policy's weights wait during its pass.

    With adapters it is the model without them: nothing waits.
    """

    def with_logprobs(self, policy: LedgerPolicy, groups: Any, *unused: Any, **options: Any) -> Any:
        """Swap the weights, make the pass, and swap them back."""
        policy.settle()
        job = policy.job
        weights = parameters.state(job.arch, job.config, job.estimate.stage).weights
        for name in ("reference", "policy") if job.config.adapter.type is None else ():
            job.node.keep_on_host(job.world.rank, f"weights of the {name}", weights)
        logprob_pass(policy)
        return groups


class LLM:
    """The counterpart of vllm.LLM on the GPUs of an engine, every one of which takes its time."""

    def __init__(self, job: Job) -> None:
        self.job, self.gpus = job, job.engine_gpus()
        colocated = job.config.rollout.mode == "colocate"
        parts, share = (
            job.parts("engine_start" if colocated else "generation"),
            float(job.config.rollout.engine.get("gpu_memory_utilization", 0.9)),
        )
        if self.job.choices and derived.router_replay(job.config) == "rollout":  # a place for each token of the cache
            arch, count = job.arch, job.estimate.cache_tokens
            assert arch.experts is not None
            size = count * arch.num_layers * arch.experts.top_k * (1 if arch.experts.count <= 256 else 2)
            job.node.keep_on_host(self.gpus[0], "choices of the cache", size)
        self._sizes = {"weights": parts["engine_weights"], "kv_cache": parts["kv_cache"] + parts["engine_working"]}
        for gpu in self.gpus:
            free, wanted = job.node.free(gpu), share * job.node.card
            if free < wanted:  # vLLM looks at the whole device before it loads anything
                raise ValueError(f"Free memory on device ({free / 2**30:.1f} GiB) is less than {wanted / 2**30:.1f}")
            job.world.dawdle()
            with job.node.phase(gpu, "engine_start"):
                job.node.map(gpu, ASLEEP, parts.get(ASLEEP, 0))
                for name, size in self._sizes.items():
                    job.node.map(gpu, name, size)

    def sleep(self, level: int) -> None:
        """Unmap weights and cache on all GPUs, then return."""
        for gpu in self.gpus:
            if level == 1:
                self.job.node.keep_on_host(gpu, "sleeping engine", self._sizes["weights"])
            for name in self._sizes:
                self.job.world.dawdle()
                self.job.node.unmap(gpu, name)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Map what is asked for, all of it without tags, as vLLM does that does not look at what is awake."""
        for gpu in self.gpus:
            for name in tags if tags is not None else self._sizes:
                self.job.world.dawdle()
                self.job.node.map(gpu, name, self._sizes[name])

    def awake(self) -> bool:
        """Return True if it could generate."""
        return all(set(self._sizes) <= self.job.node.mapped(gpu) for gpu in self.gpus)

    def start_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, info: Any) -> None:
        """Take a bucket, for which the weights must be mapped; keep a vocabulary that has to be padded."""
        assert all("weights" in self.job.node.mapped(gpu) for gpu in self.gpus)
        arch = self.job.arch
        wide = (self.job.config.rollout.dtype or self.job.config.model.dtype) == "float32"
        for part in info["update_info"]["parts"]:
            if part["name"] in VOCABULARY and arch.vocab_size % 64:  # vLLM's DEFAULT_VOCAB_PADDING_SIZE
                for gpu in self.gpus:
                    size = arch.vocab_size * arch.hidden_size * (4 if wide else 2)
                    self.job.node.map(gpu, f"pending {part['name']}", size)
        for gpu in self.gpus:
            self.job.node.map(gpu, "a layer that is loaded", self.job.travelling.layer)
        for gpu in self.gpus:
            self.job.node.unmap(gpu, "a layer that is loaded")

    def collective_rpc(self, method: str, seconds: float | None, arguments: tuple[dict[str, Any]]) -> list[list[int]]:
        """Take a bucket of adapters, whose places must be mapped: they are with the weights."""
        assert method == "load_adapters" and all("weights" in self.job.node.mapped(gpu) for gpu in self.gpus)
        return [[arguments[0]["version"]] for _ in self.gpus]

    def finish_weight_update(self) -> None:
        """Load what was kept."""
        for gpu in self.gpus:
            for name in self.job.node.mapped(gpu):
                if name.startswith("pending"):
                    self.job.node.unmap(gpu, name)

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """Return that it was reset."""
        return True


class ScoringLLM:
    """The counterpart of vllm.LLM for a reward model, on the first GPUs of an engine of the policy or behind them."""

    def __init__(self, job: Job, arguments: Mapping[str, Any]) -> None:
        self.job, tp = job, arguments["tensor_parallel_size"]
        share = arguments["gpu_memory_utilization"]  # of which each model of a test has another
        model = next(one for one in job.config.reward.models if one.gpu_memory_utilization == share)
        first = job.engine_gpus()[0] + first_gpu(job.config, model)
        self.gpus = list(range(first, first + tp))
        self.name = model.name
        found = next(one for one in job.estimate.scorers if one.name == model.name)
        cache = found.parts["reward_cache"] + found.parts["reward_working"]
        self._sizes = {"weights": found.parts["reward_weights"], "kv_cache": cache}
        wanted = share * job.node.card
        for gpu in self.gpus:
            if (free := job.node.free(gpu)) < wanted:
                raise ValueError(f"Free memory on device ({free / 2**30:.1f} GiB) is less than {wanted / 2**30:.1f}")
            with job.node.phase(gpu, "engine_start"):
                job.node.map(gpu, f"{SCORING} {self.name} {ASLEEP}", ENGINE)
                self._map(gpu, self._sizes)

    def _map(self, gpu: int, tags: Iterable[str]) -> None:
        for tag in tags:
            self.job.node.map(gpu, f"{SCORING} {self.name} {tag}", self._sizes[tag])

    def sleep(self, level: int) -> None:
        """Unmap weights, which go to the host, and cache."""
        assert level == 1
        for gpu in self.gpus:
            self.job.node.keep_on_host(gpu, f"{SCORING} {self.name}", self._sizes["weights"])
            for tag in self._sizes:
                self.job.world.dawdle()
                self.job.node.unmap(gpu, f"{SCORING} {self.name} {tag}")

    def wake_up(self, tags: Sequence[str]) -> None:
        """Map what is asked for."""
        for gpu in self.gpus:
            self.job.world.dawdle()
            self._map(gpu, tags)

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """Return that it was reset."""
        return True

    def score(self, sequences: Sequence[Any]) -> list[list[float]]:
        """Return a score for each sequence; the engine must be awake."""
        for gpu in self.gpus:
            with self.job.node.phase(gpu, "reward_model"):
                names = {f"{SCORING} {self.name} {tag}" for tag in self._sizes}
                assert names <= self.job.node.mapped(gpu), "it sleeps"
        return [[float(number)] for number, _ in enumerate(sequences)]


class Client:
    """The counterpart of the engine's process and of the connection to it: the same calls, made at once."""

    def __init__(self, job: Job) -> None:
        self.job, self.processes = job, Processes(job)
        self.dead: str | None = None
        self.llm: Any = None
        self._answers: list[Any] = []

    def post(self, seconds: float, method: str, *arguments: Any) -> None:
        """Make a call."""
        if self.dead is not None:
            raise EngineDied(self.dead)
        self._answers.append(getattr(self, f"_{method}")(*arguments))

    def answer(self, seconds: float) -> Any:
        """Return what the earliest call returned."""
        return self._answers.pop(0)

    def call(self, seconds: float, method: str, *arguments: Any) -> Any:
        """Return what a call returns."""
        self.post(seconds, method, *arguments)
        return self.answer(seconds)

    def kill(self, reason: str) -> EngineDied:
        """Die, as the real one."""
        self.dead = reason
        self.processes.kill()
        return EngineDied(reason)

    def close(self) -> None:
        """Free all memory."""
        self.processes.kill()

    def _start(self, arguments: Any) -> None:
        self.processes.score = arguments.get("runner") == "pooling"
        self.llm = ScoringLLM(self.job, arguments) if self.processes.score else LLM(self.job)
        self.processes.gpus = self.llm.gpus if self.processes.score else self.job.engine_gpus()

    def _classify(self, names: Sequence[str], sequences: Sequence[Any]) -> list[list[float]]:
        return list(self.llm.score(sequences))

    def _llm(self, method: str, *arguments: Any) -> Any:
        result = getattr(self.llm, method)(*arguments)
        if self.job.world.rank == 0:
            begins = (
                ("wake_up", ["weights"]) if self.job.config.rollout.mode == "colocate" else ("start_weight_update",)
            )
            self.job.syncs += (method, *arguments) == begins
            if self.job.deaths.get(self.job.syncs) == method:
                self.job.syncs += 1  # a second call of this sync finds it dead
                raise self.kill(f"planted in {method}")
        return result


class Processes:
    """The processes of an engine, with which its memory ends."""

    def __init__(self, job: Job) -> None:
        self._job, self.gpus = job, job.engine_gpus()
        self.score = False  # those of a reward model

    def find(self) -> None:
        """Do nothing."""

    def gone(self) -> None:
        """Return that all live."""

    def excerpt(self) -> str:
        """Return an empty log."""
        return ""

    def kill(self) -> None:
        """Free all memory."""
        for gpu in self.gpus:
            for name in self._job.node.mapped(gpu):
                if name.startswith(SCORING) == self.score:
                    self._job.node.unmap(gpu, name)


class LedgerWorker(RolloutWorker):
    """Generation without tokens: engines must be awake, one dies in the middle, or a stop comes."""

    job: Job
    calls = 0

    def generate(self, request: Request, journal: Journal | None = None, *unused: Any) -> Generated:
        """Return completions of one token, after what the script has for this call."""
        job, engine = self.job, self.engine
        event, self.calls = job.script.get(self.calls, ""), self.calls + 1
        phase = "evaluation" if request.rollout == EVAL_ROLLOUT else "generation"
        with job.node.phase(job.world.rank, phase):
            self._check_awake()
            if event == "death":
                self._die()
            self._check_awake()
        if event == "stop":
            job.stopped_in = phase
            if engine is not None:
                engine.abort()
            raise Interrupted
        empty, one = np.zeros(1, np.float32), np.zeros(1, np.int32)
        completions = tuple(Completion(one, empty, "", "stop", seed, reward=seed) for seed in range(request.samples))
        if not self.prompts_come_from_outside:
            groups = {slot: Group(slot, request.prompts[slot], completions) for slot in request.slots}
            if job.choices and derived.router_replay(job.config) == "rollout" and phase == "generation":
                groups = job.marked(groups)
            return Generated(groups, {}, 0.0)
        if journal is None:  # another rank owns the engine
            return Generated({}, {}, 0.0)
        slots = request.slots[job.world.rank // job.config.gpus_per_engine :: self.num_engines]
        prompts = SharedPrompts(self.store, f"generate/{self.calls}").fetch(slots)
        groups = {slot: Group(slot, prompt, completions) for slot, prompt in zip(slots, prompts, strict=True)}
        journal.append(list(groups.values()))
        return Generated(groups, {}, 0.0)

    def _check_awake(self) -> None:
        if self.engine is not None:
            assert self.engine._client.llm.awake() and not self.engine._emptied
        self.job.world.wait()

    def _die(self) -> None:
        """Have the engine of rank 0 die and come back, while the others generate."""
        job, done = self.job, f"recovered/{self.calls}"
        if self.engine is not None and job.world.rank == 0:
            self.recovery.recover(self.engine._client.kill("planted"))
            self.store.set(done, "1")
        else:
            while not self.store.check([done]):
                self.recovery.join_syncs()
                job.world.dawdle()
            self.recovery.join_syncs()
        job.world.wait()


class Saver:
    """The checkpoint's copy, for which all state comes back to the card."""

    seconds = 0.0

    def __init__(self, policy: LedgerPolicy) -> None:
        self._policy = policy

    def save(self, staging: Any, commit: Any, write_more: Any) -> None:
        """Bring back what is to be saved, as sharded.prepare does."""
        job = self._policy.job
        gpu, node = job.world.rank, job.node
        if self._policy.weight_offload.is_offloaded:
            job.saved_away.add(gpu)
        with node.phase(gpu, "save"):
            self._policy.restore()
            self._policy.settle()
            gather_optimizer(self._policy)
            node.keep_on_host(gpu, "copy", job.estimate.host.get("checkpoint_copy", 0) // job.world.size)

    def wait(self, seconds: float | None = None) -> None:
        """Do nothing: nothing is under way."""

    check = wait


def load(policy: LedgerPolicy) -> None:
    """Load a checkpoint before there is an engine, as `_load_policy` does."""
    with policy.job.node.phase(policy.job.world.rank, "load"):
        if (optimizer := shared_part(policy, loads=True)) is not None:
            part, every = optimizer
            whole = {share.index: dict.fromkeys(KEYS, share.parameter) for share in every}
            shared_optimizer.scatter(part, KEYS, whole)


def gather_optimizer(policy: LedgerPolicy) -> None:
    """Have the real code bring parameters of a shared optimizer to their owners, as torch's writer asks for them.

    :class:`Torch` counts what that takes.
    """
    if (optimizer := shared_part(policy)) is None:
        return
    part, every = optimizer

    def place(name: str, elements: int) -> torch.Tensor:
        return torch.empty(elements, device="meta")

    group: Any = part.data_parallel_group
    assembly = Assembly(group, place if policy.config.checkpoint.async_save else None)
    tensors = assembly.add(part, KEYS, every)
    flat = {f"{index}.{key}": tensor for index, keys in tensors.items() for key, tensor in keys.items()}
    assembly.find({name: [ShardedTensor.from_rank_offsets(name, tensor)] for name, tensor in flat.items()})
    for item in assembly.in_order([_item(name, tensor) for name, tensor in flat.items()]):
        assembly.values(item.index)
    assembly.rest()


def _item(name: str, tensor: torch.Tensor) -> WriteItem:
    """Return what torch's planner makes of a tensor."""
    begin, size = torch.Size([0]), tensor.shape
    data = TensorWriteData(ChunkStorageMetadata(begin, size), TensorProperties(dtype=tensor.dtype), size)
    return WriteItem(MetadataIndex(name, begin), WriteItemType.SHARD, tensor_data=data)


def shared_part(policy: LedgerPolicy, *, loads: bool = False) -> tuple[Any, list[Share]] | None:
    """Return an optimizer that data-parallel ranks share, and its parameters; None if they share none.

    This rank and its neighbour own one parameter each. In a save a full batch comes while a bucket of this rank's
    parameter is put together, and one goes. In a load a full batch comes and one goes.
    """
    config, rank = policy.config, policy.job.world.rank
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    size = config.world_size // (tp * parallel.pipeline_model_parallel_size)
    if not config.optimizer.distributed:
        return None
    me, neighbour = rank // tp % size, (rank // tp + 1) % size
    state = parameters.state(policy.arch, config, policy.job.estimate.stage).optimizer
    limit = SAVE_TRANSIT_BYTES // 4  # elements
    if size == 1:
        given = [(me, {me: state // 12})]
    elif loads:
        others = state * (size - 1) // size  # bytes that come from others
        piece = limit if others >= SAVE_TRANSIT_BYTES else others // 12
        given = [(owner, {me: piece, neighbour: piece}) for owner in (me, neighbour)]
    else:  # the first batch has what goes of all three tensors, and of one a move that ends in the second bucket
        own, coming = (limit - 1, limit) if state >= 12 * 2 * limit else (state // 12 // size, state // 12 // size)
        given = [(neighbour, {neighbour: 1, me: min(limit // 3, own)}), (me, {me: own, neighbour: coming})]
    every, held = [], {}
    for owner, elements in given:
        ends = list(itertools.accumulate(elements.values()))
        pieces = tuple(Piece(one, end - elements[one], end) for one, end in zip(elements, ends, strict=True))
        every.append(Share(len(every), torch.empty(ends[-1], device="meta"), pieces, owner))
        held[id(every[-1].parameter)] = torch.empty(elements[me], device="meta")
    part = SimpleNamespace(
        data_parallel_group=SimpleNamespace(rank=lambda: me, size=lambda: size),
        optimizer=None,
        every=every,
        _get_main_param_and_optimizer_states=lambda parameter: dict.fromkeys(KEYS, held[id(parameter)]),
    )
    return part, every


class Torch:
    """torch as checkpoint.shared_optimizer sees it: what it allocates is there until nothing refers to it.

    It is on the card of the rank that asks, or in host memory, of which nothing is given back to the node.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._numbers = job, itertools.count()
        self._on_host: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))  # bytes now, and at most, by rank

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: int, **options: Any) -> torch.Tensor:
        """Return a tensor without memory, which is charged."""
        tensor, node, gpu = torch.empty(*size, **{"device": "meta", **options}), self._job.node, self._job.world.rank
        tensor.charged = True  # type: ignore[attr-defined]
        if "device" not in options:
            self._change_host(gpu, tensor.nbytes)
            weakref.finalize(tensor, self._change_host, gpu, -tensor.nbytes)
            return tensor
        name = f"transit {next(self._numbers)}"
        node.put(gpu, name, tensor.nbytes)
        weakref.finalize(tensor, node.drop, gpu, name)
        return tensor

    def _change_host(self, gpu: int, size: int) -> None:
        now, most = self._on_host[gpu]
        self._on_host[gpu] = (now + size, max(most, now + size))
        self._job.node.keep_on_host(gpu, "transit", self._on_host[gpu][1])


class Sends:
    """torch.distributed as checkpoint.shared_optimizer sees it.

    What is sent must be what the card holds anyway, or memory that :class:`Torch` counts.
    """

    isend, irecv = "isend", "irecv"

    def P2POp(self, operation: str, tensor: torch.Tensor, **options: Any) -> torch.Tensor:  # noqa: N802
        """Look at a tensor that is to travel, and hold it as the real operation does."""
        held = operation == "irecv" or tensor._is_view() or tensor._base is not None
        held = held or hasattr(tensor, "charged")
        assert held, "a copy is sent, for which the plan has no memory"
        return tensor

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        """Return that all has travelled."""
        return []


class Clock:
    """The clock of a step, which measures nothing."""

    device, traces = "ledger", None

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.monitor = PassMonitor()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a block."""
        return contextlib.nullcontext()

    def traced(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Return a block."""
        return contextlib.nullcontext()

    def begin(self, step: int) -> None:
        """Do nothing."""

    def elapsed(self) -> float:
        """Return no time."""
        return 0.0

    def profiles(self, step: int) -> bool:
        """Return that no step is profiled."""
        return False


__all__ = ["Client", "Clock", "EngineDied", "Job", "LLM", "LedgerPolicy", "LedgerWorker", "Saver"]
