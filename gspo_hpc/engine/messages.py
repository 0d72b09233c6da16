"""Messages between the owner of an engine and the engine's process, beside plain data."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_hpc.data.records import Completion, Experts
from gspo_hpc.engine.settings import Sampling


@dataclass(frozen=True)
class Submission:
    """Completions of one prompt that are asked for: `requests` has an id and a seed for each."""

    tokens: list[int]
    sampling: Sampling
    requests: list[tuple[str, int]]
    experts: bool = False  # have vLLM's choice of experts read from its output
    version: int | None = None  # of the adapters to compute with


@dataclass(frozen=True)
class Answer:
    """The completion of one request; `prompt_experts` where they were asked for, see outputs.reported_experts."""

    request: str
    completion: Completion
    prompt_experts: Experts | None = None


@dataclass(frozen=True)
class Failure:
    """A call that raised: its error on one line, the names of the error's classes, and whether it ends the engine."""

    text: str
    classes: tuple[str, ...]
    fatal: bool
