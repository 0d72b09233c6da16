"""The passes of a step, their sizes and what is done around them: everything that follows from the config alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from gspo_hpc.config.schema import Adapter, Batch, Config, Data, Eval, EvalSet, Rollout, Rows, replace

PassName = Literal["update", "old_logprobs", "reference"]  # each with a size of its own; the probe has none


class Passes(NamedTuple):
    """The passes that a step needs besides the update."""

    old_logprobs: bool
    reference: bool


class PassSize(NamedTuple):
    """Micro-batches of one pass over a DP rank's completions: a fixed count, or a budget of tokens filled by packing.

    Neither is set where the config does not give it yet.
    """

    needed: bool
    micro_batch_size: int | None
    micro_batch_tokens: int | None


def updates_per_rollout(batch: Batch) -> int:
    """Return the optimizer steps made from one rollout: steps_per_generation x num_iterations, from the keys given.

    With 1, every ratio is 1 (:func:`every_ratio_is_one`), but where other weights sampled.
    """
    steps = batch.steps_per_generation or 1
    if batch.generation_batch_size is not None and batch.global_batch_size is not None:
        steps = max(1, math.ceil(batch.generation_batch_size / batch.global_batch_size))
    return steps * batch.num_iterations


def trained_rows(rows: int, data: Data) -> int:
    """Return how many rows of data.train are trained on; the others are held out for evaluation."""
    if data.train_ratio == 1:
        return rows
    return math.floor(rows * Fraction(str(data.train_ratio)))  # 0.99 is 99/100, not the nearest binary number


def older_weights_sample(config: Config) -> bool:
    """Return True if weights sample that are gone once training begins: some tokens of it, or all."""
    return config.rollout.max_staleness > 0 or config.rollout.unfinished == "continue"


def several_weights_sample(config: Config) -> bool:
    """Return True if the weights may change while a completion is sampled."""
    return config.rollout.unfinished == "continue" or config.rollout.in_flight_updates


def term_names(functions: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each term of a reward: its function, "#2" added to its second use."""
    return tuple(
        f"{name}#{uses + 1}" if (uses := functions[:place].count(name)) else name
        for place, name in enumerate(functions)
    )


def has_unseen(data: Data) -> bool:
    """Return True if there are prompts for evaluation: files of their own, or a share of those for training."""
    return (
        data.eval is not None or data.train_ratio < 1 or bool(data.eval_sets or any(one.eval for one in data.sources))
    )


def old_logprobs_are_the_engines(config: Config) -> bool:
    """Return True if ratios are to the engine's log-probs, so that not even those of a first update are 1."""
    return older_weights_sample(config) or config.algorithm.correction == "bypass"


def ratios_are_bounded(config: Config) -> bool:
    """Return True if the clip range stops ratios: a gate has none, and bounded weights are to be reached seldom."""
    return config.algorithm.trust_region in ("clip", "geometric")


def every_ratio_is_one(config: Config) -> bool:
    """Return True if the weights that sampled make the only update of a rollout, and the old log-probs are theirs."""
    return updates_per_rollout(config.batch) == 1 and not old_logprobs_are_the_engines(config)


def passes_needed(config: Config) -> Passes:
    """Return the log-prob passes of a step.

    Old log-probs are needed only when the policy moves within a rollout, a reference only when the KL term has a
    weight. Where the weights that sampled are gone, or with algorithm.correction bypass, the engine's log-probs are the
    old ones. The same pass finds the entropies by which tokens are chosen with algorithm.top_entropy_quantile.
    """
    moves = updates_per_rollout(config.batch) > 1 and not old_logprobs_are_the_engines(config)
    return Passes(moves or config.algorithm.top_entropy_quantile < 1, config.algorithm.kl_beta > 0)


def trains_adapters(config: Config) -> bool:
    """Return True if adapters are trained, and the model's own weights are not."""
    return config.adapter.type is not None


def reference_is_base(config: Config) -> bool:
    """Return True if the reference is the model without its adapters: then there is no second copy of anything.

    It is the start, where adapters add nothing yet, unless they begin with those of a folder.
    """
    if config.algorithm.has_teacher:
        return False
    return trains_adapters(config) and config.adapter.path is None and not config.algorithm.moves_reference


def reference_is_start(config: Config) -> bool:
    """Return True if there is a reference, and it is the model that the run begins with all along."""
    settings = config.algorithm
    return settings.kl_beta > 0 and not settings.moves_reference and not settings.has_teacher


def teacher_config(config: Config) -> Config:
    """Return the config by which the teacher is built: the run's, with another model, which is not trained.

    It has the trainer's dtype and, but for the sizes of its own, its layout; no adapters, nothing that is computed
    again, and no weights in 8 bits.
    """
    memory = replace(config.memory, recompute_granularity=None)
    model = replace(config.model, path=config.algorithm.teacher, fp8=None)
    return replace(config, model=model, adapter=Adapter(), memory=memory, parallel=config.parallel.of_teacher())


def has_own_layout(config: Config) -> bool:
    """Return True if the teacher's ranks share it otherwise than the trainer's share the policy."""
    return config.algorithm.has_teacher and config.parallel.of_teacher() != config.parallel


def rewards_count(config: Config) -> bool:
    """Return False where a teacher is the only signal: no reward function of training prompts has a weight."""
    given = [term.weight for term in config.reward.functions if not term.only_named]
    given += [weight for one in config.data.sources for weight in (one.rewards or {}).values()]
    return not config.algorithm.has_teacher or any(given)


def bringup_seconds(config: Config) -> float:
    """Return the seconds within which every rank must report that it runs."""
    if config.faults.bringup_timeout is not None:
        return config.faults.bringup_timeout
    return 60.0 if config.slurm.container is None else 1800.0


def offload_trainer(config: Config) -> bool:
    """Return True if the trainer of a rank moves to host memory while engines generate."""
    wanted = config.memory.offload_trainer
    if config.rollout.mode == "server":
        return False  # engines have GPUs of their own
    return config.cluster.platform == "cuda" if wanted is None else wanted


def keeps_weights(config: Config) -> bool:
    """Return True if engines have their weights from one sync to the next, because they do not drop them to sleep."""
    return config.rollout.sleep_level == 1 or not offload_trainer(config)


def offloaded_parts(config: Config) -> frozenset[str]:
    """Return what of the trainer is in host memory while engines generate: weights, gradients, optimizer."""
    return frozenset(config.memory.offload_parts if offload_trainer(config) else ())


def samples_part_of_distribution(rollout: Rollout) -> bool:
    """Return True if completions are sampled from the most likely tokens only (top_p or top_k)."""
    return rollout.top_p < 1.0 or rollout.top_k != -1


def deterministic_kernels(config: Config) -> bool:
    """Return True if kernels must be chosen that add in a fixed order; those of CPUs do so anyway."""
    return config.run.deterministic and config.cluster.platform == "cuda"


def fuses_swiglu(config: Config) -> bool:
    """Return True if the halves of an MLP are activated and multiplied by one function that keeps only its input.

    It is compiled, which CPUs do without. mcore-bridge leaves it off in the models that it builds.
    """
    return config.cluster.platform == "cuda" and config.model.provider == "own"


class Overlaps(NamedTuple):
    """The collectives of data parallelism that run beside computation."""

    grad_reduce: bool
    param_gather: bool


def overlaps(config: Config) -> Overlaps:
    """Return what overlaps: what is configured, but nothing where sums are made in the order of ranks."""
    if deterministic_kernels(config):
        return Overlaps(False, False)
    return Overlaps(config.parallel.overlap_grad_reduce, config.parallel.overlap_param_gather)


def engine_dtype(config: Config) -> str:
    """Return the dtype of an engine's weights: its own where it is given, else the trainer's."""
    return config.rollout.dtype or config.model.dtype


def engine_itemsize(config: Config) -> int:
    """Return the bytes of one weight in an engine."""
    return 4 if engine_dtype(config) == "float32" else 2


class GapLimits(NamedTuple):
    """The largest and the mean gap between log-probs of engine and trainer that are allowed, in nats."""

    max: float
    mean: float
    weighted: bool  # each token's gap counts with its probability


def gap_limits(config: Config) -> GapLimits:
    """Return what is allowed: as configured, else by precision. In 16 bits the gap is weighted."""
    full = {engine_dtype(config), config.model.dtype} == {"float32"}
    largest, mean = config.rollout.probe_max_gap, config.rollout.probe_mean_gap
    return GapLimits(
        largest if largest is not None else (1e-3 if full else 0.25),
        mean if mean is not None else (1e-4 if full else 0.05),
        weighted=not full,
    )


def router_replay(config: Config) -> Literal["off", "rollout", "old_logprobs"]:
    """Return the pass whose choice of experts the updates repeat; "off" if they choose anew."""
    wanted = config.moe.router_replay
    if wanted == "auto":
        reported = config.cluster.platform == "cuda" and not config.environment.talks  # by whole completions
        return "rollout" if reported else "old_logprobs"
    return wanted


def pass_sizes(config: Config) -> dict[str, PassSize]:
    """Return the size of every pass: its own where given, else the update's."""
    names: tuple[PassName, ...] = ("update", "old_logprobs", "reference")
    return {name: pass_size(config, name) for name in names}


def pass_size(config: Config, name: PassName) -> PassSize:
    """Return the size of one pass."""
    batch = config.batch
    update = (batch.micro_batch_size, batch.micro_batch_tokens)
    if name == "update":
        return PassSize(True, *update)
    needed = passes_needed(config)
    if name == "old_logprobs":
        own = (batch.logprob_micro_batch_size, batch.logprob_micro_batch_tokens)
        return PassSize(needed.old_logprobs, *(own if any(own) else update))
    own = (batch.reference_micro_batch_size, batch.reference_micro_batch_tokens)
    return PassSize(needed.reference, *(own if any(own) else update))


class BusyProcesses(NamedTuple):
    """The processes of a rank that has an engine, each of which keeps a core busy while the engine generates."""

    engine: int  # vLLM's core, and a worker for each GPU if there are several: both poll without a pause
    rewards: int  # and those in which an environment answers
    environment: bool = False

    @property
    def total(self) -> int:
        """The sum, with the rank itself."""
        return 1 + self.engine + self.rewards

    def __str__(self) -> str:
        theirs = "reward functions and environment" if self.environment else "reward functions"
        return f"the rank (1), its engine ({self.engine}) and its {theirs} ({self.rewards})"


def busy_processes(config: Config) -> BusyProcesses:
    """Return how many processes a rank with an engine has. With one GPU, vLLM's core is its own worker."""
    gpus = config.rollout.tensor_parallel_size
    talks = config.environment.talks
    workers = config.reward.workers + config.environment.workers * talks
    return BusyProcesses(1 if gpus == 1 else 1 + gpus, workers, talks)


def cpus_per_task(config: Config) -> int | None:
    """Return the cores that a job requests for each rank; None leaves the number to Slurm, which gives one.

    On GPUs a job that nobody gave cores requests one for each busy process of a node, shared out evenly: where an
    engine has several GPUs, one of its ranks has all of its processes, and ranks are not bound to their own share
    (:func:`shares_cores`). Where the user unbound them, and on CPUs, where an engine and its rank take turns, nothing
    is requested for it.
    """
    given, ranks = config.slurm.cpus_per_task, config.gpus_per_engine_node
    unbound = any(word.startswith("--cpu-bind=none") for word in config.slurm.srun)
    if given is not None or unbound or config.cluster.platform != "cuda":
        return given
    busy = ranks + engines_per_node(config) * (busy_processes(config).total - 1)
    return -(-busy // ranks)


def shares_cores(config: Config) -> bool:
    """Return whether the ranks of a node use all of its job's cores, because only some of them have an engine."""
    bound = any(word.startswith("--cpu-bind") for word in config.slurm.srun)
    asked = config.slurm.cpus_per_task is None and config.cluster.platform == "cuda"
    return asked and not bound and engines_per_node(config) < config.gpus_per_engine_node


def engine_over_nodes(config: Config) -> bool:
    """Return True if an engine has more GPUs than a node."""
    return config.rollout.tensor_parallel_size > config.gpus_per_engine_node


def engines_per_node(config: Config) -> int:
    """Return the engines that have GPUs of a node, of those that generate; 1 where an engine has several nodes.

    It is never 0, so that what follows can be said of a layout that a rule refuses.
    """
    return config.rollout.engines_per_node or max(1, config.gpus_per_engine_node // config.gpus_per_engine)


def engine_gpus_per_node(config: Config) -> int:
    """Return the GPUs of a node that engines of the policy have: all of them where one has several nodes."""
    gpus, size = config.gpus_per_engine_node, config.rollout.tensor_parallel_size
    if engine_over_nodes(config):
        return gpus
    return size * engines_per_node(config)


@dataclass(frozen=True)
class Role:
    """The role of a rank, and its place among the ranks that have the same."""

    generates: bool
    index: int  # among all of them
    count: int  # of all of them
    local_index: int  # among those of its node
    per_node: int  # of a node that has any
    nodes: int  # that have any


def node_of(config: Config, rank: int) -> tuple[int, int]:
    """Return the node of a rank of the job, and its place on it. Nodes that only generate may have other GPUs."""
    gpus, nodes = config.cluster.gpus_per_node, config.training_nodes
    if rank < nodes * gpus:
        return divmod(rank, gpus)
    node, local = divmod(rank - nodes * gpus, config.gpus_per_engine_node)
    return nodes + node, local


def gpus_of_node(config: Config, node: int) -> int:
    """Return the GPUs of a node of the job, which are as many as its ranks."""
    return config.cluster.gpus_per_node if node < config.training_nodes else config.gpus_per_engine_node


def role_of(config: Config, rank: int) -> Role:
    """Return the role of a rank of the job.

    Where whole nodes generate, they are the last ones; where some GPUs of every node do, the last ones of the node. So
    rank 0 always trains.
    """
    node, local = node_of(config, rank)
    gpus, nodes, training = gpus_of_node(config, node), config.training_nodes, config.training_gpus_per_node
    if node >= nodes:
        apart, node = config.cluster.nodes - nodes, node - nodes
        return Role(True, node * gpus + local, apart * gpus, local, gpus, apart)
    if local >= training:
        each, place = gpus - training, local - training
        return Role(True, node * each + place, nodes * each, place, each, nodes)
    return Role(False, node * training + local, nodes * training, local, training, nodes)


def restarts_generators(config: Config) -> bool:
    """Return whether the ranks that generate start again when one of them is killed, and those that train go on.

    The launcher of one machine does it. Under Slurm, and with reward models, the attempt ends.
    """
    apart = config.rollout.mode == "server" and config.cluster.nodes == 1
    return apart and not config.reward.scored and config.faults.max_engine_restarts > 0


def decider(config: Config, source: Rows | None = None) -> str:
    """Return the name of the function that decides: `eval.reward`, by default the first that grades all prompts.

    For a source with functions of its own it is the first of these, unless `eval.reward` is among them.
    """
    own = None if source is None else source.rewards
    if own is not None and config.eval.reward not in own:
        return str(next(iter(own)))
    functions = config.reward.functions
    return config.eval.reward or next((one for one in functions if not one.only_named), functions[0]).function


def eval_of(config: Config, name: str) -> Eval:
    """Return how the prompts of an evaluation set are asked: as `eval` says, but for what the set says itself."""
    own = next((one for one in config.data.eval_sets if one.name == name), None)
    given = {} if own is None else {key: getattr(own, key) for key in EvalSet.model_fields.keys() & Eval.model_fields}
    return replace(config.eval, **{key: value for key, value in given.items() if value is not None})
