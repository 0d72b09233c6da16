#!/usr/bin/env python3
"""Write docs/estimates.md and its plot: the time estimates against published runs, and how cost grows with GPUs.

    python tools/estimates.py            # writes both
    python tools/estimates.py --check    # writes nothing; exits with 1 if one of them is out of date

Every number of that page that is not published by somebody else is computed by
gspo_hpc/planning/estimates/time.py.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import generated

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture
from gspo_hpc.planning.estimates import devices, time
from gspo_hpc.planning.estimates.time import Sizes, Times, Work
from gspo_hpc.planning.plan import make_plan

NEMO = "https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html"
VERL = "https://verl.readthedocs.io/en/latest/advance/fully_async.html"

# Latent attention is not a family of this package. From its technical report (arXiv:2412.19437): 671 B parameters, 37 B
# active, 58 layers of 256 experts, and 576 numbers of cache a token and layer.
DEEPSEEK_V3 = Sizes(
    layers=61,
    layers_with_experts=58,
    hidden=7168,
    vocabulary=129280,
    parameters=671_000_000_000,
    expert_parameters=58 * 256 * 3 * 7168 * 2048,
    experts=256,
    top_k=8,
    token_flops=2.0 * (37e9 - 2 * 7168 * 129280),
    score_flops=2.0 * 61 * 128 * (192 + 128),
    cache_bytes=2.0 * 61 * 576,
    cache_heads=1,
)
NCCL = "https://github.com/NVIDIA/nccl/issues"
# Of the network, not calibrated: what others measured on such networks, with its source.
MEASURED = {
    "LINK": (
        "all-reduces over two nodes of H20, 50 GB/s a GPU: 0.39 of it with 16 MB, 0.67 with 64 MB, 0.86 with the most "
        f"([nccl#1244]({NCCL}/1244)); rings in a node of H100: 0.8 ([nccl#1455]({NCCL}/1455))"
    ),
    "NETWORK_LATENCY": (
        f"few bytes over two nodes: 46 to 48 µs on 16 H20 ([nccl#1244]({NCCL}/1244)), 62 to 75 µs on 16 H100 "
        f"([nccl#1453]({NCCL}/1453))"
    ),
    "NODE_LATENCY": f"two H100, in a CUDA graph: 6 µs ([nccl#1259]({NCCL}/1259))",
    "SYNC_LINK": (
        "Qwen3-235B to 8 H800 in 6.2 s: 0.38 of NVLink; DeepSeek-V3.1 in 8 bits to 256 H20 in 11.3 s: more than one "
        "card of the network gives ([checkpoint-engine](https://github.com/MoonshotAI/checkpoint-engine))"
    ),
}
VERL_TOKENS = 2000.0  # of a response; not published: what makes the first of these runs fit


@dataclass(frozen=True)
class Run:
    """A published one. Seconds of a step (a rollout with all its updates), by phase where that is told."""

    name: str
    source: str
    gpus: int
    seconds: float
    phases: dict[str, float]
    rate: float | None  # tokens a second and GPU, as published
    calibration: bool
    model: str
    config: dict[str, Any]
    work: Work

    def estimate(self) -> Times:
        """The same by our arithmetic."""
        config = from_dict(self.config)
        device = devices.find(str(config.cluster.gpu))
        model = DEEPSEEK_V3 if self.model == "DeepSeek-V3" else _sizes(self.model)
        engine = config.rollout.tensor_parallel_size
        free = device.memory * 0.7 - 2.0 * model.parameters / engine - 3e9
        cache = max(0.0, free) / (model.cache_bytes / min(engine, model.cache_heads))
        return time.estimate(model, config, device, self.work, cache)


def _sizes(name: str) -> Sizes:
    arch = architecture.find(from_dict({"model": {"path": name}}))
    assert arch is not None, name
    return time.sizes(arch)


def _nemo(
    name: str, gpus: int, seconds: float, rate: float, engine: int, layout: tuple[int, int, int, int], completions: int,
    length: int, longest: int, calibration: bool = False,
) -> Run:  # fmt: skip
    """Return a run of NeMo-RL on H100: bf16, on-policy, with a reference policy.

    Its tables give layouts, lengths with the prompt, and batches. Prompts of OpenMathInstruct-2 have about 120 tokens,
    groups 32 completions (its recipes).
    """
    tp, cp, ep, pp = layout
    updates = completions // 512
    config: dict[str, Any] = {
        "cluster": {"nodes": gpus // 8, "gpus_per_node": 8, "gpu": "H100"},
        "parallel": {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1,
            "pipeline_model_parallel_size": pp,
            "sequence_parallel": tp > 1,
        },
        "batch": {
            "micro_batch_tokens": longest,
            "global_batch_size": 512,
            "steps_per_generation": updates,
            "num_generations": 32,
            "share_prompts": False,
        },
        "rollout": {
            "tensor_parallel_size": engine,
            "max_prompt_length": 240,
            "max_response_length": longest - 120,
        },
        "algorithm": {"kl_beta": 0.01},
        "memory": {"recompute_granularity": "full", "offload_trainer": True},
        "optimizer": {"distributed": True},
    }
    work = Work(completions, 32, 120.0, length - 120.0, longest - 120)
    return Run(f"{name}, {gpus} H100", NEMO, gpus, seconds, {}, rate, calibration, name, config, work)


def _verl(gpus: int, seconds: float, phases: tuple[float, float, float], calibration: bool = False) -> Run:
    """Qwen2.5-Math-7B on H20: 512 prompts of 16 completions, mini-batches of 32 prompts, responses up to 28k tokens."""
    config: dict[str, Any] = {
        "cluster": {"nodes": gpus // 8, "gpus_per_node": 8, "gpu": "H20"},
        "batch": {
            "micro_batch_tokens": 32768,
            "global_batch_size": 512,
            "steps_per_generation": 16,
            "num_generations": 16,
            "share_prompts": False,
        },
        "rollout": {"max_prompt_length": 300, "max_response_length": 28672},
        "optimizer": {"distributed": True},
    }
    published = dict(zip(("generation", "old_logprobs", "update"), phases, strict=True))
    work = Work(8192, 16, 150.0, VERL_TOKENS, 28672)
    name = f"Qwen2.5-Math-7B, {gpus} H20"
    return Run(name, VERL, gpus, seconds, published, None, calibration, "Qwen2.5-Math-7B", config, work)


RUNS = (
    _nemo("Qwen3-30B-A3B", 32, 192, 1102, 2, (1, 1, 8, 1), 2048, 3203, 4096, calibration=True),
    _nemo("Qwen3-235B-A22B", 128, 395, 58.9, 16, (2, 2, 16, 8), 512, 5698, 8192),
    _nemo("Qwen3-235B-A22B", 256, 312, 37.4, 16, (2, 2, 16, 8), 512, 5713, 8192),
    _nemo("DeepSeek-V3", 256, 134, 12.1, 32, (1, 1, 16, 16), 512, 701, 1536),
    _nemo("DeepSeek-V3", 512, 111, 7.24, 32, (1, 1, 16, 16), 512, 697, 1536),
    _verl(32, 790, (357, 108, 314), calibration=True),
    _verl(64, 365, (151, 70, 133)),
    _verl(128, 356, (178, 54, 114)),
)

GROWTH = (  # model, GPU, layout; a rollout of 65,536 completions in four updates
    ("Qwen2.5-7B", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
    ("Qwen3-30B-A3B", {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 8}, 2),
    (
        "Llama-3.1-70B",
        {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4, "sequence_parallel": True},
        8,
    ),
)


def growth(model: str, parallel: dict[str, Any], engine: int) -> list[tuple[int, float]]:
    """(GPUs, GPU-seconds of a completion) wherever the plan is valid."""
    found = []
    for power in range(3, 15):
        gpus = 2**power
        config: Config = from_dict(
            {
                "cluster": {"nodes": gpus // 8, "gpus_per_node": 8, "gpu": "H200"},
                "model": {"path": model},
                "parallel": parallel,
                "batch": {
                    "micro_batch_tokens": 16384,
                    "global_batch_size": 16384,
                    "steps_per_generation": 4,
                    "num_generations": 16,
                },
                "rollout": {"tensor_parallel_size": engine, "max_prompt_length": 1024, "max_response_length": 8192},
                "memory": {"recompute_granularity": "full"},
                "optimizer": {"distributed": True},
            }
        )
        plan = make_plan(config)
        if not plan.valid or plan.memory is None:
            continue
        work = time.work(config, 65536)
        device = devices.find("H200")
        times = time.estimate(_sizes(model), config, device, work, plan.memory.cache_tokens)
        found.append((gpus, times.rollout * gpus / work.completions))
    return found


def moved(constant: str, factor: float) -> list[float]:
    """Errors of the predictions with a constant that is so many times what it is."""
    kept = getattr(time, constant)
    setattr(time, constant, kept * factor)
    try:
        return [run.estimate().rollout / run.seconds - 1.0 for run in RUNS if not run.calibration]
    finally:
        setattr(time, constant, kept)


def page() -> str:
    """docs/estimates.md."""
    rows, phases, errors = [], [], []
    for run in RUNS:
        times = run.estimate()
        error = times.rollout / run.seconds - 1.0
        if not run.calibration:
            errors.append(abs(error))
        rate = times.tokens / times.rollout / run.gpus
        published = "not published | " if run.rate is None else f"{run.rate:,.4g} | "
        published += f"{rate:,.3g} | " if rate < 1000 else f"{rate:,.0f} | "
        published += "" if run.rate is None else f"{rate / run.rate - 1.0:+.0%}"
        role = "calibration" if run.calibration else "prediction"
        rows.append(f"| {run.name} | {role} | {run.seconds:,.0f} | {times.rollout:,.0f} | {error:+.0%} | {published} |")
        shown = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in times.seconds.items() if seconds >= 0.5)
        published = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in run.phases.items()) or "not published"
        phases.append(f"| {run.name} | {published} | {shown} |")
    within = sum(error <= 0.30 for error in errors)
    constants = "\n".join(
        f"| `{name}` | {getattr(time, name):g} |"
        for name in ("EFFICIENCY", "EXPERTS_EFFICIENCY", "STEP_SECONDS", "LAYER_SECONDS", "EXPERTS_SECONDS", "SPREAD")
    )
    network = "\n".join(
        f"| `{name}` | {getattr(time, name):g} | {others} | {_span(moved(name, 0.5))} | {_span(moved(name, 1.5))} |"
        for name, others in MEASURED.items()
    )
    curves = "\n".join(
        f"| {model} | " + ", ".join(f"{gpus:,}: {cost:.1f}" for gpus, cost in growth(model, parallel, engine)) + " |"
        for model, parallel, engine in GROWTH
    )
    return f"""# Time estimates, compared with published runs

`gspo-hpc plan` estimates seconds from data sheets, numbers of operations and bytes, and a few constants
(gspo_hpc/planning/estimates/time.py). This page compares the estimates with runs that others have published.
**None of them is a run of gspo_hpc**: no estimate has been compared with a run of this package on GPUs yet.
`python tools/estimates.py` writes this page, and a test checks that it is up to date.

## The runs

Two runs were used for calibration; the others are predictions. {within} of the {len(errors)} predictions are within
30 %, and the farthest is off by {max(errors):.0%}. Seconds are those of one step as these projects count steps: a
rollout with all its updates.

| run | used as | published s | estimated s | error | published tokens/s/GPU | estimated | error |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

| run | published phases, s | estimated phases, s |
|---|---|---|
{chr(10).join(phases)}

Sources: [NeMo-RL 0.6, H100, bf16]({NEMO}), with the layouts, lengths and batches given there; [verl, H20]({VERL}), the
rows "colocate sync".

## Calibrated constants

| constant | value |
|---|---|
{constants}

The run of Qwen3-30B-A3B on 32 GPUs determines the efficiency of layers with experts and the time that they cost an
engine; verl's run on 32 GPUs determines the efficiency of dense layers, and how far response lengths spread.

## Constants of the network

These constants are not calibrated: they are round numbers near what others measured, and no run was fitted with them.
They were chosen with all runs in view, though, so the table shows how each of them affects the predictions: the least
and the greatest error with half of its value, and with one and a half times its value.

| constant | value | measured by others | errors with half | with 1.5 times |
|---|---|---|---|---|
{network}

## Where it misses, and why

- **verl publishes no response lengths.** They are taken to be {VERL_TOKENS:,.0f} tokens on average, a round number with
  which the 32-GPU run is about right. The three runs cannot all have had the same lengths: twice the GPUs took less
  than half the time, and four times the GPUs generated for longer than twice the GPUs did. This explains most of the
  error of the 64-GPU run. verl's page says 314 s for the update on 32 GPUs; the 270 s there belong to another row.
- **Latency dominates the generation of few long sequences.** With 32 to 64 sequences per engine, and engines that span
  two to four nodes, the time of a token is that of its all-reduces and kernel launches. It differs more between
  interconnects than between GPUs.
- **The weight sync of DeepSeek-V3** is only estimated; how long it took in the published runs is not known.
- **Padding, stragglers, slow reward functions, start-up and evaluation are not included**: the estimate is for a step
  in which nothing goes wrong.
- Only this page estimates latent attention; gspo_hpc's own layers cannot train DeepSeek-V3.

## How cost grows from 8 to 16,384 GPUs

![GPU-seconds per completion against the number of GPUs](estimates.svg)

The estimates are for a rollout of 65,536 completions in four updates on H200, with responses of up to 8,192 tokens; the
layout of a replica stays the same. A point is shown wherever the plan is valid. With more GPUs there would be more
data-parallel ranks than prompts; with fewer, a replica does not fit. The table shows GPU-seconds per completion:

| model | GPUs: GPU-seconds |
|---|---|
{curves}

The cost stays about level while engines are full. It rises when each engine has so few sequences that latency dominates
the time of a token, and when all engines wait for the longest response. Larger rollouts, or more updates per rollout,
keep the cost level for longer.
"""


def _span(errors: list[float]) -> str:
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


_COLORS = ("#2563eb", "#d97706", "#059669")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 360, 60, 20, 130, 46


def plot() -> str:
    """docs/estimates.svg: logarithmic on both axes."""
    curves = [(model, growth(model, parallel, engine)) for model, parallel, engine in GROWTH]
    costs = [cost for _, points in curves for _, cost in points]
    low, high = math.floor(math.log10(min(costs))), math.ceil(math.log10(max(costs)))

    def x(gpus: float) -> float:
        return _LEFT + (math.log2(gpus) - 3) / 11 * (_WIDTH - _LEFT - _RIGHT)

    def y(cost: float) -> float:
        return _TOP + (high - math.log10(cost)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for power in range(3, 15):
        at = x(2**power)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#eee"/>')
        text = f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle" fill="#555">{2**power:,}</text>'
        parts += [text] if power % 2 else []
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#555">{10.0**power:g}</text>')
    for (model, points), color in zip(curves, _COLORS, strict=True):
        line = " ".join(f"{x(gpus):.1f},{y(cost):.1f}" for gpus, cost in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(gpus):.1f}" cy="{y(cost):.1f}" r="3" fill="{color}"/>' for gpus, cost in points]
        gpus, cost = points[-1]
        parts.append(f'<text x="{x(gpus) + 8:.1f}" y="{y(cost) + 4:.1f}" fill="{color}">{model}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">GPUs (H200)</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 6}">GPU-seconds per completion</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    pages = {"estimates.md": lambda _: page(), "estimates.svg": lambda _: plot()}
    sys.exit(generated.main("estimates", __doc__, pages))
