"""The command `gspo-hpc suggest`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc.cli.plans import check_positive, cut
from gspo_hpc.config import loader
from gspo_hpc.config.reading.places import Places
from gspo_hpc.config.schema import Config
from gspo_hpc.planning import layouts
from gspo_hpc.planning.estimates import devices, time
from gspo_hpc.planning.layouts import Layout
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.planning.quantities import with_steps
from gspo_hpc.planning.settings import value_of, with_value
from gspo_hpc.planning.suggest import batches
from gspo_hpc.system.terminal import paint
from gspo_hpc.system.text import near_miss

# Settings that no layout changes, and of which changes are offered where nothing fits.
_OFFERED = frozenset(
    {
        *("cluster.nodes", "cluster.gpus_per_node", "cluster.gpu", "cluster.gpu_memory_gb", "adapter.type"),
        *("rollout.max_response_length", "model.path"),
    }
)


def suggest(
    name: str,
    config: Config,
    places: Places,
    *,
    keep: Sequence[str],
    as_json: bool,
    limit: int,
    response_tokens: float | None,
    out: Path | None,
) -> bool:
    """Print layouts, best first, and write the config with the first one to `out`. Return whether there is one."""
    if limit < 1:
        raise ValueError(f"--limit {limit} must be at least 1")
    if out is not None and out.exists():
        raise ValueError(f"--out {out} is there already; name another file")
    check_positive("--response-tokens", response_tokens)
    for key in set(keep).difference(layouts.KEYS, _OFFERED):
        if key in _keys():
            raise ValueError(f"--keep {key}: suggest never changes it, so it stays as it is; leave it out")
        hint = near_miss(key, layouts.KEYS) or f"\nwhat suggest chooses: {', '.join(layouts.KEYS)}"
        raise ValueError(f"--keep {key}: no such setting{hint}")
    if config.model.path is None:
        raise ValueError("model.path must be given: a folder, or a model that plan knows, such as Qwen/Qwen3-8B")
    chosen = frozenset(keep).intersection(layouts.KEYS)
    found = layouts.find(config, chosen, limit, response_tokens, frozenset(keep) - chosen)
    for text in cut(config, response_tokens):
        print(f"{paint('warning:', '33', sys.stderr)} {text}", file=sys.stderr)
    if sizes := batches.assumed(config):
        given = ", ".join(f"batch.{key}={value}" for key, value in sizes.items())
        text = f"batch sizes are not given, so layouts are timed for {given}, as is usual"
        print(f"{paint('warning:', '33', sys.stderr)} {text}", file=sys.stderr)
    if not found:
        _nothing_fits(config, chosen, frozenset(keep) - chosen, response_tokens, as_json=as_json)
        return False
    if out is not None:
        with out.open("x", encoding="utf-8") as file:
            file.write(_rewritten(name, config, places, found[0]))
    if as_json:
        print(json.dumps([layout.to_json() for layout in found], indent=2))
        return True
    from gspo_hpc.cli.pages import render
    from gspo_hpc.cli.pages import suggestions as page

    render.show(page.suggestions(config, found, _own_figures(config, response_tokens)))
    if out is not None:
        print(f"\n{out}: written, the config with layout 1")
    return True


def _own_figures(config: Config, response_tokens: float | None) -> tuple[float, float, float] | None:
    """Return seconds of a step, tokens/s/GPU and headroom of the config as it is; None if it does not hold."""
    plan = make_plan(config)
    times, _ = time.of_plan(with_steps(config, None), plan, response_tokens, assumed=True)
    if plan.broken or plan.memory is None or times is None:
        return None
    told = times.to_json()
    return told["seconds_per_step"], told["tokens_per_s_per_gpu"], plan.memory.headroom


def _rewritten(name: str, config: Config, places: Places, layout: Layout) -> str:
    """Return the settings that the config gives, with those of a layout, as YAML."""
    changed = {key: value for key, value in layout.settings.items() if value != value_of(config, key)}
    for key, value in changed.items():
        config = with_value(config, key, value)
    head = f"# {name} with the best layout for {config.world_size} {devices.plural(config.cluster)}: gspo-hpc suggest\n"
    return head + loader.dump_given(config, {*places, *changed})


def _keys() -> set[str]:
    """Return every key of a config, dotted."""
    sections = {name: getattr(Config(), name) for name in Config.model_fields}
    return {f"{name}.{key}" for name, section in sections.items() for key in vars(section)}


def _nothing_fits(
    config: Config, keep: frozenset[str], without: frozenset[str], response_tokens: float | None, *, as_json: bool
) -> None:
    """Print that there is no layout, what is short, and the changes with which there is one, but `without` some."""
    from gspo_hpc.planning.suggest import remedies

    text = f"no layout of {config.world_size} {devices.plural(config.cluster)} holds this model and keeps every rule"
    short = remedies.lacking(layouts.Search(config, keep))
    found = [one for one in remedies.find(config, keep, response_tokens) if not without.intersection(one.changes)]
    if as_json:
        print(json.dumps({"errors": [f"{text}: {short}"], "changes": [one.to_json() for one in found]}, indent=2))
        return
    from gspo_hpc.cli.pages import render
    from gspo_hpc.cli.pages import suggestions as page

    render.show(page.no_layout(f"{text}: {short}.", list(map(str, found))))
