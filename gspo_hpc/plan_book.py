"""What is found while planning: quantities, broken rules, warnings; and what is read of models, once.

Floor 1: plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from gspo_hpc import model_config
from gspo_hpc.config import Config

Number = int | float


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold, with its numbers."""

    rule: int
    message: str


class Models:
    """What is known of models, each read once: for many plans of one moment."""

    def __init__(self) -> None:
        self.planned = cache(model_config.planned)  # by model.path
        self._found: dict[tuple[str | None, str], model_config.Architecture | None] = {}

    def find(self, config: Config) -> model_config.Architecture | None:
        """model_config.find."""
        key = (config.model.path, config.model.provider)
        if key not in self._found:
            self._found[key] = model_config.find(config)
        return self._found[key]


class Book:
    """What is found while planning."""

    def __init__(self, config: Config, rows: int | None, models: Models | None = None) -> None:
        self.config, self.rows, self.models = config, rows, models or Models()
        self.server = config.rollout.mode == "server"
        self.world: int | None = config.world_size  # GPUs that train; None: cannot be known
        self.dp: int | None = None
        self.quantities: dict[str, int | Fraction] = {}
        self.layout: dict[str, int] = {}
        self.broken: list[Broken] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.memory_judged = False  # whether an estimate was made

    def numbers(self) -> dict[str, Number]:
        """The quantities as plain numbers: whole ones as int, others as float."""
        pairs = self.quantities.items()
        return {name: value.numerator if value.denominator == 1 else float(value) for name, value in pairs}

    def check(self, rule: int, holds: bool, message: str) -> None:
        if not holds:
            self.broken.append(Broken(rule, message))


def show(value: Fraction | int) -> str:
    """4, or 0.5: for messages."""
    return str(value) if Fraction(value).denominator == 1 else f"{float(value):.6g}"
