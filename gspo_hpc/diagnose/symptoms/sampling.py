"""Symptoms of sampling: groups of completions from which nothing can be learned, kept or replaced."""

from __future__ import annotations

from gspo_hpc.config.constants import COLD, NARROW_K, NARROW_P, ZERO_VARIANCE
from gspo_hpc.config.schema import Rollout
from gspo_hpc.diagnose.evidence import ENOUGH, Evidence, mean, percent, span
from gspo_hpc.diagnose.registry import Finding, symptom
from gspo_hpc.system.text import rounded

# Above four fifths of groups without signal the gradient comes from a handful of prompts.
ZERO_VARIANCE_HIGH = 0.8

_READ = "samples.jsonl: read the completions of such groups"


@symptom(
    "zero_variance_groups",
    severity="warning",
    shows="in half of the groups or more all completions have the same reward; steps without anything to learn",
    change="`rollout.temperature`, `rollout.top_p`, `rollout.top_k`, `rollout.dynamic_sampling`, "
    "`batch.num_generations`, the prompts",
)
def zero_variance_groups(run: Evidence) -> Finding | None:
    """Find groups in which every completion has the same reward."""
    batch = run.config.batch
    if not batch.global_batch_size or not batch.num_generations:
        return None
    each = batch.global_batch_size // batch.num_generations
    points = run.points("zero_variance_groups", run.recent)
    if len(points) < ENOUGH:
        return None
    count, total = int(sum(n for _, n in points)), each * len(points)
    share = count / total
    if share < ZERO_VARIANCE:
        return None
    empty = sum(1 for record in run.recent if record.get("empty"))
    nothing = f"; {empty} of {len(points)} steps had nothing to learn from" if empty else ""
    narrow = _narrow_sampling(run.config.rollout)
    # Where every reward is the same, no group has a signal, and to draw others would not end.
    spread = any(value > 0.0 for _, value in run.points("reward_std", run.recent)) or not run.points("reward_std")
    offered = spread and not narrow and not run.config.rollout.dynamic_sampling
    replaced = ("rollout.dynamic_sampling=true",) if offered else ()
    return Finding(
        (
            f"in {percent(share)} of the groups ({count} of {total}, {span(points)}) all completions have the same "
            f"reward{nothing}",
        ),
        f"the completions of a group are nearly identical, because {' and '.join(narrow)}"
        if narrow
        else "the prompts are too easy or too hard, or the reward function gives all answers the same reward",
        (*narrow.values(), *replaced, f"batch.num_generations={2 * batch.num_generations}"),
        ("data.train: leave out prompts that the model always or never answers correctly", _READ),
        "problem" if share >= ZERO_VARIANCE_HIGH else "warning",
    )


def _narrow_sampling(rollout: Rollout) -> dict[str, str]:
    """Return the settings with which nearly always the same tokens are sampled, each with what to set instead."""
    found: dict[str, str] = {}
    if rollout.temperature < COLD:
        found[f"rollout.temperature is {rounded(rollout.temperature)}"] = "rollout.temperature=1.0"
    if rollout.top_p < NARROW_P:
        found[f"rollout.top_p is {rounded(rollout.top_p)}"] = "rollout.top_p=1.0"
    if 0 < rollout.top_k < NARROW_K:
        found[f"rollout.top_k is {rollout.top_k}"] = "rollout.top_k=-1"
    return found


@symptom(
    "replaced_groups",
    severity="warning",
    shows="with `rollout.dynamic_sampling`, half of the groups or more that were sampled had no signal and were "
    "replaced; rollouts that groups without signal fill up (a problem)",
    change="the prompts; `rollout.max_num_gen_batches`",
)
def replaced_groups(run: Evidence) -> Finding | None:
    """Find a run that samples most of its groups in vain, or that no longer finds enough groups with signal."""
    shares, drawn = (run.points(f"rollout/{name}", run.recent) for name in ("no_signal_fraction", "prompts_drawn"))
    filled = [point for point in run.points("rollout/filled_groups", run.recent) if point[1] > 0]
    if len(shares) < ENOUGH or (mean(shares) < ZERO_VARIANCE and not filled):
        return None
    batches = run.config.rollout.max_num_gen_batches
    evidence = [
        f"{percent(mean(shares))} of the sampled groups had no signal, {span(shares)}: a rollout sampled "
        f"{rounded(mean(drawn))} prompts on average"
    ]
    if filled:
        evidence.append(
            f"in {len(filled)} of {len(shares)} rollouts too few had signal, and {rounded(mean(filled))} groups "
            "without signal filled them up"
        )
    return Finding(
        tuple(evidence),
        "most prompts are too easy or too hard for the model by now, so most of the generation teaches nothing",
        (f"rollout.max_num_gen_batches={2 * batches}",) if filled else (),
        ("data.train: leave out prompts that the model always or never answers correctly", _READ),
        "problem" if filled else "warning",
    )
