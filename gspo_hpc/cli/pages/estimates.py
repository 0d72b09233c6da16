"""The parts of the pages of `gspo-hpc plan` and `suggest` about memory and time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import RenderableType

from gspo_hpc.cli.pages.render import grid, item, text, width
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.estimates.memory import ENGINE, Estimate, bars, shown
from gspo_hpc.system.text import GIB, in_gib

if TYPE_CHECKING:
    from gspo_hpc.planning.estimates.time import Times
    from gspo_hpc.planning.layouts import Layout

_NAMES = 14  # columns of the first column, in every table of both sections


def memory(found: Estimate, config: Config) -> Iterator[RenderableType]:
    """Yield a bar for each phase, as long as its share of the card, and what a node needs."""
    gpus, training = config.cluster.gpus_per_node, config.training_gpus_per_node
    apart = training < gpus
    card = f"{config.cluster.gpu}, {in_gib(found.card)} GiB"
    yield item("  ", f"of one {card}, in GiB; worst off is pipeline stage {found.stage}:")
    phases: list[tuple[str, RenderableType]] = []
    generation: list[tuple[str, RenderableType]] = []
    totals = {phase.name: f"{in_gib(phase.total):>5}" for phase in found.phases}
    for name, bar, legend in bars(found, min(50, width() - 27)):
        rows = generation if apart and name == "generation" else phases
        rows.append((shown(name), f"|{bar}| {totals[name]}"))
        rows.append(("", Columns(map(text, legend.split(", ")), padding=(0, 2))))
    if apart:
        yield item("  ", f"one of the GPUs that train, {training} of a node's {gpus}:")
    yield grid(phases, first=_NAMES)
    if generation:
        yield item("  ", f"one of the GPUs that generate, {gpus - training} of a node's {gpus}:")
        yield grid(generation, first=_NAMES)
    parts = ", ".join(f"{shown(name)} {in_gib(size, 0)}" for name, size in found.host.items() if size >= GIB / 2)
    more = [("a node", f"{in_gib(sum(found.host.values()), 0)} GiB of its own memory: {parts}")]
    if "engine_weights_asleep" in found.host:
        kept, other = in_gib(found.host["engine_weights_asleep"], 0), 3 - found.sleep_level
        level = (
            f"{found.sleep_level}: sleeping engines keep {in_gib(ENGINE)} GiB per GPU, {kept} GiB of a node's memory"
        )
        instead = f"with rollout.sleep_level={other} a node needs {in_gib(found.host_otherwise, 0)} GiB in all"
        more.append(("sleep level", f"{level}; {instead}"))
    more.append(("KV cache", f"{found.cache_tokens:,} tokens an engine"))
    yield grid(more, first=_NAMES)


def time(found: Times, response_tokens: float, price: float | None = None) -> Iterator[RenderableType]:
    """Yield the seconds of a rollout by phase, and what follows from them."""
    values = found.to_json(price)
    about = f"for responses of {response_tokens:,.0f} tokens on average (--response-tokens); see docs/estimates.md"
    yield item("  ", about)
    longest = min(40, width() - 29)
    rows = [
        (shown(name), f"{seconds:8.1f} s", "#" * round(longest * seconds / found.rollout))
        for name, seconds in found.seconds.items()
        if seconds >= 0.05
    ]
    updates = f"{found.updates} optimizer step{'s' * (found.updates > 1)}"
    rows.append(("a rollout", f"{found.rollout:8.1f} s", f"with {updates}: {values['seconds_per_step']:.1f} s a step"))
    yield grid(rows, "lrl", first=_NAMES)
    rate = f"{values['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
    whose = "the GPUs'" if found.trainers == found.gpus else f"its GPUs' ({found.trainers:,})"
    more = [("throughput", f"{rate}; the update reaches {values['update_mfu']:.0%} of {whose} peak (MFU)")]
    if values["gpu_hours"] is not None:
        cost = "" if values["cost"] is None else f", {values['cost']:,.0f} at {price:g} a GPU-hour"
        hours, gpu_hours = (f"{n:,.{2 if n < 10 else 0}f}" for n in (values["hours"], values["gpu_hours"]))
        more.append(("the run", f"{hours} hours, {gpu_hours} GPU-hours{cost}"))
    yield grid(more, first=_NAMES)


def suggestions(found: Sequence[Layout]) -> Iterator[RenderableType]:
    """Yield layouts, best first, as settings that can be pasted into a shell, with reasons."""
    for place, layout in enumerate(found, 1):
        rate = f"{layout.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        yield item(f"{place}. ", f"{layout.seconds:.1f} s a step, {rate}, {layout.headroom:.0%} of the GPU left")
        yield from (item("     - ", reason) for reason in layout.reasons)
        settings = textwrap.wrap(str(layout), width() - 7, break_long_words=False, break_on_hyphens=False)
        yield from (f"     {line} \\" for line in settings[:-1])
        yield f"     {settings[-1]}"
