#!/usr/bin/env python3
"""Write docs/estimates.md, its plot and the configs that it compares: estimates against published runs.

    python tools/estimates.py            # writes them all
    python tools/estimates.py --check    # writes nothing; exits with 1 if one of them is out of date

Every number of that page that is not published by somebody else is computed by gspo_hpc/planning/estimates.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import generated
from published_runs import HELD, NEMO, ONE_STEP, RUNS, VERL, Run, planned_only

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.estimates import devices, rates, time
from gspo_hpc.planning.estimates.activations import IMBALANCE
from gspo_hpc.planning.estimates.phases import FRAGMENTATION, HEADROOM
from gspo_hpc.planning.plan import make_plan

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
    "OVERLAPPED": "nobody: a figure of experience, for layouts with `parallel.overlap_grad_reduce`",
    "SYNC_LINK": (
        "Qwen3-235B to 8 H800 in 6.2 s: 0.38 of NVLink; DeepSeek-V3.1 in 8 bits to 256 H20 in 11.3 s: more than one "
        "card of the network gives ([checkpoint-engine](https://github.com/MoonshotAI/checkpoint-engine))"
    ),
    "BUCKET_SECONDS": "nobody: three processes pass on a message",
    "RELOAD_SECONDS": "nobody: some ten tensors that vLLM's loader takes in Python",
    "EXPERT_LAUNCH": "nobody: a figure of experience",
    "EAGER_SECONDS": "nobody: a figure of experience, and no row is in eager mode",
}
CALIBRATED = (
    "EFFICIENCY",
    "EXPERTS_EFFICIENCY",
    "STEP_SECONDS",
    "LAYER_SECONDS",
    "EXPERTS_SECONDS",
    "SPREAD",
    "SWITCH_SECONDS",
)
HEADS = "| run | used as | published s | `plan` prints s | estimated s | error |\n|---|---|---|---|---|---|"

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
        times = time.estimate(time.sizes_of(config), config, device, work, plan.memory.cache_tokens)
        found.append((gpus, times.rollout * gpus / work.completions))
    return found


@cache
def errors() -> dict[str, float]:
    """The estimate of each run over its published seconds, minus 1."""
    return {run.key: run.estimate().rollout / run.seconds - 1.0 for run in RUNS}


def moved(constant: str, factor: float) -> list[float]:
    """Errors of the predictions with a constant that is so many times what it is."""
    kept = getattr(rates, constant)
    setattr(rates, constant, kept * factor)
    try:
        return [run.estimate().rollout / run.seconds - 1.0 for run in RUNS if run.role == "prediction"]
    finally:
        setattr(rates, constant, kept)


def spread() -> tuple[float, float]:
    """Return the least and the greatest share of an estimate that rows with known lengths have as published seconds."""
    shares = [1.0 / (1.0 + errors()[run.key]) for run in RUNS if run.tokens is not None]
    return min(shares), max(shares)


def _covered() -> int:
    """Return how many of the rows whose lengths are inferred lie in the printed range."""
    low, high = rates.RANGE
    return sum(low <= 1.0 / (1.0 + errors()[run.key]) <= high for run in RUNS if run.tokens is None)


def _calibrated() -> str:
    """Return the errors of the calibration rows."""
    found = [f"{errors()[run.key]:+.1%}" for run in RUNS if run.calibration]
    return f"{', '.join(found[:-1])} and {found[-1]}"


def _rows(runs: Iterable[Run]) -> str:
    found = []
    for run in runs:
        role = run.role
        role += ", length from its update" * (run.tokens is None)
        name = f"[{run.title}](estimates/{run.key}.yaml)"
        both = f"{run.printed:,.1f} | {run.estimate().rollout:,.1f}"
        found.append(f"| {name} | {role} | {run.seconds:,.4g} | {both} | {errors()[run.key]:+.0%} |")
    return "\n".join(found)


def _phases(runs: Iterable[Run]) -> str:
    found = []
    for run in runs:
        mine = run.estimate().seconds.items()
        shown = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in mine if seconds >= 0.5)
        told = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in run.phases.items()) or "not published"
        found.append(f"| {run.title} | {told} | {shown} |")
    return "\n".join(found)


def _within(runs: list[Run]) -> str:
    """Return how many predictions are near, and how far the farthest is off."""
    found = [errors()[run.key] for run in runs if run.role == "prediction"]
    near, median = sum(abs(error) <= 0.30 for error in found), statistics.median(found)
    farthest = max(found, key=abs)
    known = [errors()[run.key] for run in runs if run.role == "prediction" and run.tokens is not None]
    more = f"the median error is {median:+.0%}, the farthest {farthest:+.0%}"
    more += f". Of the {len(known)} whose lengths are published, {sum(abs(error) <= 0.3 for error in known)} are"
    return f"{near} of the {len(found)} predictions are within 30 %; {more}"


def _side(runs: list[Run]) -> str:
    """Return on which side of their estimates predictions are, and how many the printed range covers."""
    found = [errors()[run.key] for run in runs if run.role == "prediction"]
    shares = [1.0 / (1.0 + error) for error in found]
    low, high = rates.RANGE
    covered, slower = sum(low <= share <= high for share in shares), sum(error < 0 for error in found)
    beyond = "reaches farther above the estimate than below it" if high - 1 > 1 - low else "leans the other way"
    return (
        f"Of these {len(found)} predictions {slower} are too low: the published step took longer, so expect a step to "
        f"take\nlonger than estimated rather than shorter. The range that `plan` prints {beyond},\n"
        f"and covers {covered} of the {len(found)}"
    )


def _changed() -> int:
    """Return the number of rows whose estimate for their system is not what `plan` prints."""
    return sum(f"{run.printed:.1f}" != f"{run.estimate().rollout:.1f}" for run in RUNS)


def _lengths() -> float:
    """Return the longest over the shortest length of verl's dense rows."""
    found = [run.response_tokens for run in RUNS if run.key.startswith("verl_qwen2_5")]
    return max(found) / min(found)


def _memory() -> str:
    rows = []
    for one in HELD:
        used = "prediction" if one.mixture else "calibration"
        tensors = one.estimate()
        counted = tensors * (1 + FRAGMENTATION)
        above = f"{one.gib / tensors - 1:+.0%} | {one.gib / counted - 1:+.0%}"
        rows.append(f"| [{one.title}]({one.source}) | {used} | {one.gib:g} | {tensors:.0f} | {counted:.0f} | {above} |")
    return "\n".join(rows)


def _published_more(*, mixtures: bool, fragmentation: float) -> list[float]:
    """Return by what share published figures of mixtures, or of dense models, are above what is counted."""
    chosen = [one for one in HELD if one.mixture == mixtures]
    return [one.gib / (one.estimate() * (1.0 + fragmentation)) - 1.0 for one in chosen]


def page() -> str:
    """docs/estimates.md."""
    errors()  # first: lengths that follow from an update are those of the constants as they are
    turns = [run for run in RUNS if run.kind == "in turns"]
    beside = [run for run in RUNS if run.kind != "in turns"]
    constants = "\n".join(f"| `{name}` | {getattr(rates, name):g} |" for name in CALIBRATED)
    network = "\n".join(
        f"| `{name}` | {getattr(rates, name):g} | {others} | {_span(moved(name, 0.5))} | {_span(moved(name, 1.5))} |"
        for name, others in MEASURED.items()
    )
    curves = "\n".join(
        f"| {model} | " + ", ".join(f"{gpus:,}: {cost:.1f}" for gpus, cost in growth(model, parallel, engine)) + " |"
        for model, parallel, engine in GROWTH
    )
    low, high = spread()
    known = sum(run.tokens is not None for run in RUNS)
    dense = statistics.median(_published_more(mixtures=False, fragmentation=0.0))
    off = _published_more(mixtures=True, fragmentation=FRAGMENTATION)
    return f"""# Estimates of time and memory, compared with published runs

`gspo-hpc plan` estimates seconds from data sheets, numbers of operations and bytes, and a few constants
(gspo_hpc/planning/estimates/rates.py). This page compares the estimates with runs that others have published.
**None of them is a run of gspo_hpc**: no estimate of time has been compared with a run of this package on GPUs yet.
[gpu-results.md](gpu-results.md) has the memory of some passes on one GPU, beside that of the plan.
`python tools/estimates.py` writes this page, and a test checks that it is up to date.

**Every row is a config** in [docs/estimates/](estimates/) that `plan` accepts, complete enough for `train` and `submit`
(its data and reward are those of the presets: give yours). Its first lines have its source, a command, and the seconds
of a rollout that this command prints: those of gspo_hpc, in the column "`plan` prints s". A test runs the command of
every row.

**The column "estimated s" is for their system**, and errors are those of that column. It differs from what `plan`
prints in {_changed()} of {len(RUNS)} rows, because gspo_hpc does something else. NeMo-RL computes old log-probs for
every update; gspo_hpc does not for the first of a rollout, and for none where generation is ahead, as in verl's
asynchronous rows. And where generation is ahead, their engines begin a rollout before the last completion of the one
before has ended; those of gspo_hpc wait for it.

Rows that are called calibration were used to choose the constants below. Predictions are **held out**: no constant
of an estimate was chosen with one of them. Only the [range](#the-range) that `plan` prints around an estimate is that
of all rows whose lengths are published, predictions among them. The row called former calibration was used, too, until
its length was seen to be fitted to its own update: it tests nothing, and four constants are still those that it helped
to determine (see Constants).
Seconds are those of one step as these projects
count steps: a rollout with all its updates.

## Generation and training in turns

{_within(turns)}.

{_side(turns)}. The constants stay as the calibration rows give them: chosen by these rows, they
would have nothing left that tests them.

{HEADS}
{_rows(turns)}

| run | published phases, s | estimated phases, s |
|---|---|---|
{_phases(turns)}

## Generation and training side by side

GPUs of their own generate (the second number of a split), while the others train on completions of older weights. No
constant was calibrated on such a run. {_within(beside)}.

{HEADS}
{_rows(beside)}

| run | published phases, s | estimated phases, s |
|---|---|---|
{_phases(beside)}

The estimates for their systems assume that engines are always full: a sequence that ends makes room for the next
prompt, and sequences go on while weights change. gspo_hpc waits for the end of a rollout, and `plan` counts so. A step
takes as long as the longer of generation and training, plus the weight sync and whatever else stops both.

Sources: NeMo-RL [0.5]({NEMO.format("0.5.0")}) and [0.6]({NEMO.format("0.6.0")}), bf16, with the layouts, lengths and
batches given there; verl on H20, [fully asynchronous]({VERL}) and colocated. Not compared: NeMo-RL's runs in 8 bits,
and verl's [one step off]({ONE_STEP}), whose lengths are not published either. Of runs that this version plans but does
not run (engines over nodes; DeepSeek-V3), which determine nothing either, not even the range:

{planned_only()}

## The range

The {known} rows whose lengths are published, calibration and predictions, have published seconds between {low:.2f} and
{high:.2f} times the estimate for their system. `plan` prints that range with every estimate. The
{len(RUNS) - known} rows whose lengths are inferred have no part in it; {_covered()} of them lie in it. Until now the
range was that of the calibration rows, 0.98 to 1.42, and its upper end was that of the row whose length was fitted.

## Constants

| calibrated | value |
|---|---|
{constants}

The run of Qwen3-30B-A3B on 32 GPUs determines the efficiency of mixtures and the time that experts cost an engine. That
of Llama-3.1-8B on 16 GPUs determines how long GPUs take to change between generation and training. That on 8 GB200
shows that the CPU of GB200 launches kernels half as fast. The efficiency of dense layers, the seconds of an engine's
step and layer, and how far lengths spread are those of an earlier version of this page, which determined them with that
run of Qwen3-30B-A3B and with verl's colocated run of Qwen2.5-Math-7B on 32 H20. Without the latter, three calibration
rows are left, all on H100 and GB200. They give only whole steps, which do not tell these four constants from each
other, but agree with them: their errors are {_calibrated()}. So the four stay as they are, and **nothing on
this page determines how fast H20 is**: estimates for it rest on its data sheet and on constants from other cards.

The constants below are not calibrated: they are round numbers near what others measured. The table shows how each of
them affects the predictions: the least and the greatest error with half of its value, and with one and a half times
its value.

| constant | value | measured by others | errors with half | with 1.5 times |
|---|---|---|---|---|
{network}

## Where it misses, and why

- **verl publishes no response lengths.** For each of its rows we take the length with which our estimate of the update
  is the published time, so only the rest of the step is compared. It differs by a factor of {_lengths():.1f} between
  the rows of Qwen2.5-Math-7B: their updates cannot all be alike. Generation of its colocated rows takes longer than
  estimated.
- **verl's page has swapped two numbers.** It prints 269.80 s for the update of the colocated 32-GPU row, and 313.81 s
  for the asynchronous one of 16 + 16. The phases of every other row add up to its step within 4 to 14 s, and those of
  these two do so only with the numbers swapped back: 357 + 108 + 314 = 779 of 790 s, and 21 + 270 = 291 of 295 s.
  Earlier versions of the page have them in the right places. Each is used here where the sum puts it. The lengths of
  these two rows follow from that, and so do their estimates; no other row depends on it.
- **Their trainers are not ours.** NeMo-RL moves optimizer and weights by Ray; verl's 7B rows train with FSDP2.
- **Latency dominates the generation of few long sequences.** The time of a token is then that of its
  all-reduces and kernel launches. It differs more between interconnects than between GPUs.
- **Padding, stragglers, slow reward functions, start-up and evaluation are not included**: the estimate is for a step
  in which nothing goes wrong.

## Memory

Some scripts of ms-swift state the memory that Megatron reported for an update: the most that torch's allocator has
reserved on a GPU. The estimate is ours for the same update, without an engine, without what CUDA and NCCL take beside
the allocator (about 1.1 GiB in an estimate), and with the logits of the whole vocabulary, as they compute them, in
place of our blocks of logits: of the pass over layers and that over the head, on any stage, the larger one.

| run | used as | published GiB | tensors GiB | estimated GiB | published above tensors | above estimate |
|---|---|---|---|---|---|---|
{_memory()}

The allocator reserves more than tensors need: freed blocks into which nothing fits, which is called fragmentation. The
two dense models reserve {dense:.0%} more in the middle, so `plan` adds {FRAGMENTATION:.0%} of the tensors to every pass
(`FRAGMENTATION` in gspo_hpc/planning/estimates/phases.py). Mixtures have no part in that figure, and their published
figures differ from the estimate with it by {min(off):+.0%} to {max(off):+.0%}.

A layout of which {HEADROOM:.0%} of a GPU is left beyond the estimate is called comfortable, and `plan` warns of less.
Where tensors fit and their fragmentation does not, a run may run out of memory: the allocator gives back what it does
not use before it fails, which is slow, and not always enough.

For mixtures the estimate has, besides weights, gradients and the optimizer's state, what Megatron-Core's source
(transformer/moe) shows to be held: the sorted inputs of experts, both halves of their first product and what is made of
them; the tokens as they are sent, as they arrive, and as results before and after they are put in order; a copy in the
router's dtype where experts are sliced; the router's logits and weights in fp32 with its maps, while it works; and a
busiest rank with {IMBALANCE:g} times the mean of tokens. Not counted are the workspaces of grouped products, the
indices that Transformer Engine's kernels keep, a rank that is busier than that, and that mixtures fragment more than
dense models, because the sizes of experts' tensors vary with the routing. The published figures do not tell these
apart. The 60 GiB of Qwen3-30B-A3B were first published for another layout with the same experts on each GPU (TP 2,
PP 1).

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


def _config(run: Run) -> Callable[[str], str]:
    return lambda _: run.file()


if __name__ == "__main__":
    pages = {"estimates.md": lambda _: page(), "estimates.svg": lambda _: plot()}
    pages |= {f"estimates/{run.key}.yaml": _config(run) for run in RUNS}
    sys.exit(generated.main("estimates", __doc__, pages))
