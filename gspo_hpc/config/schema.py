"""The config of a run: its sections, every key of them, and what follows for ranks and folders.

Loading from YAML and the command line is :mod:`gspo_hpc.config.loader`; the arithmetic between keys is
:mod:`gspo_hpc.planning.plan`. Batch sizes count completions. Everything is frozen: a run never changes its settings.
A ``None`` default means "not given": ``plan`` works with what is there, :meth:`Config.missing` names what a run needs.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from gspo_hpc.config import plugins
from gspo_hpc.config.algorithm import AlgorithmSettings
from gspo_hpc.config.learning import (
    Batch,
    Checkpoint,
    Environment,
    Eval,
    Judges,
    Optimizer,
    Reward,
    RewardFunction,
    Rollout,
    Tool,
    Tracking,
)
from gspo_hpc.config.machine import (
    Adapter,
    Cluster,
    Faults,
    Memory,
    Model,
    Moe,
    Notify,
    Parallel,
    Platform,
    Sandbox,
)
from gspo_hpc.config.section import MOST, WHOLE, Count, Matching, Positive, Section, as_dict, key, replace
from gspo_hpc.config.sections.data import Data, EvalSet, Rows, Source
from gspo_hpc.config.sections.reward_models import RewardModel
from gspo_hpc.config.sections.slurm import Container, Slurm

__all__ = [
    "Adapter",
    "Batch",
    "Checkpoint",
    "Cluster",
    "Config",
    "Container",
    "Data",
    "Environment",
    "Eval",
    "EvalSet",
    "Faults",
    "Judges",
    "Memory",
    "Model",
    "Moe",
    "Notify",
    "Optimizer",
    "Parallel",
    "Platform",
    "Reward",
    "RewardFunction",
    "RewardModel",
    "Rollout",
    "Rows",
    "Run",
    "Sandbox",
    "Slurm",
    "Source",
    "Tool",
    "Tracking",
    "as_dict",
    "keys",
    "replace",
    "run_name",
]

_RUN_NAME = Matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "must be 1 to 100 letters, digits, '.', '_' or '-', and begin with a letter or digit",
)
_RUN_DIR = Matching(r"[^\0\n\r\v\f\x1c-\x1e\x85\u2028\u2029]+", "must be a path without line breaks")
_SEED = "must be at least 0 and below 2**63"
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}


def run_name(text: str, most: int = 100) -> str:
    """Return the name of a run that a text gives, without characters that no name has; empty if none is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:most]


class Run(Section):
    """The name of a run, its directory and its length."""

    name: Annotated[str, _RUN_NAME] = key("run", "The name of the run.")
    dir: Annotated[str, _RUN_DIR] | None = key(None, "The run directory; the default is runs/NAME.")
    seed: Annotated[int, Field(ge=0, lt=2**63, json_schema_extra={"errorMessage": _SEED}), WHOLE] = key(
        42, "Seed of the data order and of sampling."
    )
    deterministic: bool = key(
        False,
        "On GPUs, make a resumed run equal the undisturbed one bit for bit, at a cost in speed "
        "(docs/exactness.md); on CPUs this changes nothing.",
    )
    max_steps: Count | None = key(None, "Optimizer steps of the run; give this or max_epochs.")
    max_epochs: Positive | None = key(
        None,
        "Passes over the training prompts, from which max_steps follows when a run starts; give this or max_steps.",
    )


class Config(Section):
    """A whole run."""

    run: Run = Field(default_factory=Run)
    cluster: Cluster = Field(default_factory=Cluster)
    model: Model = Field(default_factory=Model)
    adapter: Adapter = Field(default_factory=Adapter)
    parallel: Parallel = Field(default_factory=Parallel)
    memory: Memory = Field(default_factory=Memory)
    moe: Moe = Field(default_factory=Moe)
    batch: Batch = Field(default_factory=Batch)
    data: Data = Field(default_factory=Data)
    rollout: Rollout = Field(default_factory=Rollout)
    algorithm: Annotated[AlgorithmSettings, plugins.Chosen()] = Field(default_factory=plugins.default)
    reward: Reward = Field(default_factory=Reward)
    judges: Judges = Field(default_factory=Judges)
    environment: Environment = Field(default_factory=Environment)
    sandbox: Sandbox = Field(default_factory=Sandbox)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    tracking: Tracking = Field(default_factory=Tracking)
    eval: Eval = Field(default_factory=Eval)
    slurm: Slurm = Field(default_factory=Slurm)
    faults: Faults = Field(default_factory=Faults)
    notify: Notify = Field(default_factory=Notify)

    @property
    def training_gpus_per_node(self) -> int:
        """GPUs that train, of a node that does: without those that server mode sets apart; 0 if these leave none."""
        rollout, gpus = self.rollout, self.cluster.gpus_per_node
        if rollout.mode != "server" or self.cluster.generation_nodes:
            return gpus
        return max(0, gpus - (rollout.engines_per_node or 0) * self.gpus_per_engine)

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of an engine of the policy, and of the engines of reward models that are set apart beside it."""
        own = self.rollout.tensor_parallel_size
        if self.rollout.mode != "server":
            return own
        return own + sum(one.tensor_parallel_size for one in self.reward.models if one.placement == "apart")

    @property
    def training_nodes(self) -> int:
        """Nodes that train: all but those that server mode sets apart; 0 if these leave none."""
        apart = self.cluster.generation_nodes if self.rollout.mode == "server" else 0
        return max(0, self.cluster.nodes - apart)

    @property
    def world_size(self) -> int:
        """Training ranks: one per accelerator that trains."""
        return self.training_nodes * self.training_gpus_per_node

    @property
    def gpus_per_engine_node(self) -> int:
        """GPUs of a node that has engines, those that train among them: another number only where it just generates."""
        apart = self.cluster.nodes - self.training_nodes
        return (self.cluster.generation_gpus_per_node if apart else None) or self.cluster.gpus_per_node

    @property
    def num_ranks(self) -> int:
        """Ranks of the job: those that train and, in server mode, those that generate."""
        apart = self.cluster.nodes - self.training_nodes
        return self.training_nodes * self.cluster.gpus_per_node + apart * self.gpus_per_engine_node

    @property
    def layout(self) -> dict[str, int]:
        """The number of ranks, and how they share the model. Another layout sums in another order."""
        at = self.parallel
        sizes = {
            "ranks": self.world_size,
            "TP": at.tensor_model_parallel_size,
            "PP": at.pipeline_model_parallel_size,
            "CP": at.context_parallel_size,
            "EP": at.expert_model_parallel_size,
        }
        if at.virtual_pipeline_model_parallel_size is not None:
            sizes["VPP"] = at.virtual_pipeline_model_parallel_size
        for name in ("first", "last"):
            if (layers := getattr(at, f"num_layers_in_{name}_pipeline_stage")) is not None:
                sizes[f"layers of the {name} stage"] = layers
        if at.expert_tensor_parallel_size not in (None, at.tensor_model_parallel_size):
            sizes["ETP"] = at.expert_tensor_parallel_size
        return sizes

    @property
    def run_dir(self) -> str:
        """The run directory, as given or runs/NAME."""
        return self.run.dir or f"runs/{self.run.name}"

    def missing(self) -> list[str]:
        """Return the keys that a run (not a plan) needs and that are not given."""
        needed = {
            "run.max_steps or run.max_epochs": self.run.max_steps or self.run.max_epochs,
            "model.path": self.model.path,
            "batch.global_batch_size": self.batch.global_batch_size,
            "batch.num_generations": self.batch.num_generations,
            "batch.micro_batch_size or batch.micro_batch_tokens": (
                self.batch.micro_batch_size or self.batch.micro_batch_tokens
            ),
            "data.train": self.data.train or self.data.sources or None,
            "reward.functions": self.reward.functions or (() if self.algorithm.has_teacher else None),
        }
        return [key for key, value in needed.items() if value is None]


@cache
def keys() -> dict[str, FieldInfo]:
    """Return the field of every ``section.key``, in order."""
    sections = {name: section_class(name) for name in Config.model_fields}
    return {f"{name}.{one}": field for name, part in sections.items() for one, field in part.model_fields.items()}


def section_class(name: str) -> type[Section]:
    """Return the class of a section of the config."""
    found = Config.model_fields[name].annotation
    assert isinstance(found, type) and issubclass(found, Section)
    return found


def field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """Return the field that a path into the config leads to, list positions included; None inside free-form values.

    Behind "algorithm" the path may hold the name of one, as pydantic's errors do.
    """
    return _followed(path)[0]


def kind_at(path: Sequence[str | int]) -> Any:
    """Return the type of the values at a path, without ranges and None; Any inside free-form values, None elsewhere."""
    return _followed(path)[1]


def _followed(path: Sequence[str | int]) -> tuple[FieldInfo | None, Any]:
    kind: Any = Config
    field = None
    for step in path:
        if kind is AlgorithmSettings and (chosen := plugins.named(step)) is not None:
            kind = chosen
        elif isinstance(step, int):
            kind = plain_type(next(iter(get_args(kind)), None))
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and step in kind.model_fields:
            field = kind.model_fields[step]
            kind = plain_type(field.annotation)
        elif get_origin(kind) is dict:
            return field, plain_type(get_args(kind)[1])
        else:
            return None, None
    return field, kind


def plain_type(annotation: Any) -> Any:
    """Return a key's type without its ranges and without None."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return plain_type(next(arg for arg in get_args(annotation) if arg is not type(None)))
    return annotation


def limits(field: FieldInfo) -> dict[str, Any]:
    """Return the bounds of a key by pydantic's names: ge, gt, le and lt."""
    return {name: getattr(one, name) for one in _metadata(field) for name in _BOUNDS if hasattr(one, name)}


def in_range(field: FieldInfo, number: float) -> bool:
    """Return whether a number is within the bounds of a key."""
    return all(_BOUNDS[name](number, bound) for name, bound in limits(field).items())


def _metadata(field: FieldInfo) -> Iterator[Any]:
    yield from field.metadata
    for argument in get_args(field.annotation):
        for one in get_args(argument)[1:] if get_origin(argument) is Annotated else ():
            yield from one.metadata if isinstance(one, FieldInfo) else [one]


@cache
def highest(name: str) -> int:
    """Return the largest whole number that a dotted key takes, free-form keys included."""
    found = limits(keys()[name]) if name in keys() else {}
    return int(found.get("le", found["lt"] - 1 if "lt" in found else MOST))
