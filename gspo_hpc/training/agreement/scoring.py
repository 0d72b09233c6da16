"""The trainer's log-probs of a few sequences, and the experts that their tokens go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_hpc.config.derived import engine_dtype, gap_limits
from gspo_hpc.data.packing import Sample
from gspo_hpc.data.records import Completion, Experts, Floats, Group, Prompt
from gspo_hpc.ops.batch import build, split_experts
from gspo_hpc.policy import rounding
from gspo_hpc.policy.model import DTYPES
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.schedule import response_logprobs
from gspo_hpc.training.agreement.gap import Gap, measure

Sequences = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Scores:
    """Log-probs of every token but the first of each sequence, [len - 1] each, and experts [len - 1, layers, top_k]."""

    logprobs: list[Floats]
    experts: list[Experts]  # of every token but the last; empty unless they were recorded


def rounding_gap(
    policy: Policy, sequences: Sequences, ours: Sequence[Floats], monitor: PassMonitor | None
) -> Gap | None:
    """Return the gap between `ours`, the trainer's log-probs, and its own under noise of the size of rounding.

    None where limits do not take account of it: in float32, and where the config gives the limits. Collective.
    """
    config = policy.config
    given = config.rollout.probe_max_gap is not None or config.rollout.probe_mean_gap is not None
    if given or not gap_limits(config).weighted:
        return None
    dtypes = DTYPES[config.model.dtype], DTYPES[engine_dtype(config)]
    with rounding.shaken(policy.chunks, rounding.size(dtypes, mixture=policy.arch.experts is not None)):
        return measure(ours, score(policy, sequences, monitor).logprobs)


def score(
    policy: Policy, sequences: Sequences, monitor: PassMonitor | None = None, *, record_experts: bool = False
) -> Scores:
    """Return the scores of these sequences under the trainer's weights. Collective."""
    groups = {}
    samples = []
    for slot, tokens in enumerate(sequences):
        rest = np.asarray(tokens[1:], dtype=np.int32)
        completion = Completion(rest, np.zeros(len(rest), np.float32), "", "stop", 0)
        prompt = Prompt(slot, np.asarray(tokens[:1], dtype=np.int32), "", {})
        groups[slot] = Group(slot, prompt, (completion,))
        samples.append(Sample(slot, 0, 1, len(rest)))
    batch = build(groups, samples, share_prompts=False).to(policy.ranks.device)
    passed = response_logprobs(
        policy, [batch], temperature=1.0, name="probe", record_experts=record_experts, monitor=monitor
    )
    logprobs = passed.logprobs[0].cpu().numpy()
    ends = np.cumsum([sample.response_len for sample in samples])
    experts: list[Experts] = []
    if record_experts:
        chosen = split_experts(passed.experts[0], batch)
        experts = [np.concatenate((chosen[slot, -1], chosen[slot, 0])) for slot in groups]
    return Scores(np.split(logprobs, ends[:-1]), experts)
