"""The section eval, and evaluation sets: when unseen prompts are asked, how often, and how answers are sampled."""

from __future__ import annotations

from gspo_hpc.config.section import Count, Section, Share, Temperature, TopK, key
from gspo_hpc.config.sections.rows import Rows


class EvalSet(Rows):
    """One of several sets of evaluation prompts: files, graders, system prompt, and how its answers are sampled."""

    max_prompts: Count | None = key(None, "Number of its prompts that are evaluated; the default is eval.max_prompts.")
    samples: Count | None = key(None, "Sampled completions of each of its prompts; the default is eval.samples.")
    temperature: Temperature | None = key(
        None, "The sampling temperature of its samples; the default is eval.temperature."
    )
    top_p: Share | None = key(None, "The top_p of its samples; the default is eval.top_p.")
    top_k: TopK | None = key(None, "The top_k of its samples; the default is eval.top_k.")
    max_tokens: Count | None = key(
        None, "Tokens of its longest answer, also of the greedy ones; the default is eval.max_tokens."
    )


class Eval(Section):
    """Greedy accuracy on unseen prompts, before, after and in between; `samples` > 1 adds avg@k, pass@k and maj@k."""

    interval: Count | None = key(None, "Optimizer steps between evaluations.")
    before: bool = key(True, "Evaluate before the first step.")
    after: bool = key(True, "Evaluate after the last step.")
    max_prompts: Count | None = key(
        None, "Number of prompts that are evaluated, of each set and of all others; the default is all."
    )
    samples: Count = key(1, "Sampled completions per prompt, for avg@k, pass@k and maj@k.")
    temperature: Temperature = key(1.0, "The sampling temperature of those samples.")
    top_p: Share = key(1.0, "Those samples are of the most likely tokens whose probabilities add up to this.")
    top_k: TopK = key(-1, "Those samples are of this many of the most likely tokens; -1 samples from all.")
    max_tokens: Count | None = key(
        None,
        "Tokens of the longest answer, also of the greedy ones; the default is rollout.max_response_length, above "
        "which engines have no room.",
    )
    reward: str | None = key(
        None, "The reward function that decides whether an answer is right; the default is the first one."
    )
