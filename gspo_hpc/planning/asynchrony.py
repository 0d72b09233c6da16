"""A line about asynchrony: whether it pays to generate and to train side by side instead of taking turns."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_hpc.config.schema import Config, replace
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import devices, memory, time
from gspo_hpc.planning.plan import judge

_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the nodes, that generate


def line(config: Config, found: time.Times, response_tokens: float | None, models: Models | None = None) -> str | None:
    """Return the seconds of a rollout the other way, beside those of this one; None where there is no other way."""
    if config.cluster.platform != "cuda":
        return None
    models = models or Models()
    if config.rollout.mode == "server":
        staleness = 0 if config.rollout.max_staleness else 1
        other = replace(config, rollout=replace(config.rollout, max_staleness=staleness))
        times = _times(other, response_tokens, models)
        if times is None:
            return None
        beside, turns = (times, found) if staleness else (found, times)
        text = f"side by side (rollout.max_staleness=1) take {beside.rollout:,.1f} s a rollout"
        return f"generation and training {text}, taking turns {turns.rollout:,.1f} s"
    best = min(((times.rollout, nodes) for nodes, times in _splits(config, response_tokens, models)), default=None)
    if best is None:
        return None
    seconds, nodes = best
    how = f"side by side (cluster.generation_nodes={nodes} rollout.mode=server rollout.max_staleness=1)"
    verdict = "pays" if seconds < found.rollout else "does not pay"
    text = f"would take {seconds:,.1f} s a rollout instead of {found.rollout:,.1f}: it {verdict}"
    return f"generation and training {how} {text}"


def _splits(config: Config, response_tokens: float | None, models: Models) -> Iterator[tuple[int, time.Times]]:
    """Yield some shares of the nodes that generate, with the times of a rollout."""
    total = config.cluster.nodes
    for nodes in sorted({round(total * share) for share in _SHARES} - {0, total}):
        changed = replace(
            config,
            cluster=replace(config.cluster, generation_nodes=nodes),
            rollout=replace(config.rollout, mode="server", max_staleness=1, engines_per_node=None),
        )
        if (times := _times(changed, response_tokens, models)) is not None:
            yield nodes, times


def _times(config: Config, response_tokens: float | None, models: Models) -> time.Times | None:
    """Return the times of a config that keeps the rules and fits; None of another."""
    plan, arch = judge(config, models=models, enough=0), models.find(config)
    completions = plan.quantities.get("generation_batch_size")
    if plan.broken or arch is None or not completions or config.cluster.gpu is None:
        return None
    device = devices.card(config.cluster)
    assert device is not None
    found = memory.estimate(arch, config, device)
    if not memory.fits(found, config):
        return None
    given = time.work(config, int(completions), response_tokens)
    return time.estimate(time.sizes(arch, config), config, device, given, found.cache_tokens)
