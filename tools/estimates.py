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
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import generated
import later_runs
import published_syncs
from calibration import (
    FORMER_LAUNCH,
    FORMER_SHARE,
    FORMER_SPREAD,
    FREE,
    GB200,
    H20,
    before,
    bounds,
    by_operations,
    cut_share,
    determined,
    former_mixtures,
    other_syncs,
    otherwise,
)
from published_runs import CUT_SHARE, HELD, KNOWN_H20, NEMO, ONE_STEP, RUNS, VERL, VERL_RECIPE, Run, planned_only

from gspo_hpc.config.constants import NCCL_BYTES
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.estimates import advice, devices, memory, rates, time
from gspo_hpc.planning.estimates.activations import IMBALANCE
from gspo_hpc.planning.estimates.phases import FRAGMENTATION, HEADROOM
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.system.text import gib

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
    "BANDWIDTH": "nobody: a figure of experience for long reads, as a share of the data sheet",
    "EAGER_SECONDS": "nobody: a figure of experience; two predictions, of verl's mixture, are in eager mode",
}
_FIRST = "the first version of this page (2026-11-22), with rows for calibration as below; only bounded since"
_IN_VIEW = "rounded, near what others measured, below; set on 2026-11-22 with the rows of that day in view"
# Where the value of each constant in use comes from.
ORIGINS = {
    "SPREAD": "determined, above",
    "SYNC_SECONDS": "determined, above",
    "OVERHEAD_SECONDS": "determined, above; until 2026-11-28 it was 3, a figure of experience",
    "SWITCH_SECONDS": "determined, above",
    "EXPERT_LAUNCH": "determined, above, for the value of `EXPERTS_SECONDS` in use",
    "EXPERTS_SECONDS": _FIRST,
    "EFFICIENCY": _FIRST,
    "STEP_SECONDS": _FIRST,
    "LAYER_SECONDS": _FIRST,
    "BANDWIDTH": "a figure of experience since the first version of this page; no row was used",
    "EAGER_SECONDS": "a figure of experience; no row was used",
    "OVERLAPPED": "a figure of experience; no row was used",
    "LINK": _IN_VIEW,
    "NODE_LATENCY": _IN_VIEW,
    "NETWORK_LATENCY": _IN_VIEW,
    "SYNC_LINK": _IN_VIEW,
    "BUCKET_SECONDS": "a figure of experience; no row was used",
    "RELOAD_SECONDS": "a figure of experience; no row was used",
}
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


def _wrapped(text: str, first: str = "", rest: str = "") -> str:
    """Return a paragraph in lines of the page's width."""
    lines = textwrap.TextWrapper(120, initial_indent=first, subsequent_indent=rest)
    lines.break_long_words = lines.break_on_hyphens = False
    return lines.fill(" ".join(text.split()))


def _covered(runs: Iterable[Run], low: float, high: float) -> int:
    """Return how many of these rows have published seconds in a range around their estimates."""
    return sum(low <= 1.0 / (1.0 + errors()[run.key]) <= high for run in runs)


def _calibration_range() -> tuple[float, float]:
    """Return the least and the greatest share of an estimate that calibration rows have as published seconds."""
    shares = [1.0 / (1.0 + errors()[run.key]) for run in RUNS if run.calibration]
    return min(shares), max(shares)


def _range() -> str:
    """Return what the printed range is, and which rows lie in it and in that of calibration rows alone."""
    low, high = spread()
    narrow = _calibration_range()
    known = [run for run in RUNS if run.tokens is not None]
    held = [run for run in known if run.role == "prediction"]
    others = [run for run in RUNS if run.tokens is None]
    apart = [run for run in held if run not in KNOWN_H20]
    ends = sorted(held, key=lambda run: errors()[run.key])
    least, most = (1.0 / (1.0 + end(errors()[run.key] for run in apart)) for end in (max, min))
    paragraphs = (
        f"""The {len(known)} rows whose lengths are published, {len(known) - len(held)} calibration and {len(held)}
        predictions, have published seconds between {low:.2f} and {high:.2f} times the estimate for their system. `plan`
        prints that range with every estimate. So it covers all {len(held)} of these held-out rows because it is theirs:
        its lower end is that of "{ends[-1].title}", its upper end that of "{ends[0].title}". The {len(others)} rows
        whose lengths are inferred have no part in it; {_covered(others, *rates.RANGE)} of them lie in it.""",
        f"""The calibration rows alone have a range of {narrow[0]:.2f} to {narrow[1]:.2f}. It covers
        {_covered(held, *narrow)} of the {len(held)} held-out rows, and would promise too much. Without the rows of
        Qwen3-4B-Base on H20, those that are held out lie between {least:.2f} and {most:.2f}.""",
    )
    return "\n\n".join(map(_wrapped, paragraphs))


def _first() -> str:
    """Return what the estimates said of H20 before a figure of it was calibrated, in one sentence."""
    (row,) = (run for run in KNOWN_H20 if run.calibration)
    was, told = before()[row.key], row.phases
    off = [before()[run.key].rollout / run.seconds - 1.0 for run in KNOWN_H20 if not run.calibration]
    between = was.seconds["sync"] + was.seconds["other"]
    rest = row.seconds - told["generation"] - told["update"]
    return f"""Before, with the constants that this page had until then, the step of the calibration row was estimated
    {was.rollout / row.seconds - 1:+.1%} off, by errors that cancelled (generation {was.seconds["generation"]:.0f} of
    {told["generation"]:.0f} s, update {was.seconds["update"]:.0f} of {told["update"]:.0f} s, the rest {between:.0f} of
    {rest:.0f} s), and the predictions were {_span(off)} off, {statistics.median(off):+.0%} in the middle."""


def _worse() -> str:
    """Return how many predictions of H20 are nearer than before, and which are farther."""
    held = [run for run in KNOWN_H20 if not run.calibration]
    was = {run.key: before()[run.key].rollout / run.seconds - 1.0 for run in held}
    changes = {run.key: round(abs(errors()[run.key]), 3) - round(abs(was[run.key]), 3) for run in held}
    nearer = sum(change < 0 for change in changes.values())
    told = ", ".join(
        f"{run.title.removeprefix('Qwen3-4B-Base, 16 H20, ')} ({was[run.key]:+.1%}, now {errors()[run.key]:+.1%})"
        for run in held
        if changes[run.key] > 0
    )
    return f"Of the {len(held)} predictions {nearer} are nearer than before. Farther are: {told}"


def _generations() -> str:
    """Return how far phases of held-out rows of H20 are off, by system."""
    found = []
    for system in ("verl", "UniRL"):
        held = [run for run in KNOWN_H20 if not run.calibration and f", {system}, " in run.title]
        for phase in ("update", "generation"):
            off = [run.estimate().seconds[phase] / run.phases[phase] - 1.0 for run in held]
            found.append(f"{system}'s {phase} {min(off):+.0%} to {max(off):+.0%}")
    return ", ".join(found)


def _h20() -> str:
    """Return what the rows of H20 whose lengths are published are, and what the estimates say of them."""
    held = [errors()[run.key] for run in KNOWN_H20 if not run.calibration]
    near = sum(abs(error) <= 0.15 for error in held)
    other = otherwise()
    paragraphs = (
        f"""A [benchmark of verl and UniRL]({KNOWN_H20[0].source}) publishes mean lengths and phases for Qwen3-4B-Base
        on 16 H20: by bands of about a hundred steps, for short responses early in training ("short"), and for responses
        of exactly 4,096 tokens ("all 4096"). Steps 101 to 200 of verl calibrate, all else is held out; which
        rows do was settled before an estimate of any of them was computed. Not so [other
        choices](#what-was-changed-after-estimates-had-been-seen). Engines have two GPUs unless the name says otherwise.
        Both systems leave the trainer on its GPUs while engines generate (`memory.offload_trainer: false`), by their
        published recipes.""",
        _first(),
        f"""Now {near} of the {len(held)} predictions are within 15 %, and all within {max(map(abs, held)):.0%}; the
        error in the middle is {statistics.median(held):+.0%}. {_worse()}. The phases of predictions are off by:
        {_generations()}. Updates are near everywhere. Generation by verl is near where many sequences are long, and too
        slow where one long response is waited for among short ones. UniRL's engines, SGLang, generate faster than
        estimated in every row. The bands from step 201 on of verl are much like the one that calibrates, and test
        little; short and equal lengths test more, and so does another system.""",
        f"""One published number, the seconds of generation, has to say what of an engine's step is slower on H20 than
        estimated. Here it is reading memory, which is the card's and not the host's; that was chosen when the
        estimates of all rows with the constants of before had been seen. So these predictions test the figure, and the
        choice less strictly. Had all of generation been taken to be slower, they would be
        {_span(list(other["generation"]))} off; had launches, {_span(list(other["launches"]))}.""",
        _left_over(),
    )
    return "\n\n".join(map(_wrapped, paragraphs))


def _left_over() -> str:
    """Return what the rest of a step on H20 is made of, published and estimated."""
    (row,) = (run for run in KNOWN_H20 if run.calibration)
    sync, moved_in = row.phases["sync"], row.estimate().seconds["sync"] - rates.SYNC_SECONDS
    rest = row.seconds - sum(row.phases.values())
    rests = [run.seconds - sum(run.phases.values()) for run in KNOWN_H20 if not run.calibration]
    return f"""Of the rest of the calibration row's step its weight sync takes {sync:.1f} s, and all else {rest:.2f} s.
        Until 2026-11-28 the estimate had {moved_in:.2f} s for the sync, which its bytes take, and a figure of
        experience, `OVERHEAD_SECONDS`, of 3.0 s for all else: near together, and wrong apart. Now the row
        determines both (`SYNC_SECONDS`, `OVERHEAD_SECONDS`). The held-out rows leave {min(rests):.1f} to
        {max(rests):.1f} s for all else, those of UniRL the most, beside rewards of 0.7 to 3.3 s; verl has rewards in
        its generation."""


def _syncs() -> str:
    """Return what the table of syncs shows, and what it leaves open."""
    known = _span([errors()[run.key] for run in RUNS if run.is_known_prediction])
    other, more = other_syncs(), determined().sync
    paragraphs = (
        f"""A sync on GPUs that trainers and engines share takes `SYNC_SECONDS` beside its bytes: engines wake up, every
        tensor is gathered and passed to a loader by name, and caches are set up anew. One number of one row, of one
        model, determines it. Whether these {more:.1f} s grow with the model that number cannot tell: it has them
        constant. Had they been counted by layers, predictions whose lengths are published would be
        {_span(list(other["layers"]))} off; by bytes, {_span(list(other["bytes"]))}; as it is, {known}. By bytes they
        would be 2.5 GB/s, with which Qwen3-235B-A22B took three minutes; others have loaded it in 6.2 s (`SYNC_LINK`
        below).""",
        f"""Engines with GPUs of their own do not sleep and wake, so their syncs have no such seconds. That was decided
        for this reason, and after verl's figures for such syncs had been seen, in which a model of 7B takes 0.12 s. No
        row with phases has such a sync. Had it the same seconds, predictions would be {_span(list(other["apart"]))}
        off.""",
        """UniRL's engines of one GPU take new weights in less than half of the estimate: what engines of two GPUs need
        more is not modelled. verl's page has the last three with its checkpoint engine and without. Those of mixtures
        are estimated too low, even with it: a mixture has hundreds of tensors a layer, and `RELOAD_SECONDS` of a layer
        are for some ten. The layouts of these trainers are not published; the estimate is for those of verl's other
        runs, or of this size. The syncs of
        this package itself that were measured so far are on one GPU: 0.7 s for 2.3 GiB, with wake-up and probe
        ([gpu-results.md](gpu-results.md)), for which `plan` would say over 3 s. None was measured over several GPUs, so
        `plan` counts what verl takes.""",
    )
    return "\n\n".join(map(_wrapped, paragraphs))


def _seen() -> str:
    """Return what was chosen after estimates had been seen, so that predictions test it less strictly."""
    (mixture,) = (run for run in RUNS if run.key == "verl_qwen3_30b_a3b_128_h20")
    eager = mixture.estimate().rollout / mixture.seconds - 1.0
    kept, rates.EAGER_SECONDS = rates.EAGER_SECONDS, 0.0
    graphs = mixture.estimate().rollout / mixture.seconds - 1.0
    rates.EAGER_SECONDS = kept
    items = (
        """- `memory.offload_trainer: false` of all 15 rows of the benchmark on H20: their published recipes say so, and
        were read for it after the first estimates. It takes a switch, 13 s then, off each of these rows.""",
        f"""- `SPREAD`: it was {FORMER_SPREAD:g}, and became {rates.SPREAD:g} by the share of cut responses of the
        calibration row, which was read after the first estimates, too.""",
        """- That `reads`, and not something else, makes generation on H20 slower ([above](#h20-with-lengths-published)
        with the alternatives).""",
        """- `SYNC_SECONDS` in place of `OVERHEAD_SECONDS`, constant, and only where GPUs are shared: chosen on
        2026-11-28, when all errors of the version before were known ([above](#weight-syncs), with the
        alternatives).""",
        f"""- Eager mode of verl's two rows of Qwen3-30B-A3B-Base: the [script]({VERL_RECIPE}) of the run side by side
        sets it. It was read when the row in turns was known to be 47 % too low. The script of that run is not
        published; it is taken to have the same setting. Without it the row would be {graphs:+.0%} off, not
        {eager:+.0%}.""",
        f"""- `EXPERT_LAUNCH` in place of a share of operations that passes over mixtures reach: until 2026-11-28 this
        was {FORMER_SHARE:g}, beside {1e6 * FORMER_LAUNCH:.0f} µs of a product of an expert. It was changed by the
        utilization that verl publishes ([below](#runs-that-were-found-later)), when all errors were known. The step on
        H100 determines either. Predictions of this model were {_span(list(former_mixtures().values()))} off, and are
        {_span(list(_mixtures().values()))}. Further off than before are {_farther(former_mixtures(), _mixtures())}.""",
        """- The tensors of a mixture's update, of which [Memory](#memory) has rows: on 2026-11-24 all copies of tokens
        that Megatron-Core's dispatcher holds were counted, by its source, when the errors of these rows were known.""",
    )
    return "\n".join(_wrapped(item, rest="  ") for item in items)


def _later() -> str:
    """Return what runs say that were found when all constants were fixed."""
    errors = {run.key: later_runs.estimated(run).rollout / run.seconds - 1.0 for run in later_runs.LATER}
    low, high = rates.RANGE
    inside = sum(low <= 1.0 / (1.0 + error) <= high for error in errors.values())
    every = list(later_runs.PUBLISHED_MFU)
    with by_operations():
        before = {run.key: later_runs.estimated(run).rollout / run.seconds - 1.0 for run in later_runs.LATER}
        shares = _shares(later_runs.utilization(nodes) for nodes in every)
    mixtures = [
        f"{run.title} {before[run.key]:+.0%}" for run in later_runs.LATER if "-A" in run.title or "V3" in run.title
    ]
    paragraphs = (
        f"""A reader looked for published runs that this page did not have, when all constants but `EXPERT_LAUNCH` were
        as they are: {len(errors) - 1} of NeMo-RL 0.4 ([its page]({later_runs.LATER[0].source})) and one of verl
        ([its page]({later_runs.VERL_MIXTURE})). {inside} of them lie in the range that `plan` prints. They are no part
        of any count above, nor of the range. Before `EXPERT_LAUNCH` was changed, those of mixtures were, in this order,
        {"; ".join(mixtures)}.""",
        f"""verl publishes what share of the card's operations updates of Qwen3-30B-A3B reach with TP 1 and EP 8, on
        GPUs that are H20 by the rest of its page: an MFU of {_shares(later_runs.PUBLISHED_MFU.values())} on
        {_listed([8 * nodes for nodes in every])} GPUs. The estimate has
        {_shares(later_runs.utilization(nodes) for nodes in every)}. While passes over mixtures were taken to reach a
        share of operations, it was {shares}: by these figures seconds of each product are the better count
        ([above](#what-was-changed-after-estimates-had-been-seen)). What theirs lose with more GPUs the estimate does
        not have; and DeepSeek-V3, whose experts are larger, is farther off than before.""",
    )
    return "\n\n".join(map(_wrapped, paragraphs))


def _listed(values: Iterable[object]) -> str:
    """Return values as a text: with commas, and "and" before the last."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}"


def _shares(values: Iterable[float]) -> str:
    return _listed(f"{value:.2f}" for value in values)


def _later_rows() -> str:
    """Return the lines of the table of runs that were found later."""
    found = []
    for run in later_runs.LATER:
        seconds = later_runs.estimated(run).rollout
        found.append(f"| {run.title} | {run.seconds:,.4g} | {seconds:,.1f} | {seconds / run.seconds - 1.0:+.0%} |")
    return "\n".join(found)


def _misses() -> str:
    """Return what is known of the misses on H20."""
    items = (
        f"""- **verl's own pages publish no response lengths.** For each of these rows we take the length with which our
        estimate of the update is the published time, so only the rest of the step is compared. It differs by a factor
        of {_lengths():.1f} between the rows of Qwen2.5-Math-7B: their updates cannot all be alike. Generation of the
        colocated rows takes longer than estimated. With H20's figures above, lengths of the dense model follow that are
        longer. With them, and with what was [changed besides](#what-was-changed-after-estimates-had-been-seen), errors
        changed so: {_inferred_before()}.""",
        f"""- **A long tail of few sequences is estimated too slow on H20.** `reads` was determined where many sequences
        are long. Where most are short and a few go on to the end, generation is estimated at {_tail():.1f} times what
        is published.""",
        _waiting(),
        _experts(),
    )
    return "\n".join(_wrapped(item, rest="  ") for item in items)


def _waiting() -> str:
    """Return what verl's trainers wait for samples, published, beside what the estimates of these rows lack."""
    rows = [run for run in RUNS if "waiting" in run.phases]
    waits = [run.phases["waiting"] for run in rows]
    lacks = [run.seconds - run.estimate().rollout for run in rows]
    with_wait = [(run.estimate().rollout + wait) / run.seconds - 1.0 for run, wait in zip(rows, waits, strict=True)]
    return f"""- **verl's trainers wait for samples although engines are ahead.** In the {len(rows)} rows side by side
        they wait {min(waits):.0f} to {max(waits):.0f} s of each step, by the column "gen" of their page, and the
        estimates are {min(lacks):.0f} to {max(lacks):.0f} s too low. With the published wait they would be
        {_span(with_wait)} off, where the update, to which lengths are fitted, is right by itself. By the estimate
        engines need far less than the update, so nobody waits. What theirs wait for the page does not tell, so the
        model has no such wait."""


def _experts() -> str:
    """Return what is known of the prediction that is farthest off, a mixture on H20."""
    title = "Qwen3-30B-A3B-Base, 128 H20"
    error, former = errors()["verl_qwen3_30b_a3b_128_h20"], former_mixtures()[title]
    return f"""- **The mixture on H20 is estimated too fast**, by {error:+.0%}. Its length is inferred, and what an
        engine's step takes in eager mode is a figure of experience: no published row of a mixture has its phases and
        its lengths. With a share of operations, as it was before, it was {former:+.0%}."""


def _mixtures() -> dict[str, float]:
    """Return the errors of the predictions of Qwen3-30B-A3B."""
    return {run.title: errors()[run.key] for run in RUNS if run.role == "prediction" and "A3B" in run.title}


def _farther(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return the rows whose errors are larger than they were."""
    return ", ".join(
        f"{title} ({before[title]:+.0%} then, {error:+.0%} now)"
        for title, error in after.items()
        if abs(error) > abs(before[title])
    )


def _inferred_before() -> str:
    """Return what became of the rows of H20 whose lengths are inferred."""
    found = []
    for run in RUNS:
        if run.tokens is None:
            was = before()[run.key].rollout / run.seconds - 1.0
            found.append(f"{run.title} {was:+.0%}, now {errors()[run.key]:+.0%}")
    return "; ".join(found)


def _determined() -> str:
    """Return the table of constants that one published number each determines."""
    found, share = determined(), cut_share(rates.SPREAD)
    card, grace = devices.DEVICES[H20], devices.DEVICES[GB200]
    (row,) = (run for run in KNOWN_H20 if run.calibration)
    update, generation = row.phases["update"], row.phases["generation"]
    lines = (
        ("`SPREAD`", rates.SPREAD, f"{found.spread:.2f}", f"H20: {CUT_SHARE:.1%} of responses are cut ({share:.1%})"),
        ("`products` of H20", card.products, f"{found.products:.2f}", f"H20: its update of {update} s"),
        ("`reads` of H20", card.reads, f"{found.reads:.2f}", f"H20: its generation of {generation} s"),
        ("`SYNC_SECONDS`", rates.SYNC_SECONDS, f"{found.sync:.2f}", f"H20: its sync of {row.phases['sync']} s"),
        ("`OVERHEAD_SECONDS`", rates.OVERHEAD_SECONDS, f"{found.overhead:.2f}", "H20: its step without its phases"),
        ("`SWITCH_SECONDS`", rates.SWITCH_SECONDS, f"{found.switch:.1f}", "Llama-3.1-8B on 16 H100: its step"),
        ("`launching` of GB200", grace.launching, f"{found.launching:.1f}", "Llama-3.1-8B on 8 GB200: its step"),
        (
            "`EXPERT_LAUNCH`",
            rates.EXPERT_LAUNCH,
            f"{found.launch:.3g}",
            "Qwen3-30B-A3B on 32 H100: its step, for one value of `EXPERTS_SECONDS`",
        ),
    )
    return "\n".join(f"| {name} | {value:g} | {exact} | {row} |" for name, value, exact, row in lines)


def _constants() -> str:
    """Return what the calibrated constants mean, and which of them the rows only bound."""
    steps = [errors()[run.key] for run in RUNS if run.is_known_prediction]
    own = rates.EFFICIENCY * devices.DEVICES[H20].products
    paragraphs = (
        f"""`products` is what passes of dense layers reach on a card over `EFFICIENCY`, `reads` what engines reach of
        its memory's bandwidth over `BANDWIDTH` (gspo_hpc/planning/estimates/devices.py); both are 1 for all other
        cards, because no row of one has phases. A data sheet has two rates, operations and bytes. The update depends on
        the first, and generation on the second, so each phase determines one figure. `reads` makes up for whatever else
        an engine's step takes that is not counted. That row's trainer stays on its GPUs, and its phases leave no time
        for a switch. So `SWITCH_SECONDS` counts only where the trainer leaves
        them (`memory.offload_trainer`). `SPREAD` was {FORMER_SPREAD:g}, with which {cut_share(FORMER_SPREAD):.1%} of
        the responses of that row would be cut.""",
        f"""Four constants are not determined, but bounded. Of the steps of H100 and GB200 only the sum is published:
        for another value of one of these constants, the row of H20 and those three steps determine the constants above
        anew, each exactly, and no row is left over. `EXPERTS_SECONDS` shares the step of the mixture with
        `EXPERT_LAUNCH`: the more one takes, the less is left for the other. The table has the least and the
        greatest value with which all of them are possible: no negative seconds, no share above 1, and a CPU of GB200
        that launches no faster than
        others. The values in use lie between; where, the rows do not say. They are from the first version of this
        page, and a row that was fitted to itself had a part in three of them ([below](#where-each-value-comes-from)).
        In particular, the update of H20 shows that
        passes reach {own:.2f} of what large products sustain on it, and on H100 `EFFICIENCY` may be anything between
        its bounds: these rows do not show that the two cards differ. The last two columns have the errors of the
        {len(steps)} predictions whose lengths are published, at both ends; with the values in use they are
        {_span(steps)}.""",
    )
    return "\n\n".join(map(_wrapped, paragraphs))


def _bounds() -> str:
    """Return the table of constants that the calibration rows only bound."""
    found = []
    for name in FREE:
        ends = bounds(name)
        off = " | ".join(_span(list(end.errors)) for end in ends)
        switches = " to ".join(f"{end.found.switch:.0f}" for end in ends)
        allowed = f"{ends[0].value:.2g} to {ends[1].value:.2g}"
        experts = " to ".join(f"{1e6 * end.found.launch:.0f}" for end in ends)
        found.append(f"| `{name}` | {getattr(rates, name):g} | {allowed} | {switches} | {experts} | {off} |")
    return "\n".join(found)


def _origins() -> str:
    """Return the table of where each constant in use comes from."""
    return "\n".join(f"| `{name}` | {getattr(rates, name):g} | {origin} |" for name, origin in ORIGINS.items())


def _constants_of_memory() -> str:
    """Return the table of where each constant of memory comes from, but for fragmentation."""
    experience = "a figure of experience; no row was used"
    lines = (
        ("HEADROOM", f"{HEADROOM:.0%} of a GPU", "a figure of experience: what is called comfortable, nothing else"),
        ("CONTEXT", f"{gib(memory.CONTEXT)} of each process", "near the 0.5 to 1 GiB that CUDA takes; no row was used"),
        ("ENGINE", f"{gib(memory.ENGINE)} of each of its GPUs", experience),
        ("NCCL_BYTES", f"{gib(NCCL_BYTES)} of each group", experience),
        ("IMBALANCE", f"{IMBALANCE:g} times the average, of the fullest rank of experts", experience),
        ("MOST", f"{advice.MOST:.0%} of a GPU, that an engine is advised to take", experience),
    )
    return "\n".join(f"| `{name}` | {value} | {source} |" for name, value, source in lines)


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
        shown = ", ".join(_phase(name, seconds) for name, seconds in mine if seconds >= 0.05)
        told = ", ".join(_phase(name, seconds) for name, seconds in run.phases.items()) or "not published"
        found.append(f"| {run.title} | {told} | {shown} |")
    return "\n".join(found)


def _phase(name: str, seconds: float) -> str:
    return f"{name} {seconds:,.0f}" if seconds >= 10 else f"{name} {seconds:.1f}"


def _within(runs: list[Run]) -> str:
    """Return how many predictions are near, and how far the farthest is off."""
    found = [errors()[run.key] for run in runs if run.role == "prediction"]
    near, median = sum(abs(error) <= 0.30 for error in found), statistics.median(found)
    farthest = max(found, key=abs)
    known = [errors()[run.key] for run in runs if run.role == "prediction" and run.tokens is not None]
    more = f"the median error is {median:+.0%}, the farthest {farthest:+.0%}"
    more += f". Of the {len(known)} whose lengths are published, {sum(abs(error) <= 0.3 for error in known)} are"
    return f"{near} of the {len(found)} predictions are within 30 %; {more}"


def _own_within(runs: list[Run]) -> str:
    """Return of how many predictions the seconds that `plan` prints are near, and how many there are."""
    found = [run.printed / run.seconds - 1.0 for run in runs if run.role == "prediction"]
    return f"{sum(abs(error) <= 0.30 for error in found)} of the {len(found)}"


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


def _tail() -> float:
    """Return the estimated over the published seconds of generation of verl's short responses on H20."""
    (run,) = (one for one in KNOWN_H20 if one.title.endswith("verl, short"))
    return run.estimate().seconds["generation"] / run.phases["generation"]


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
    turns = [run for run in RUNS if run.kind == "in turns" and run not in KNOWN_H20]
    beside = [run for run in RUNS if run.kind != "in turns"]
    network = "\n".join(
        f"| `{name}` | {getattr(rates, name):g} | {others} | {_span(moved(name, 0.5))} | {_span(moved(name, 1.5))} |"
        for name, others in MEASURED.items()
    )
    curves = "\n".join(
        f"| {model} | " + ", ".join(f"{gpus:,}: {cost:.1f}" for gpus, cost in growth(model, parallel, engine)) + " |"
        for model, parallel, engine in GROWTH
    )
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
of an estimate was determined by one of them. Four round numbers, of links, were set with the rows of the first day in
view ([below](#where-each-value-comes-from)), and later choices were made when errors were known
([a list](#what-was-changed-after-estimates-had-been-seen)). Only the [range](#the-range) that `plan` prints around an
estimate is that of all rows whose lengths are published, predictions among them. The row called former calibration had
a part in earlier versions of this page, until its length was seen to be fitted to its own update: it tests nothing.
Seconds are those of one step as these projects count steps: a rollout with all its updates.

## Generation and training in turns

{_within(turns)}.

{_side(turns)}. The constants stay as the calibration rows give them: chosen by these rows, they
would have nothing left that tests them.

{HEADS}
{_rows(turns)}

| run | published phases, s | estimated phases, s |
|---|---|---|
{_phases(turns)}

## H20, with lengths published

{_h20()}

{HEADS}
{_rows(KNOWN_H20)}

| run | published phases, s | estimated phases, s |
|---|---|---|
{_phases(KNOWN_H20)}

## Weight syncs

{_syncs()}

{published_syncs.HEADS}
{published_syncs.table()}

## Generation and training side by side

GPUs of their own generate (the second number of a split), while the others train on completions of older weights. No
constant was calibrated on such a run. {_within(beside)}.
What `plan` prints, which is for gspo_hpc, is within 30 % of the published seconds in {_own_within(beside)}.

{HEADS}
{_rows(beside)}

| run | published phases, s | estimated phases, s |
|---|---|---|
{_phases(beside)}

The estimates for their systems assume that engines are always full: a sequence that ends makes room for the next
prompt, and sequences go on while weights change. gspo_hpc waits for the end of a rollout, and `plan` counts so. A step
takes as long as the longer of generation and training, plus the weight sync and whatever else stops both.

Sources: NeMo-RL [0.5]({NEMO.format("0.5.0")}) and [0.6]({NEMO.format("0.6.0")}), bf16, with the layouts, lengths and
batches given there; verl on H20, [fully asynchronous]({VERL}) and colocated, beside the benchmark above. Not compared:
NeMo-RL's runs in 8 bits, and verl's [one step off]({ONE_STEP}), whose lengths are not published either. Of runs that
this version plans but does not run (engines over nodes; DeepSeek-V3), which determine nothing either, not even the
range:

{planned_only()}

## What was changed after estimates had been seen

Held-out rows test these choices less strictly than they test a constant, since their errors were known:

{_seen()}

## The range

{_range()}

## Constants

Each of these is determined by one published number of a calibration row, and rounded:

| constant | value | before rounding | determined by |
|---|---|---|---|
{_determined()}

{_constants()}

| constant | value | rows allow | seconds of a switch | `EXPERT_LAUNCH`, µs | errors at the least | at the greatest |
|---|---|---|---|---|---|---|
{_bounds()}

### Where each value comes from

| constant | value | source |
|---|---|---|
{_origins()}

The first version chose `EFFICIENCY`, `STEP_SECONDS` and `LAYER_SECONDS` with rows for calibration among which was
verl's run of Qwen2.5-Math-7B on 32 H20, whose length was fitted to its own update, and `EXPERTS_SECONDS`, beside
what products of experts take, with the row of Qwen3-30B-A3B on 32 H100, whose one number does not determine both. None
of the four was changed when these mistakes were found: no row determines a better value.

What large products sustain on a card (gspo_hpc/planning/estimates/devices.py) is from public benchmarks of matrix
products, rounded: a figure of experience. `products` and `reads` of H20 and `launching` of GB200 are determined, above;
all else there is from data sheets.

### What others measured

The constants below are not calibrated: they are round numbers near what others measured. The table shows how each of
them affects the predictions: the least and the greatest error with half of its value, and with one and a half times
its value.

| constant | value | measured by others | errors with half | with 1.5 times |
|---|---|---|---|---|
{network}

## Runs that were found later

{_later()}

| run | published s | estimated s | error |
|---|---|---|---|
{_later_rows()}

## Where it misses, and why

{_misses()}
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

Other constants of memory:

| constant | value | source |
|---|---|---|
{_constants_of_memory()}

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
