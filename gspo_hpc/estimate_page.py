"""What `gspo-hpc plan` and `suggest` print of memory and time.

Floor 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gspo_hpc.config import Config
from gspo_hpc.memory_estimate import ENGINE, GIB, Estimate, bars, shown
from gspo_hpc.plan_page import fitted, page_width
from gspo_hpc.suggest import Layout
from gspo_hpc.time_estimate import Times


def memory_lines(found: Estimate, config: Config) -> Iterator[str]:
    """A bar for each phase, as long as its share of the card, and what a node needs."""
    yield from fitted(_memory(found, config))


def _memory(found: Estimate, config: Config) -> Iterator[str]:
    gpus, training = config.cluster.gpus_per_node, config.training_gpus_per_node
    apart = training < gpus
    card = f"{config.cluster.gpu}, {found.card / GIB:.1f} GiB"
    yield f"  of one {card}, in GiB; worst off is pipeline stage {found.stage}:"
    if apart:
        yield f"  one of the GPUs that train, {training} of a node's {gpus}:"
    waiting = []
    for name, bar, legend in bars(found, min(50, page_width() - 26)):
        phase = next(phase for phase in found.phases if phase.name == name)
        legend = ", ".join(part.replace(" ", "\xa0") for part in legend.split(", "))
        drawn = [f"  {shown(name):<14} |{bar}| {phase.total / GIB:5.1f}", f"  {'':<14}  {legend}"]
        if apart and name == "generation":
            waiting = [f"  one of the GPUs that generate, {gpus - training} of a node's {gpus}:", *drawn]
        else:
            yield from drawn
    yield from waiting
    parts = ", ".join(f"{shown(name)} {size / GIB:.0f}" for name, size in found.host.items() if size >= GIB / 2)
    yield f"  {'a node':<14}  {sum(found.host.values()) / GIB:.0f} GiB of its own memory: {parts}"
    if "engine_weights_asleep" in found.host:
        kept, other = found.host["engine_weights_asleep"] / GIB, 3 - found.sleep_level
        text = f"{found.sleep_level}: asleep, engines keep {ENGINE / GIB:.1f} GiB a GPU, {kept:.0f} of a node"
        instead = f"rollout.sleep_level={other}: {found.host_otherwise / GIB:.0f} in all"
        yield f"  {'sleep level':<14}  {text}; {instead}"
    yield f"  {'KV cache':<14}  {found.cache_tokens:,} tokens an engine"


def time_lines(found: Times, response_tokens: float, price: float | None = None) -> Iterator[str]:
    """Seconds of a rollout by phase, and what follows."""
    yield from fitted(_time(found, response_tokens, price))


def _time(found: Times, response_tokens: float, price: float | None) -> Iterator[str]:
    told = found.to_json(price)
    yield f"  for responses of {response_tokens:,.0f} tokens on average (--response-tokens); see docs/estimates.md"
    for name, seconds in found.seconds.items():
        if seconds >= 0.05:
            bar = "#" * round(min(40, page_width() - 29) * seconds / found.rollout)
            yield f"  {shown(name):<14} {seconds:8.1f} s  {bar}".rstrip()
    updates = f"{found.updates} optimizer step{'s' * (found.updates > 1)}"
    yield f"  {'a rollout':<14} {found.rollout:8.1f} s  with {updates}: {told['seconds_per_step']:.1f} s a step"
    rate = f"{told['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
    whose = "the GPUs'" if found.trainers == found.gpus else f"its GPUs' ({found.trainers:,})"
    yield f"  {'throughput':<14} {rate}; the update reaches {told['update_mfu']:.0%} of {whose} peak (MFU)"
    if told["gpu_hours"] is not None:
        cost = "" if told["cost"] is None else f", {told['cost']:,.0f} at {price:g} a GPU-hour"
        yield f"  {'the run':<14} {told['hours']:,.1f} hours, {told['gpu_hours']:,.0f} GPU-hours{cost}"


def suggestion_lines(found: Sequence[Layout]) -> Iterator[str]:
    """Layouts, best first, as settings that can be pasted, with reasons."""
    for place, layout in enumerate(found, 1):
        rate = f"{layout.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        yield from fitted([f"{place}. {layout.seconds:.1f} s a step, {rate}, {layout.headroom:.0%} of the GPU left"])
        yield from fitted(f"     - {reason}" for reason in layout.reasons)
        yield from fitted([f"     {layout}"], continued=" \\")
