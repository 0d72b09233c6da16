"""Accuracy on unseen prompts: greedy, and avg@k and pass@k over sampled completions.

Floor 4. The same engines, the same graders as training; a completion counts as right when the chosen grader gives it
more than half of a full mark.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo_hpc.config import Config
from gspo_hpc.engine import Sampling
from gspo_hpc.records import Completion, Group, Prompt
from gspo_hpc.rollout import Station, generate
from gspo_hpc.scores import avg_at_k, pass_at_k

EVAL_ROLLOUT = -1  # seeds of evaluation samples are those of no training rollout


def run(station: Station, prompts: Sequence[Prompt], config: Config) -> tuple[dict[str, float], list[Group]]:
    """Scores by name, and the greedy groups. Collective."""
    chosen = dict(enumerate(prompts))
    length = config.rollout.max_response_length
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=length)
    groups = generate(station, chosen, 1, greedy, EVAL_ROLLOUT)
    right = [is_right(group.completions[0], config) for group in groups]
    lengths = [len(group.completions[0].tokens) for group in groups]
    scores = {"eval/accuracy": sum(right) / len(right), "eval/response_length": sum(lengths) / len(lengths)}
    k = config.eval.samples
    if k > 1:
        sampled = Sampling(temperature=config.eval.temperature, top_p=1.0, top_k=-1, max_tokens=length)
        sampled_groups = generate(station, chosen, k, sampled, EVAL_ROLLOUT)
        table = [[is_right(completion, config) for completion in group.completions] for group in sampled_groups]
        scores[f"eval/avg@{k}"] = avg_at_k(table)
        scores[f"eval/pass@{k}"] = pass_at_k(table, k)
    return scores, groups


def is_right(completion: Completion, config: Config) -> bool:
    """Whether the grader of `eval.reward` (default: the first) gives more than half a mark."""
    name = config.eval.reward or config.reward.functions[0].function
    return completion.failure is None and completion.reward_parts.get(name, 0.0) > 0.5
