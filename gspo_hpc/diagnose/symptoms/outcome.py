"""Symptoms of a run as a whole: it learnt nothing, or lost what it had learnt."""

from __future__ import annotations

from gspo_hpc.config.constants import LOST_TEACHER, NEAR_TEACHER
from gspo_hpc.config.derived import rewards_count
from gspo_hpc.diagnose.evidence import ENOUGH, Evidence, ends, mean, span
from gspo_hpc.diagnose.registry import Finding, symptom
from gspo_hpc.system.text import rounded


@symptom(
    "learnt_nothing",
    severity="problem",
    shows="a run that is over, or has made four steps, never had a gradient: rewards without variance, or no reward",
    change="the reward functions, the prompts",
)
def learnt_nothing(run: Evidence) -> Finding | None:
    """Find a run in which no step can have taught the model anything."""
    found = run.learning
    if found is None or not found.nothing or (run.state in ("running", "new") and len(run.records) < ENOUGH):
        return None
    if len(run.records) >= ENOUGH and not any(reward for _, reward in run.points("reward")):
        return None  # reward_always_zero says the same and more
    return Finding(
        (found.worry, found.numbers),
        "the reward function gives all completions of a group the same reward, or none",
        (),
        ("samples.jsonl: compare completions with their rewards", "reward.functions: python -m pytest test_reward.py"),
    )


@symptom(
    "lost_what_it_learnt",
    severity="warning",
    shows="accuracy on unseen prompts, or reward, is clearly below what it was before",
    change="`optimizer.lr`, `algorithm.kl_beta`, the reward functions; an earlier checkpoint",
)
def lost_what_it_learnt(run: Evidence) -> Finding | None:
    """Find a run that was better before than at its end."""
    found = run.learning
    if found is None or found.grade != "lost":
        return None
    return Finding(
        (found.worry, found.numbers),
        "the reward pays for something else than right answers, or updates are too large and the policy collapsed",
        (f"optimizer.lr={rounded(run.config.optimizer.lr / 10)}", "algorithm.kl_beta=0.001"),
        ("samples.jsonl: see what earns the reward", "gspo-hpc export RUN --step N --out DIR: an earlier checkpoint"),
    )


@symptom(
    "away_from_teacher",
    severity="warning",
    shows="the divergence from `algorithm.teacher` did not fall between the first and the newest steps",
    change="`algorithm.kl_beta`, `optimizer.lr`; the prompts, and how they are written for the teacher",
)
def away_from_teacher(run: Evidence) -> Finding | None:
    """Find a policy that came no nearer to the teacher that it distils from."""
    settings = run.config.algorithm
    parts = ends(run.points("reference_kl")) if settings.has_teacher else None
    if parts is None:
        return None
    before, after = mean(parts[0]), mean(parts[1])
    if after < max(before, NEAR_TEACHER):
        return None
    mixed = rewards_count(run.config)
    slower = f"optimizer.lr={rounded(run.config.optimizer.lr / 3)}"
    return Finding(
        (
            f"the divergence from the teacher {settings.teacher} was {rounded(before)} nats a token in "
            f"{span(parts[0])} and is {rounded(after)} in {span(parts[1])}",
        ),
        f"rewards pull the policy away from its teacher, which has the weight {settings.kl_beta:g} beside them"
        if mixed
        else "updates are too large, or the teacher does not know these prompts as they are written for it",
        (f"algorithm.kl_beta={rounded(3 * settings.kl_beta)}", slower) if mixed else (slower,),
        ("samples.jsonl: read whether the teacher would have answered in this way",),
        "problem" if after > LOST_TEACHER * before and not mixed else "warning",
    )
