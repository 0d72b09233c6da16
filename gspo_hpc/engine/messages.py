"""Messages between the owner of an engine and the engine's process, beside plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gspo_hpc.data.records import Completion, Experts
from gspo_hpc.engine.settings import Sampling


@dataclass
class Sampled:
    """The tokens of a completion that are sampled so far, with their log-probs."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Submission:
    """Completions of one prompt that are asked for: `requests` has an id and a seed for each.

    Of those in `begun` the model has sampled some tokens already, and goes on behind them.
    """

    tokens: list[int]
    sampling: Sampling
    requests: list[tuple[str, int]]
    experts: bool = False  # have vLLM's choice of experts read from its output
    version: int | None = None  # of the adapters to compute with
    begun: Mapping[str, Sampled] = field(default_factory=dict)  # by id
    may_stop: bool = False  # the owner may ask for what is sampled by then, see Host.stop


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
