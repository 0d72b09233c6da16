"""A plan in the making: its quantities, broken rules, warnings and notes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_hpc.config.derived import trained_rows
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.rules.ids import RuleId

if TYPE_CHECKING:
    from gspo_hpc.planning.estimates.advice import Case
    from gspo_hpc.planning.estimates.memory import Estimate

Number = int | float


class Broken(NamedTuple):
    """A rule that does not hold, and a message with its numbers."""

    rule: RuleId
    message: str


class SourceShare(NamedTuple):
    """The part of a run that one of several sources has."""

    name: str
    prompts: int  # that can be trained on
    share: float  # of the prompts that are drawn, 0 to 1
    most: int | None  # of its prompts in one rollout, at most
    draws: int | None  # of its prompts in the run
    epochs: float | None  # how often each of its prompts is drawn


class NotRun(NamedTuple):
    """A feature that this version can plan, but not run, and the reason with what to set instead."""

    feature: str
    reason: str


@dataclass(frozen=True)
class ModelFile:
    """The content of the model's config.json, or why there is none."""

    content: dict[str, Any] | None
    note: str | None = None
    error: str | None = None  # the file is there and cannot be read

    def size(self, *names: str) -> int | None:
        """Return the whole number under the first of these names that has one; None if none has."""
        content = self.content
        if content is not None:
            for name in names:
                if isinstance(value := content.get(name), int):
                    return value
        return None

    @cached_property
    def kv_heads(self) -> int | None:
        """Key-value heads: as many as attention heads where they are not given."""
        return self.size("num_key_value_heads") or self.size("num_attention_heads")

    @cached_property
    def experts(self) -> int | None:
        """Experts of a layer; None: the model has none, or that is not known."""
        return self.size("num_experts", "num_local_experts", "n_routed_experts")


class Models:
    """The models and data files that plans are made for. Each is read once, however many plans are made."""

    def __init__(self) -> None:
        self.planned = cache(architecture.planned)  # by model.path
        self.untrained = cache(architecture.untrained)  # by model.path and model.provider
        self.fields = cache(_fields)  # of the first rows, by the path of a data file
        self._found: dict[tuple[str | None, str], architecture.Architecture | None] = {}
        self._files: dict[str | None, ModelFile] = {None: ModelFile(None)}

    def find(self, config: Config) -> architecture.Architecture | None:
        """Return what `architecture.find` returns."""
        key = (config.model.path, config.model.provider)
        if key not in self._found:
            self._found[key] = architecture.find(config)
        return self._found[key]

    def file(self, path: str | None) -> ModelFile:
        """Return the config.json of the model at a path, its own or a shipped one."""
        if path not in self._files:
            self._files[path] = self._file(str(path))
        return self._files[path]

    def unknown(self, config: Config) -> bool:
        """Return whether nothing says that the model can be trained, or why not: no file, and no known name."""
        path, file = config.model.path, self.file(config.model.path)
        if path is None or file.content is not None or file.error is not None:
            return False
        return self.untrained(path, config.model.provider) is None

    def _file(self, path: str) -> ModelFile:
        try:
            content, note = self.planned(path)
        except ValueError as error:
            return ModelFile(None, error=str(error))
        if content is not None and isinstance(content.get("text_config"), dict):
            content = content["text_config"]
        return ModelFile(content, note)


def _fields(path: str) -> tuple[str, ...] | None:
    if not os.path.exists(path) and not any(mark in path for mark in "*?:"):
        return None
    from gspo_hpc.data import counting  # only here: most plans are made where there is no data

    return counting.fields(path)


class PlanBuilder:
    """A plan in the making. `quantities.py` fills in sizes, rules what is broken or not run, `remarks.py` the rest."""

    def __init__(self, config: Config, rows: int | None, models: Models | None = None) -> None:
        self.config, self.models = config, models or Models()
        self.rows = None if rows is None else trained_rows(rows, config.data)  # prompts that are trained on
        self.rows_given = rows
        self.sources: tuple[SourceShare, ...] = ()
        self.server = config.rollout.mode == "server"
        self.world: int | None = config.world_size  # GPUs that train; None: cannot be known
        self.dp: int | None = None
        self.quantities: dict[str, int | Fraction] = {}
        self.layout: dict[str, int] = {}
        self.broken: list[Broken] = []
        self.not_run: list[NotRun] = []
        self.warnings: list[str] = []
        self.tight: list[str] = []  # warnings of memory that fits only just
        self.notes: list[str] = []
        self.memory: Estimate | None = None
        self.explained = True  # whether messages say what would fix memory that lacks
        self.case: Case | None = None  # what rules about memory look at, where it may not fit

    @property
    def architecture(self) -> architecture.Architecture | None:
        """The model's architecture; None where that is not known."""
        return self.models.find(self.config)

    @cached_property
    def model_file(self) -> ModelFile:
        """The model's config.json, its own or a shipped one."""
        return self.models.file(self.config.model.path)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.config.rollout.max_prompt_length + self.config.rollout.max_response_length

    @property
    def longest_sequence_made(self) -> str:
        """The sum that makes that number, for messages."""
        rollout = self.config.rollout
        prompt, response = rollout.max_prompt_length, rollout.max_response_length
        return f"max_prompt_length ({prompt}) + max_response_length ({response}) = {prompt + response}"

    def numbers(self) -> dict[str, Number]:
        """Return the quantities as plain numbers: whole ones as int, others as float."""
        pairs = self.quantities.items()
        return {name: value.numerator if value.denominator == 1 else float(value) for name, value in pairs}


def show(value: Fraction | int) -> str:
    """Return 4, or 0.5: a number as messages have it."""
    return str(value) if Fraction(value).denominator == 1 else f"{float(value):.6g}"
