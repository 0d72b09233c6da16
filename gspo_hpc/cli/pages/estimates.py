"""The parts of the page of `gspo-hpc plan` about memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import RenderableType

from gspo_hpc.cli.pages.plan import length_needs
from gspo_hpc.cli.pages.render import grid, item, text, width
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.estimates.memory import ENGINE, Estimate
from gspo_hpc.planning.estimates.phases import percent, risk, shown
from gspo_hpc.system.text import GIB, in_gib

if TYPE_CHECKING:
    from gspo_hpc.planning.estimates.time import Conversations, Times

_MARKS = "#=+*o%@~:x-&$^vnzsk"
_NAMES = 14  # columns of the first column, in every table of both sections


def answer(
    found: Estimate, config: Config, times: Times | None = None, price: float | None = None
) -> Iterator[tuple[str, str]]:
    """Yield in three rows how well a run fits, the seconds of a step, and the hours and the cost of the run."""
    card, peak = config.cluster.gpu or "GPU", found.busiest
    fits = f"{in_gib(peak.reserved)} of the {in_gib(found.card)} GiB of each {card} ({shown(peak.name)})"
    room = f"{percent(found.headroom)} are left for peaks"
    if found.headroom < 0:
        room = f"{in_gib(peak.total)} without fragmentation"
    yield "fits", f"{risk(found.headroom)}: {fits}; {room}"
    if times is None:
        lacking = "cluster.gpu does not name the GPU"
        if config.cluster.gpu is not None:
            lacking = "batch.global_batch_size is not given, so nobody knows how much a step has to do"
        yield "time", f"not estimated: {lacking}"
        return
    values = times.to_json(price)
    low, high = (seconds / times.updates for seconds in times.range)
    step = f"{values['seconds_per_step']:,.0f} s a step ({low:,.0f} to {high:,.0f})"
    rollout = f"{times.rollout:,.0f} s a rollout, of which generation takes {times.seconds['generation']:,.0f}"
    yield "time", f"{step}; {rollout}"
    if values["gpu_hours"] is None:
        yield "run", length_needs(config, "hours")
        return
    hours, gpu_hours = (f"{n:,.{2 if n < 10 else 0}f}" for n in (values["hours"], values["gpu_hours"]))
    cost = "--price P tells the cost" if values["cost"] is None else f"{values['cost']:,.0f} at {price:g} a GPU-hour"
    yield "run", f"{hours} hours for {times.steps:,} steps, {gpu_hours} GPU-hours; {cost}"


def memory(found: Estimate, config: Config) -> Iterator[RenderableType]:
    """Yield a bar for each phase, as long as its share of the card, and what a node needs."""
    gpus, training = config.cluster.gpus_per_node, config.training_gpus_per_node
    apart = config.rollout.mode == "server"
    every = training == gpus  # nodes either train or generate
    card = f"{config.cluster.gpu or 'GPU'}, which has {in_gib(found.card)}"
    yield item("  ", f"GiB of one {card}; pipeline stage {found.stage} needs the most:")
    phases: list[tuple[str, RenderableType]] = []
    generation: list[tuple[str, RenderableType]] = []
    totals = {phase.name: f"{in_gib(phase.reserved):>5}" for phase in found.phases}
    for name, bar, legend in bars(found, min(50, width() - 27)):
        rows = generation if apart and name in ("generation", "reward_model") else phases
        rows.append((shown(name), f"|{bar}| {totals[name]}"))
        rows.append(("", Columns(map(text, legend.split(", ")), padding=(0, 2))))
    if apart:
        yield item("  ", "one of the GPUs that train" + ("" if every else f", {training} of a node's {gpus}") + ":")
    yield grid(phases, first=_NAMES)
    if generation:
        some = "" if every else f", {gpus - training} of a node's {gpus}"
        yield item("  ", f"one of the GPUs that generate{some}:")
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


def bars(found: Estimate, width: int = 50) -> Iterator[tuple[str, str, str]]:
    """Yield for each phase its name, a bar as long as its share of the card, and a legend of its parts.

    A part has the same mark in all bars; the largest parts have the clearest marks.
    """
    largest: dict[str, int] = {}
    for phase in found.phases:
        for name, size in phase.reserved_parts.items():
            largest[name] = max(size, largest.get(name, 0))
    marks = dict(zip((name for name, _ in sorted(largest.items(), key=lambda part: -part[1])), _MARKS, strict=False))
    for phase in found.phases:
        drawn, so_far, legend = "", 0, []
        for name, size in sorted(phase.reserved_parts.items(), key=lambda part: -part[1]):
            so_far += size
            drawn += marks[name] * (round(so_far / found.card * width) - len(drawn))
            if size >= 0.005 * found.card:
                legend.append(f"{marks[name]} {shown(name)} {in_gib(size)}")
        free = "." * (width - len(drawn))
        yield phase.name, drawn[:width] + free + ("!" if len(drawn) > width else " "), ", ".join(legend)


def time(
    found: Times, response_tokens: float, price: float | None = None, others: Mapping[str, str | None] | None = None
) -> Iterator[RenderableType]:
    """Yield the seconds of a rollout by phase, and what follows from them.

    `others` says by name of other ways to generate whether they pay.
    """
    values = found.to_json(price)
    about = f"for responses of {response_tokens:,.0f} tokens on average (--response-tokens); see docs/estimates.md"
    yield item("  ", about)
    if found.talk is not None:
        yield item("  ", _conversations(found.talk))
    longest = min(40, width() - 29)
    rows = [
        (shown(name), f"{seconds:8.1f} s", "#" * round(longest * seconds / found.rollout))
        for name, seconds in found.seconds.items()
        if seconds >= 0.05
    ]
    updates = f"{found.updates} optimizer step{'s' * (found.updates > 1)}"
    how = "side by side, " * found.side_by_side + f"with {updates}: {values['seconds_per_step']:.1f} s a step"
    rows.append(("a rollout", f"{found.rollout:8.1f} s", how))
    yield grid(rows, "lrl", first=_NAMES)
    low, high = found.range
    shares = f"{low / found.rollout:.2f} and {high / found.rollout:.2f} times their estimates (docs/estimates.md)"
    bounds = ("range", f"{low:,.0f} to {high:,.0f} s a rollout: published runs lie between {shares}")
    rate = f"{values['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
    whose = "the GPUs'" if found.trainers == found.gpus else f"its GPUs' ({found.trainers:,})"
    more = [bounds, ("throughput", f"{rate}; the update reaches {values['update_mfu']:.0%} of {whose} peak (MFU)")]
    if values["gpu_hours"] is not None:
        cost = "" if values["cost"] is None else f", {values['cost']:,.0f} at {price:g} a GPU-hour"
        hours, gpu_hours = (f"{n:,.{2 if n < 10 else 0}f}" for n in (values["hours"], values["gpu_hours"]))
        more.append(("the run", f"{hours} hours, {gpu_hours} GPU-hours{cost}"))
    more += [(shown(name), text) for name, text in (others or {}).items() if text is not None]
    yield grid(more, first=_NAMES)


def _conversations(found: Conversations) -> str:
    """Return what an estimate supposes of conversations, and what follows for groups and engines."""
    waits = "answers that take no time (--answer-seconds)"
    if found.answer_seconds:
        waits = f"answers of {found.answer_seconds:g} s (--answer-seconds), {found.waiting_seconds:,.1f} s in each"
    tokens = (
        f"{found.sampled_tokens:,.0f} tokens of the model and {found.reply_tokens:,.0f} of replies (--reply-tokens)"
    )
    sizes = f"a group has {found.group_tokens:,.0f} tokens, and the last engine makes {found.engine_steps:,.0f} steps"
    return f"conversations of {found.turns:,.1f} messages (--turns), with {tokens}, and {waits}; {sizes}"
