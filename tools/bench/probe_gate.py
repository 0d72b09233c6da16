#!/usr/bin/env python3
"""Measure what the gate after a weight sync makes of faults in a trained model, whose engine computes in 16 bits.

    .venv/bin/python tools/bench/probe_gate.py [--model FOLDER] [--dtype bfloat16]     # ten minutes

One rank has the model, and a real engine gets its weights through the real sync, with a fault planted on the way. Each
row is a fault. Probes are as a run makes them: four sequences of text, or of random tokens, with 128 tokens in all. A
probe tells a fault at the first sync of a run if its gap is above the limits, to which twice belongs what noise of the
size of rounding makes in the trainer; and later if it is also far above that of the first sync, which was healthy.
Constants, the prefix cache and the head are looked at beside the gap; the last column has what the gate says in all.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gspo_hpc.config.constants import PROBE_PROMPTS
from gspo_hpc.config.derived import gap_limits
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Floats
from gspo_hpc.engine.engine import Engine, EngineSettings
from gspo_hpc.ops.weight_parts import Part
from gspo_hpc.policy.policy import Policy
from gspo_hpc.training import probe
from gspo_hpc.training.agreement.gap import Gap, excess, measure
from gspo_hpc.training.agreement.scoring import rounding_gap, score
from gspo_hpc.training.sync import WeightSync

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tools" / "bench")]

import trainer  # noqa: E402 (a neighbour)

TOKENS = 128  # of a probe
PROBES = 8  # of text, and half as many of random tokens
Probe = list[list[int]]
Change = Callable[[Part], Part]


@dataclass(frozen=True)
class Fault:
    """A fault, and the engine that has it."""

    name: str
    overrides: dict[str, Any]  # of config.json, by the engine
    change: Change | None = None  # of weights on their way
    keeps_cache: bool = False
    obeys: bool = True  # False: the gate was not told of the overrides


def faults(layers: int, theta: float) -> Iterator[Fault]:
    """Yield the faults, engine by engine."""
    yield Fault("none", {})
    for one, other in ((0, 1), (layers // 2, layers // 2 + 1), (layers - 2, layers - 1)):
        yield Fault(f"layers {one} and {other} swapped", {}, swapped(one, other))
    yield Fault("layer 1 has noise of 2 % of its weights", {}, noisy(".layers.1.", 0.02))
    yield Fault("stale prefix cache", {}, keeps_cache=True)
    yield Fault("head rounds logits", {"head_dtype": "model"}, obeys=False)
    for wrong in (theta * 2, theta / 10):
        default: dict[str, Any] = {"rope_type": "default", "rope_theta": wrong}
        yield Fault(f"rope_theta {wrong:g}, not {theta:g}", {"rope_parameters": default})
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    }
    yield Fault("yarn by 4 in the engine only", {"rope_parameters": yarn})
    yield Fault("rms_norm_eps 1e-6, not 1e-5", {"rms_norm_eps": 1e-6})


def swapped(one: int, other: int) -> Change:
    """Return a change that gives two layers each other's weights."""
    names = {f".layers.{a}.": f".layers.{b}." for a, b in ((one, other), (other, one))}

    def change(part: Part) -> Part:
        name = next((name for name in names if name in part.name), None)
        return part if name is None else replace(part, name=part.name.replace(name, names[name]))

    return change


def noisy(layer: str, size: float) -> Change:
    """Return a change that adds noise to the weights of a layer, of `size` of their spread."""
    generator = torch.Generator().manual_seed(0)

    def change(part: Part) -> Part:
        if layer not in part.name:
            return part
        noise = torch.randn(part.tensor.shape, generator=generator) * part.tensor.float().std()
        return replace(part, tensor=(part.tensor.float() + size * noise).to(part.tensor.dtype))

    return change


def probes(folder: Path, vocabulary: int) -> dict[str, list[Probe]]:
    """Return probes of text, from the beginnings of this project's pages, and of random tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    each, rng = TOKENS // PROBE_PROMPTS, np.random.default_rng(0)
    pages = sorted((PROJECT / "docs").glob("*.md"))[: PROBES * PROBE_PROMPTS]
    texts = [tokenizer(page.read_text("utf-8"))["input_ids"][100 : 100 + each] for page in pages]
    whole = len(texts) // PROBE_PROMPTS
    return {
        "text": [texts[place::whole][:PROBE_PROMPTS] for place in range(whole)],
        "random": [rng.integers(0, vocabulary, (PROBE_PROMPTS, each)).tolist() for _ in range(PROBES // 2)],
    }


def measured(
    policy: Policy, engine: Engine, fault: Fault, every: Sequence[Probe], ours: Sequence[Sequence[Floats]]
) -> tuple[list[Gap], str]:
    """Return the gap of every probe under a fault, and what the gate says with the first probe.

    `ours` are the trainer's log-probs of the probes.
    """
    original, reset, settings = policy.parts, Engine.reset_prefix_cache, engine.settings

    def changed(*memory: Any) -> Iterator[Sequence[Part]]:
        for parts in original(*memory):
            yield [fault.change(part) if fault.change is not None else part for part in parts]

    policy.parts = changed  # type: ignore[method-assign, assignment]
    if not fault.obeys:
        engine.settings = replace(settings, engine_args={})
    gate = WeightSync(policy, every[0])
    try:
        gate.push(engine)
        gaps = [measure(mine, engine.prompt_logprobs(one)) for one, mine in zip(every, ours, strict=True)]
        engine.cached_tokens(probe.canary(every[0], settings.max_model_len))
        if fault.keeps_cache:
            engine.reset_prefix_cache = lambda: None  # type: ignore[method-assign]
        gate.run(engine)
        said = ""
    except probe.ProbeMismatch as error:
        said = str(error)
    finally:
        policy.parts = original  # type: ignore[method-assign]
        engine.settings, engine.reset_prefix_cache = settings, reset.__get__(engine)  # type: ignore[method-assign]
    return gaps, said


def row_of(gaps: Sequence[Gap], kind: str) -> str:
    """Return the cells of a table that say how large gaps are."""
    means, largest = ([getattr(gap, name) for gap in gaps] for name in ("weighted_mean", "weighted_max"))
    return " | ".join([f"{len(gaps)} of {kind}", *(f"{min(each):.1e} to {max(each):.1e}" for each in (means, largest))])


def main() -> None:
    """Print a row for each fault and kind of probe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PROJECT / ".cache" / "smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", help="of trainer and engine")
    parser.add_argument("--faults", nargs="*", default=[""], help="parts of the names of faults; by default all")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = from_dict(
        {
            "cluster": {"platform": "cpu", "gpus_per_node": 1},
            "model": {"path": str(args.model), "dtype": args.dtype},
            "run": {"max_steps": 1},
        }
    )
    with tempfile.TemporaryDirectory() as logs:
        report(args, config, logs)


def report(args: argparse.Namespace, config: Config, logs: str) -> None:
    """Print the table; engines write into the folder `logs`."""
    policy = trainer.make_policy(args.model, config)
    every, limits = probes(args.model, policy.arch.vocab_size), gap_limits(config)
    texts = len(every["text"])
    kinds = {"text": slice(0, texts), "random": slice(texts, None)}
    joined = [one for ones in every.values() for one in ones]
    ours = [score(policy, one).logprobs for one in joined]
    noises = [rounding_gap(policy, one, mine, None) for one, mine in zip(joined, ours, strict=True)]
    healthy: list[Gap] = []
    running: tuple[dict[str, Any], Engine] | None = None
    print(
        "| fault | probes | weighted mean gap | largest weighted gap | told at the first sync | later | the gate says |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind, places in kinds.items():
        some = [noise for noise in noises[places] if noise is not None]
        print(f"| noise in the trainer | {row_of(some, kind)} | | | |", flush=True)
    for fault in faults(policy.arch.num_layers, policy.arch.rope.theta):
        if healthy and not any(part in fault.name for part in args.faults):
            continue
        if running is None or running[0] != fault.overrides:
            if running is not None:
                running[1].close()
            print(f"an engine with {fault.overrides or 'the config.json of the model'}", file=sys.stderr)
            arguments = {"hf_overrides": fault.overrides} if fault.overrides else {}
            settings = EngineSettings(str(args.model), args.dtype, max_model_len=512, kv_cache_gb=0.2)
            engine = Engine(replace(settings, log_path=Path(logs) / "engine.log", engine_args=arguments))
            engine.start()
            running = fault.overrides, engine
        gaps, said = measured(policy, running[1], fault, joined, ours)
        healthy = healthy or gaps
        for kind, places in kinds.items():
            some, with_noise = gaps[places], list(zip(gaps[places], healthy[places], noises[places], strict=True))
            first = sum(excess(gap, limits, None, noise) is not None for gap, _, noise in with_noise)
            later = sum(excess(gap, limits, before, noise) is not None for gap, before, noise in with_noise)
            said = said.replace("|", "\\|") if kind == "text" else ""
            print(f"| {fault.name} | {row_of(some, kind)} | {first} | {later} | {said} |", flush=True)
    if running is not None:
        running[1].close()


if __name__ == "__main__":
    main()
