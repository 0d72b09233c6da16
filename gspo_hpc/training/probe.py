"""The probe: a few sequences whose log-probs engine and trainer must agree on after every weight sync.

If they differ by more than the configured gap, the run stops: training on rollouts of other weights than one believes
is worse than stopping.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from gspo_hpc.config.schema import Config
from gspo_hpc.data.packing import Sample
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.ops.batch import build
from gspo_hpc.policy import offload
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.schedule import response_logprobs


class ProbeMismatch(RuntimeError):
    """Engine and trainer disagree on the log-probs of the probe."""


def probe_sequences(prompts: Sequence[Prompt], budget: int) -> list[list[int]]:
    """Return up to four token sequences of the prompts, together at most `budget` tokens, at least 2 each."""
    chosen = prompts[: max(1, min(4, budget // 2, len(prompts)))]
    each = max(2, budget // len(chosen))
    return [prompt.tokens[-each:].tolist() for prompt in chosen if len(prompt.tokens) >= 2]


def trainer_logprobs(
    policy: Policy, sequences: Sequence[Sequence[int]], monitor: PassMonitor | None = None
) -> list[np.ndarray]:
    """Return the log-probs of every token but the first of each sequence, [len - 1] each. Collective."""
    groups = {}
    samples = []
    for slot, tokens in enumerate(sequences):
        rest = np.asarray(tokens[1:], dtype=np.int32)
        completion = Completion(rest, np.zeros(len(rest), np.float32), "", "stop", 0)
        prompt = Prompt(slot, np.asarray(tokens[:1], dtype=np.int32), "", {})
        groups[slot] = Group(slot, prompt, (completion,))
        samples.append(Sample(slot, 0, 1, len(rest)))
    batch = build(groups, samples, share_prompts=False).to(policy.ranks.device)
    passed = response_logprobs(policy, [batch], temperature=1.0, name="probe", monitor=monitor)
    logprobs = passed.logprobs[0].cpu().numpy()
    ends = np.cumsum([sample.response_len for sample in samples])
    return np.split(logprobs, ends[:-1])


def check(
    policy: Policy,
    engine: Engine | None,
    sequences: Sequence[Sequence[int]],
    death: EngineDied | None,
    monitor: PassMonitor | None = None,
) -> tuple[float, float, EngineDied | None]:
    """Return the largest and the mean |difference| of the probe's log-probs, and how this rank's engine died, if so.

    The differences are over all engines. Offloads the trainer between its own pass and those of the engines, if that
    is configured. Raises ProbeMismatch, on every rank, if they are too large. Collective.
    """
    ours = trainer_logprobs(policy, sequences, monitor)
    offload.leave_to_engines(policy)
    theirs: list[np.ndarray] = []
    if engine is not None:
        try:
            engine.wake_up()  # the rest, for which there is room now
            theirs = engine.prompt_logprobs([list(tokens) for tokens in sequences])
        except EngineDied as error:
            death = error
    gap_max = gap_mean = 0.0
    if theirs:
        gaps = np.concatenate([np.abs(a - b) for a, b in zip(ours, theirs, strict=True)])
        gap_max, gap_mean = float(gaps.max()), float(gaps.mean())
        if not np.isfinite(gaps).all():
            gap_max = gap_mean = float("inf")
    if policy.ranks.world_size > 1:
        pair = torch.tensor([gap_max, gap_mean], dtype=torch.float64, device=policy.ranks.device)
        dist.all_reduce(pair, dist.ReduceOp.MAX)
        gap_max, gap_mean = pair.tolist()
    limit_max, limit_mean = probe_limits(policy.config)
    if gap_max > limit_max or gap_mean > limit_mean:
        raise ProbeMismatch(
            f"after the weight sync, engine and trainer disagree on the probe: max |log-prob difference| {gap_max:.2e} "
            f"(allowed {limit_max:g}), mean {gap_mean:.2e} (allowed {limit_mean:g}). The engine does not have the "
            "trainer's weights, or it computes in another precision (rollout.dtype, rollout.probe_max_gap)"
        )
    return gap_max, gap_mean, death


def probe_limits(config: Config) -> tuple[float, float]:
    """Return the allowed (max, mean) gap: as configured, else by precision."""
    full = (config.rollout.dtype or config.model.dtype) == "float32" and config.model.dtype == "float32"
    limit_max = config.rollout.probe_max_gap
    limit_mean = config.rollout.probe_mean_gap
    return (
        limit_max if limit_max is not None else (1e-3 if full else 0.5),
        limit_mean if limit_mean is not None else (1e-4 if full else 0.05),
    )
