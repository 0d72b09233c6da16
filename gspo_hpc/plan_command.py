"""`gspo-hpc plan` and `gspo-hpc suggest`: what is known before a GPU is asked for.

Floor 6.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_hpc import devices, mends, model_config, suggest, time_estimate
from gspo_hpc.config import Config
from gspo_hpc.estimate_page import memory_lines, suggestion_lines, time_lines
from gspo_hpc.plan import Plan, make_plan
from gspo_hpc.plan_page import batch_script, content, page, paint
from gspo_hpc.time_estimate import Times

_COUNTED_BYTES = 64 * 2**20  # a larger data file is not read to count its rows: the plan answers at once


def plan(
    name: str,
    config: Config,
    *,
    as_json: bool,
    ranks: bool,
    sbatch: bool,
    price: float | None,
    response_tokens: float | None,
) -> bool:
    """Prints the plan; whether every rule holds, and there is a batch script if one was asked for."""
    for option, value in (("--price", price), ("--response-tokens", response_tokens)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{option} {value:g} must be more than 0")
    rows = _count_rows(config.data.train)
    found = make_plan(config, rows)
    offered = mends.find(config, rows)
    times, tokens = _times(config, found, response_tokens)
    script = batch_script(config) if sbatch else None
    if as_json:
        more: dict[str, object] = {"time": None if times is None else times.to_json(price)}
        more |= {"sbatch": script} if sbatch else {}
        print(json.dumps(content(found, offered, ranks=ranks) | more, indent=2))
        return found.valid and bool(script) == sbatch
    print("\n".join(page(name, config, found, offered)))
    if found.memory is not None:
        print("\n" + paint("Memory", "1", sys.stdout))
        print("\n".join(memory_lines(found.memory, config)))
    if times is not None:
        print("\n" + paint("Time", "1", sys.stdout))
        print("\n".join(time_lines(times, tokens, price)))
    print(f"\n{script}" if script else "", end="")
    return found.valid and bool(script) == sbatch


def suggest_layouts(
    config: Config, keep: Sequence[str], *, as_json: bool, limit: int, response_tokens: float | None
) -> bool:
    """Prints layouts, best first; whether there is one."""
    if limit < 1:
        raise ValueError(f"--limit {limit} must be at least 1")
    found = suggest.find(config, frozenset(keep), limit, response_tokens)
    if as_json:
        print(json.dumps([layout.to_json() for layout in found], indent=2))
    elif found:
        print("\n".join(suggestion_lines(found)))
    else:
        print(f"no layout of {config.world_size} {config.cluster.gpu} holds this model and keeps every rule", end="; ")
        print("plan shows what is broken: more GPUs, larger ones, or other batch sizes may mend it")
    return bool(found)


def _times(config: Config, found: Plan, response_tokens: float | None) -> tuple[Times | None, float]:
    """The time estimate of a plan that has one, and the average response that it is for."""
    completions = found.quantities.get("generation_batch_size")
    arch = model_config.find(config)
    if found.memory is None or arch is None or not completions or config.cluster.gpu is None:
        return None, 0.0
    device = devices.find(config.cluster.gpu, config.cluster.network_gb_per_s)
    work = time_estimate.work(config, int(completions), response_tokens)
    model = time_estimate.sizes(arch)
    return time_estimate.estimate(model, config, device, work, found.memory.cache_tokens), work.response_tokens


def _count_rows(train: str | None) -> int | None:
    """Rows of a JSONL file; None where they are not to be had at once."""
    path = Path(train or "")
    if path.suffix != ".jsonl" or not path.is_file() or path.stat().st_size > _COUNTED_BYTES:
        return None
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())
