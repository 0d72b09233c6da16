"""`gspo-hpc plan` and `gspo-hpc suggest`: what is known before a GPU is asked for.

Floor 6.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    """Prints the plan; whether every rule holds, and there is a batch script if one was asked for. `ranks`: with every
    rank, however many there are."""
    _check("--price", price)
    _check("--response-tokens", response_tokens)
    rows = _count_rows(config.data.train)
    found = make_plan(config, rows)
    offered = mends.find(config, rows)
    times, tokens = _times(config, found, response_tokens)
    notes = [*_absent(config), *_cut(config, response_tokens)]
    if times is None and (price or response_tokens):
        notes.append("--price and --response-tokens change nothing: time is not estimated.")
    found = replace(found, notes=(*found.notes, *notes))
    script = batch_script(config) if sbatch else None
    if as_json:
        more: dict[str, object] = {"time": None if times is None else times.to_json(price)}
        more |= {"sbatch": script} if sbatch else {}
        print(json.dumps(content(found, offered, ranks=ranks) | more, indent=2))
        return found.valid and bool(script) == sbatch
    print("\n".join(page(name, config, found, offered, ranks=ranks)))
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
    _check("--response-tokens", response_tokens)
    for key in set(keep).difference(suggest.KEYS):
        if key in _keys():
            raise ValueError(f"--keep {key}: suggest never changes it, so it stays as it is; leave it out")
        nearest = difflib.get_close_matches(key, suggest.KEYS, n=1)
        known = f"; nearest: {nearest[0]}" if nearest else f"\nwhat suggest chooses: {', '.join(suggest.KEYS)}"
        raise ValueError(f"--keep {key}: no such setting{known}")
    if config.model.path is None:
        raise ValueError("model.path must be given: a folder, or a model that plan knows, such as Qwen/Qwen3-8B")
    found = suggest.find(config, frozenset(keep), limit, response_tokens)
    for text in _cut(config, response_tokens):
        print(f"{paint('warning:', '33', sys.stderr)} {text}", file=sys.stderr)
    if as_json:
        print(json.dumps([layout.to_json() for layout in found], indent=2))
    elif found:
        print("\n".join(suggestion_lines(found)))
    else:
        print(f"no layout of {config.world_size} {config.cluster.gpu} holds this model and keeps every rule", end="; ")
        print("plan shows what is broken: more GPUs, larger ones, or other batch sizes may mend it")
    return bool(found)


def _keys() -> set[str]:
    """Every key of a config, dotted."""
    sections = {name: getattr(Config(), name) for name in Config.__dataclass_fields__}
    return {f"{name}.{key}" for name, section in sections.items() for key in vars(section)}


def _check(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ValueError(f"{option} {value:g} must be {'finite' if value == float('inf') else 'more than 0'}")


def _cut(config: Config, response_tokens: float | None) -> Iterator[str]:
    """What is to be said of a response that is longer than responses can be."""
    longest = config.rollout.max_response_length
    if response_tokens is not None and response_tokens > longest:
        yield f"--response-tokens {response_tokens:,.0f} is cut to rollout.max_response_length ({longest:,})."


def _absent(config: Config) -> Iterator[str]:
    """What is to be said of data files that a run needs and that are not there."""
    for key, name in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if name is not None and not os.path.exists(name):
            counted = ": its prompts are not counted" if key == "data.train" else ""
            yield f"{key} {name} is not there{counted}. A run needs the file."


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
