"""Lines about asynchrony: whether it pays to generate and train side by side, or to end a rollout before its last."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_hpc.config.schema import Config, replace
from gspo_hpc.planning.builder import Models
from gspo_hpc.planning.estimates import devices, memory, time
from gspo_hpc.planning.plan import judge

_FACTORS = (1.25, 1.5, 2.0)  # of the prompts in flight and those of a rollout
_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the nodes, or of the GPUs of each, that generate


def line(
    config: Config,
    found: time.Times,
    response_tokens: float | None,
    models: Models | None = None,
    talk: time.Talk | None = None,
) -> str | None:
    """Return the seconds of a rollout the other way, beside those of this one; None where there is no other way."""
    if config.cluster.platform != "cuda":
        return None
    models = models or Models()
    if config.rollout.mode == "server":
        staleness = 0 if config.rollout.max_staleness else 1
        other = replace(config, rollout=replace(config.rollout, max_staleness=staleness))
        times = _times(other, response_tokens, models, talk)
        if times is None:
            return None
        beside, turns = (times, found) if staleness else (found, times)
        text = f"side by side (rollout.max_staleness=1) take {beside.rollout:,.1f} s a rollout"
        return f"generation and training {text}, taking turns {turns.rollout:,.1f} s"
    best = min(_splits(config, response_tokens, models, talk), default=None)
    if best is None:
        return None
    seconds, split = best
    how = f"side by side ({split} rollout.mode=server rollout.max_staleness=1)"
    verdict = "pays" if seconds < found.rollout else "does not pay"
    text = f"would take {seconds:,.1f} s a rollout instead of {found.rollout:,.1f}: it {verdict}"
    return f"generation and training {how} {text}"


def partial(
    config: Config,
    found: time.Times,
    response_tokens: float | None,
    models: Models | None = None,
    talk: time.Talk | None = None,
) -> str | None:
    """Return whether it pays to end rollouts early and to continue what is unfinished; None where that cannot be."""
    if config.cluster.platform != "cuda":
        return None
    rollout, models = config.rollout, models or Models()
    if rollout.unfinished != "wait":
        other = replace(config, rollout=replace(rollout, unfinished="wait"))
        times = _times(other, response_tokens, models, talk)
        if times is None:
            return None
        text = f"rollouts that wait for all that they draw would take {times.rollout:,.1f} s"
        return f"{text}, these {found.rollout:,.1f}"
    best: tuple[float, float] | None = None
    for factor in _FACTORS:
        other = replace(config, rollout=replace(rollout, unfinished="continue", oversampling_factor=factor))
        times = _times(other, response_tokens, models, talk)
        if times is not None:
            best = min(best or (times.rollout, factor), (times.rollout, factor))
    if best is None:
        return None
    seconds, factor = best
    verdict = "pays" if seconds < found.rollout else "does not pay"
    return (
        f"rollout.unfinished=continue rollout.oversampling_factor={factor:g} would take {seconds:,.1f} s a rollout "
        f"instead of {found.rollout:,.1f}: it {verdict}"
    )


def _splits(
    config: Config, response_tokens: float | None, models: Models, talk: time.Talk | None = None
) -> Iterator[tuple[float, str]]:
    """Yield the seconds of a rollout where a share of the nodes generates, or of the GPUs of each node.

    Each comes with the setting that says so.
    """
    cluster, rollout = config.cluster, replace(config.rollout, mode="server", max_staleness=1, engines_per_node=None)
    for nodes in _parts(cluster.nodes):
        changed = replace(config, cluster=replace(cluster, generation_nodes=nodes), rollout=rollout)
        if (times := _times(changed, response_tokens, models, talk)) is not None:
            yield times.rollout, f"cluster.generation_nodes={nodes}"
    for count in _parts(cluster.gpus_per_node // rollout.tensor_parallel_size):
        changed = replace(config, rollout=replace(rollout, engines_per_node=count))
        if (times := _times(changed, response_tokens, models, talk)) is not None:
            yield times.rollout, f"rollout.engines_per_node={count}"


def _parts(total: int) -> list[int]:
    """Return some shares of a number, neither none nor all of it."""
    return sorted({round(total * share) for share in _SHARES} - {0, total})


def _times(config: Config, response_tokens: float | None, models: Models, talk: time.Talk | None) -> time.Times | None:
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
    given = time.work(config, int(completions), response_tokens, talk)
    return time.estimate(time.sizes(arch, config), config, device, given, found.cache_tokens)
