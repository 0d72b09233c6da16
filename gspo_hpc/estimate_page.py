"""What `gspo-hpc plan` and `suggest` print of memory and time.

Floor 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gspo_hpc.config import Config
from gspo_hpc.memory_estimate import ENGINE, GIB, Estimate, bars, shown
from gspo_hpc.suggest import Layout
from gspo_hpc.time_estimate import Times


def memory_lines(found: Estimate, config: Config) -> Iterator[str]:
    """A bar for each phase, as long as its share of the card, and what a node needs."""
    card = f"{config.cluster.gpu}, {found.card / GIB:.1f} GiB"
    yield f"  of one {card}, in GiB; worst off is pipeline stage {found.stage}:"
    for name, bar, legend in bars(found):
        phase = next(phase for phase in found.phases if phase.name == name)
        yield f"  {shown(name):<14} |{bar}| {phase.total / GIB:5.1f}"
        yield f"  {'':<14}  {legend}"
    parts = ", ".join(f"{shown(name)} {size / GIB:.0f}" for name, size in found.host.items() if size >= GIB / 2)
    yield f"  {'a node':<14} {sum(found.host.values()) / GIB:.0f} GiB of its own memory: {parts}"
    if "engine_weights_asleep" in found.host:
        kept, other = found.host["engine_weights_asleep"] / GIB, 3 - found.sleep_level
        text = f"{found.sleep_level}: asleep, engines keep {ENGINE / GIB:.1f} GiB of each GPU and {kept:.1f} of a node"
        instead = f"with rollout.sleep_level={other} a node takes {found.host_otherwise / GIB:.0f}"
        yield f"  {'sleep level':<14} {text}; {instead}"
    yield f"  {'KV cache':<14} {found.cache_tokens:,} tokens an engine"


def time_lines(found: Times, response_tokens: float, price: float | None = None) -> Iterator[str]:
    """Seconds of a rollout by phase, and what follows."""
    told = found.to_json(price)
    yield f"  for responses of {response_tokens:,.0f} tokens on average (--response-tokens); see docs/estimates.md"
    for name, seconds in found.seconds.items():
        if seconds >= 0.05:
            bar = "#" * round(40 * seconds / found.rollout)
            yield f"  {shown(name):<14} {seconds:8.1f} s  {bar}"
    updates = f"{found.updates} optimizer step{'s' * (found.updates > 1)}"
    yield f"  {'a rollout':<14} {found.rollout:8.1f} s  with {updates}: {told['seconds_per_step']:.1f} s a step"
    rate = f"{told['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
    yield f"  {'throughput':<14} {rate}; the update reaches {told['update_mfu']:.0%} of the GPUs' peak (MFU)"
    if told["gpu_hours"] is not None:
        cost = "" if told["cost"] is None else f", {told['cost']:,.0f} at {price:g} a GPU-hour"
        yield f"  {'the run':<14} {told['hours']:,.1f} hours, {told['gpu_hours']:,.0f} GPU-hours{cost}"


def suggestion_lines(found: Sequence[Layout]) -> Iterator[str]:
    """Layouts, best first, as settings that can be pasted, with reasons."""
    for place, layout in enumerate(found, 1):
        rate = f"{layout.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        yield f"{place}. {layout.seconds:.1f} s a step, {rate}, {layout.headroom:.0%} of the GPU left"
        yield from (f"     - {reason}" for reason in layout.reasons)
        yield f"     {layout}"
