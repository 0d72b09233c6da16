"""The constants that calibration rows of docs/estimates.md determine, and what they leave open of the others.

tools/estimates.py prints both. Held-out rows have no part in any value here; their errors are only reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

from published_runs import CUT_SHARE, KNOWN_H20, RUNS, Run, inferred

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.estimates import devices, engines, passes, rates, time
from gspo_hpc.planning.estimates.devices import Device
from gspo_hpc.planning.estimates.time import Sizes, Times, Work
from gspo_hpc.planning.plan import make_plan

H20, GB200 = "H20-96GB", "GB200-186GB"
FORMER_SPREAD = 0.8  # when the rows of H20 whose lengths are published were first compared
FREE = ("EFFICIENCY", "STEP_SECONDS", "LAYER_SECONDS", "EXPERTS_SECONDS")  # whole steps do not tell these apart


def _row(key: str) -> Run:
    (found,) = (run for run in RUNS if run.calibration and run.key == key)
    return found


(_H20_ROW,) = (run for run in KNOWN_H20 if run.calibration)
_SHARED = _row("nemo_0_5_0_llama_3_1_8b_16_h100")
_MIXTURE = _row("nemo_0_6_0_qwen3_30b_a3b_32_h100")
_GB200_ROW = _row("nemo_0_5_0_llama_3_1_8b_8_gb200")


@contextmanager
def varied(**constants: float) -> Iterator[None]:
    """Have other constants for a while."""
    kept = {name: getattr(rates, name) for name in constants}
    _set(constants)
    try:
        yield
    finally:
        _set(kept)


def _set(constants: dict[str, float]) -> None:
    for name, value in constants.items():
        setattr(rates, name, value)
    engines._scale.cache_clear()  # lengths depend on rates.SPREAD


@contextmanager
def card(name: str, **figures: Any) -> Iterator[None]:
    """Have another card of that name for a while."""
    kept = devices._KNOWN[name]
    devices._KNOWN[name] = replace(kept, **figures)
    devices.find.cache_clear()
    try:
        yield
    finally:
        devices._KNOWN[name] = kept
        devices.find.cache_clear()


def _solve(rises: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function that rises is 0, by bisection."""
    for _ in range(32):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return (low + high) / 2


def cut_share(spread: float) -> float:
    """Return the share of responses of the calibration row on H20 that a spread of lengths has cut at the longest."""
    longest = int(_H20_ROW.config["rollout"]["max_response_length"])
    with varied(SPREAD=spread):
        median = engines._scale(Work(512, 8, 155.0, _H20_ROW.response_tokens, longest))
    return 1.0 - NormalDist().cdf(math.log(longest / median) / spread)


@dataclass(frozen=True)
class Determined:
    """Values that the calibration rows determine, with the other constants as they are, before they are rounded."""

    spread: float
    products: float  # of H20
    reads: float  # of H20
    sync: float
    overhead: float
    switch: float
    launching: float  # of GB200
    launch: float  # of a product of an expert

    @property
    def possible(self) -> bool:
        """True if no time is negative, no share above 1, and the CPU of GB200 no faster than others at launching."""
        shares = (rates.EFFICIENCY, rates.EFFICIENCY * self.products, rates.BANDWIDTH * self.reads)
        least = min(self.sync, self.overhead, self.switch, self.launch)
        return least >= 0 and self.launching >= 1 and max(shares) <= 1

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have these values for a while, but for the spread."""
        with (
            varied(SWITCH_SECONDS=self.switch, EXPERT_LAUNCH=self.launch),
            varied(SYNC_SECONDS=self.sync, OVERHEAD_SECONDS=self.overhead),
            card(H20, products=self.products, reads=self.reads),
            card(GB200, launching=self.launching),
        ):
            yield


def _phase(name: str, **figures: float) -> float:
    with card(H20, **figures):
        return _H20_ROW.estimate().seconds[name] - _H20_ROW.phases[name]


def _step(run: Run, **constants: float) -> float:
    with varied(**constants):
        return run.estimate().rollout - run.seconds


@cache
def _spread() -> float:
    return _solve(lambda value: cut_share(value) - CUT_SHARE, 0.3, 2.0)


def determined() -> Determined:
    """Return what the calibration rows determine, each figure by one published number."""
    products = _solve(lambda value: -_phase("update", products=value), 0.1, 10.0)
    reads = _solve(lambda value: -_phase("generation", products=products, reads=value), 0.05, 5.0)
    sync = rates.SYNC_SECONDS - _phase("sync")  # what its bytes do not take
    overhead = _H20_ROW.seconds - sum(_H20_ROW.phases.values())
    with varied(SYNC_SECONDS=sync, OVERHEAD_SECONDS=overhead):
        switch = _solve(lambda value: _step(_SHARED, SWITCH_SECONDS=value), -100.0, 100.0)

        def slower(launching: float) -> float:
            with card(GB200, launching=launching):
                return _step(_GB200_ROW, SWITCH_SECONDS=switch)

        launching = _solve(slower, -10.0, 60.0)
        launch = _solve(lambda value: _step(_MIXTURE, SWITCH_SECONDS=switch, EXPERT_LAUNCH=value), -1e-2, 1e-2)
    return Determined(_spread(), products, reads, sync, overhead, switch, launching, launch)


@dataclass(frozen=True)
class Bound:
    """The least or the greatest value of a constant that calibration rows allow, with all others determined anew."""

    value: float
    found: Determined
    errors: tuple[float, ...]  # of the predictions whose lengths are published


def _bound(name: str, far: float) -> Bound:
    """Return the value nearest to `far` with which everything that is determined is possible."""
    near = getattr(rates, name)

    def fits(share: float) -> bool:
        with varied(**{name: near + share * (far - near)}):
            return determined().possible

    low, high = 0.0, 1.0
    if fits(high):
        low = high
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    value = near + low * (far - near)
    with varied(**{name: value}):
        found = determined()
        return Bound(value, found, _errors(found))


def _errors(found: Determined) -> tuple[float, ...]:
    """Return the errors of the predictions whose lengths are published, with values that calibration rows determine."""
    with found.used():
        return tuple(run.estimate().rollout / run.seconds - 1.0 for run in RUNS if run.is_known_prediction)


@cache
def bounds(name: str) -> tuple[Bound, Bound]:
    """Return the least and the greatest value of a constant that the calibration rows allow."""
    far = 1.0 if name == "EFFICIENCY" else 20.0 * getattr(rates, name)
    return _bound(name, 0.0 if name != "EFFICIENCY" else 0.1), _bound(name, far)


@cache
def before() -> dict[str, Times]:
    """Return the estimates of all runs on H20 with the constants that KNOWN_H20 was first compared with.

    No figure was that of a card, lengths spread less, a switch was counted where the trainer stays as well, and what a
    sync takes beside its bytes was called overhead. Engines were in eager mode nowhere.
    """
    found: dict[str, Times] = {}
    former = varied(
        SPREAD=FORMER_SPREAD, SWITCH_SECONDS=13.0, SYNC_SECONDS=0.0, OVERHEAD_SECONDS=3.0, EAGER_SECONDS=0.0
    )
    with former, card(H20, products=1.0, reads=1.0), by_operations():
        for run in RUNS:
            if run.config["cluster"]["gpu"] != "H20":
                continue
            memory = {name: value for name, value in run.config["memory"].items() if name != "offload_trainer"}
            config = from_dict({**run.config, "memory": memory})
            tokens = inferred(run) if run.tokens is None else run.tokens
            found[run.key] = run.estimate_of(config, make_plan(config), tokens)
    return found


@cache
def otherwise() -> dict[str, tuple[float, ...]]:
    """Return errors of the predictions of KNOWN_H20 if another figure of the card took up what generation takes more.

    The names are those of what would: all of generation, or launches.
    """
    held = [run for run in KNOWN_H20 if not run.calibration]
    found: dict[str, tuple[float, ...]] = {}
    with card(H20, reads=1.0):
        share = _H20_ROW.phases["generation"] / _H20_ROW.estimate().seconds["generation"]
        times = [run.estimate() for run in held]
    longer = [one.rollout + (share - 1.0) * one.seconds["generation"] for one in times]
    found["generation"] = tuple(one / run.seconds - 1.0 for one, run in zip(longer, held, strict=True))
    slower = _solve(lambda value: _phase("generation", reads=1.0, launching=value), 0.0, 50.0)
    with card(H20, reads=1.0, launching=slower):
        found["launches"] = tuple(run.estimate().rollout / run.seconds - 1.0 for run in held)
    return found


@contextmanager
def _syncs_more(extra: Callable[[Sizes, Config], float]) -> Iterator[None]:
    """Have syncs that take so many seconds more for a while, in place of SYNC_SECONDS."""
    kept = passes.sync

    def counted(model: Sizes, config: Config, device: Device) -> float:
        return kept(model, config, device) + extra(model, config)

    passes.sync = counted
    try:
        with varied(SYNC_SECONDS=0.0):
            yield
    finally:
        passes.sync = kept


@cache
def other_syncs() -> dict[str, tuple[float, ...]]:
    """Return errors of the predictions whose lengths are published if syncs took their seconds otherwise.

    The names are those of what the calibration row's seconds would be divided by: layers, or bytes; or "apart", where
    engines on GPUs of their own take the same seconds. All other constants are determined anew.
    """
    row = time.sizes_of(from_dict(_H20_ROW.config))
    more = determined().sync

    def colocated(config: Config) -> bool:
        return config.rollout.mode == "colocate"

    counted: dict[str, Callable[[Sizes, Config], float]] = {
        "layers": lambda model, config: more * model.layers / row.layers * colocated(config),
        "bytes": lambda model, config: more * model.parameters / row.parameters * colocated(config),
        "apart": lambda model, config: more,
    }
    found: dict[str, tuple[float, ...]] = {}
    for name, extra in counted.items():
        with _syncs_more(extra):
            found[name] = _errors(determined())
    return found


FORMER_SHARE = 0.25  # of what large products sustain that passes over mixtures reached
FORMER_LAUNCH = 10e-6  # of a product of an expert beside it


@contextmanager
def by_operations() -> Iterator[None]:
    """Have passes over mixtures reach a share of operations for a while, as they did until 2026-11-28.

    So did prompts that engines read; seconds of each product of an expert were few.
    """
    kept: Any = (passes.seconds, engines.prefill)

    def longer(model: Sizes, device: Device) -> float:
        return rates.EFFICIENCY * device.products / FORMER_SHARE if model.layers_with_experts else 1.0

    def seconds(model: Sizes, config: Config, device: Device, forward: float, *others: Any) -> float:
        found: float = kept[0](model, config, device, forward * longer(model, device), *others)
        return found

    def prefill(model: Sizes, config: Config, device: Device, given: Work) -> float:
        found: float = kept[1](model, config, device, given)
        return found * longer(model, device)

    with varied(EXPERT_LAUNCH=FORMER_LAUNCH):
        _count((seconds, prefill))
        try:
            yield
        finally:
            _count(kept)


def _count(counted: Any) -> None:
    passes.seconds, engines.prefill = counted


@cache
def former_mixtures() -> dict[str, float]:
    """Return errors of predictions of mixtures as they were then. Lengths that are inferred are so anew."""
    held = [run for run in RUNS if run.role == "prediction" and "A3B" in run.title]
    with by_operations():
        lengths = {run.key: inferred(run) if run.tokens is None else run.tokens for run in held}
        return {run.title: run.estimate_for(lengths[run.key]).rollout / run.seconds - 1.0 for run in held}
