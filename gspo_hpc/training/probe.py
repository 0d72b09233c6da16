"""The probe: a few sequences whose log-probs engine and trainer must agree on after every weight sync.

If they differ by more than the configured gap, the run stops, and says why if it can tell: training on rollouts of
other weights than one believes is worse than stopping. What is left in a prefix cache is asked for as well, because the
probe itself is computed and not read from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gspo_hpc.config.constants import PROBE_PROMPTS
from gspo_hpc.config.derived import GapLimits, gap_limits
from gspo_hpc.data.records import Floats, Prompt
from gspo_hpc.engine.engine import Engine, EngineDied
from gspo_hpc.engine.settings import has_exact_head
from gspo_hpc.ops import expert_sums
from gspo_hpc.ops.constants import Constants
from gspo_hpc.policy import offload
from gspo_hpc.policy.passes import PassMonitor
from gspo_hpc.policy.policy import Policy
from gspo_hpc.policy.process_groups import Ranks
from gspo_hpc.training.agreement import experts as experts_of
from gspo_hpc.training.agreement.causes import TOP, rounding_step
from gspo_hpc.training.agreement.constants import differing
from gspo_hpc.training.agreement.explain import explain
from gspo_hpc.training.agreement.gap import Gap, excess, measure
from gspo_hpc.training.agreement.scoring import Sequences, rounding_gap, score


class ProbeMismatch(RuntimeError):
    """Engine and trainer disagree on the log-probs of the probe."""


@dataclass(frozen=True)
class Trainer:
    """Answers of the trainer on the probe, alike on all ranks."""

    logprobs: Sequence[Floats]  # [len - 1] of each sequence
    rounding: Gap | None = None  # that rounding alone makes; None where limits take no account of it
    experts: Floats | None = None  # sums of its experts' weights [layers, experts, 4]; see gspo_hpc.ops.expert_sums
    constants: Constants | None = None  # None where they are not known

    def values(self) -> dict[str, Any]:
        """Return it as plain values, for ranks that have no trainer."""
        return {
            "logprobs": [one.tolist() for one in self.logprobs],
            "rounding": None if self.rounding is None else asdict(self.rounding),
            "experts": None if self.experts is None else [len(self.experts), expert_sums.to_text(self.experts)],
            "constants": None if self.constants is None else self.constants.values(),
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Trainer:
        """Return what :meth:`values` gave."""
        rounding, experts, constants = values["rounding"], values["experts"], values["constants"]
        return cls(
            [np.asarray(one, dtype=np.float32) for one in values["logprobs"]],
            None if rounding is None else Gap(**rounding),
            None if experts is None else expert_sums.from_text(experts[1], experts[0]),
            None if constants is None else Constants.from_values(constants),
        )


def probe_sequences(prompts: Sequence[Prompt], budget: int) -> list[list[int]]:
    """Return up to four token sequences of the prompts, together at most `budget` tokens, at least 2 each."""
    chosen = prompts[: max(1, min(PROBE_PROMPTS, budget // 2, len(prompts)))]
    each = max(2, budget // len(chosen))
    return [prompt.tokens[-each:].tolist() for prompt in chosen if len(prompt.tokens) >= 2]


def check(
    policy: Policy,
    engine: Engine | None,
    sequences: Sequences,
    death: EngineDied | None,
    monitor: PassMonitor | None = None,
    first: Gap | None = None,
    *,
    examine_head: bool = True,
) -> tuple[Gap, EngineDied | None]:
    """Return the gap of the probe's log-probs, the largest of all engines, and how this rank's engine died, if so.

    Offloads the trainer between its own pass and those of the engines, if that is configured. `first` is the gap of the
    run's first sync. In 16 bits the engine's head is examined on request. Raises ProbeMismatch, on every rank, if the
    gap is too large, if an engine has other experts or other constants than the trainer, if a prefix cache is not
    empty, or if an engine rounds its logits that is to have an fp32 head. Collective.
    """
    ours = score(policy, sequences, monitor).logprobs
    trainer = Trainer(ours, rounding_gap(policy, sequences, ours, monitor), policy.expert_sums(), policy.constants())
    offload.leave_to_engines(policy)

    def cause(engine: Engine | None, theirs: list[Floats]) -> str:
        return explain(policy, engine, sequences, ours, theirs, monitor)

    limits = gap_limits(policy.config)
    return compare(engine, sequences, trainer, policy.ranks, limits, death, first, cause, examine_head=examine_head)


def compare(
    engine: Engine | None,
    sequences: Sequences,
    trainer: Trainer,
    ranks: Ranks,
    limits: GapLimits,
    death: EngineDied | None,
    first: Gap | None,
    cause: Callable[[Engine | None, list[Floats]], str],
    *,
    examine_head: bool = True,
) -> tuple[Gap, EngineDied | None]:
    """Compare what the trainer computes with what the engines of all ranks do, as :func:`check` says. Collective.

    `cause` returns why an engine's log-probs differ, for the error; every rank calls it, with None if it has no engine.
    """
    ours, experts = trainer.logprobs, trainer.experts
    theirs: list[Floats] = []
    cached, logit_step, unwanted, misplaced, differs = 0, 0.0, False, "", ""
    if engine is not None:
        try:
            engine.wake_up()  # the rest, for which there is room now
            cached = engine.cached_tokens(canary(sequences, engine.settings.max_model_len))
            if trainer.constants is not None:
                differs = differing(trainer.constants, engine.constants(), engine.settings.max_model_len)
            if experts is not None and (held := engine.expert_sums(*experts.shape[:2])) is not None:
                misplaced = experts_of.misplaced(experts, held)
            theirs = engine.prompt_logprobs(sequences)
            if examine_head and limits.weighted:
                logit_step = rounding_step(np.concatenate(engine.top_logprobs(sequences, TOP))) or 0.0
                unwanted = logit_step > 0.0 and has_exact_head(engine.settings)
        except EngineDied as error:
            death, theirs = error, []
    gap = replace(measure(ours, theirs), logit_step=logit_step) if theirs else Gap()
    if ranks.world_size > 1:
        found = torch.tensor([*gap.values(), cached, unwanted], dtype=torch.float64, device=ranks.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        *values, cached, unwanted = found.tolist()
        gap = Gap(*values)
    if cached:
        raise ProbeMismatch(
            f"stale prefix cache: after the weight sync an engine still took {cached:.0f} tokens of the probe from its "
            "cache, which holds keys and values of older weights. vLLM did not reset it; set rollout.engine."
            "enable_prefix_caching=false, or change vLLM's version"
        )
    misplaced, differs = _told_by_any(ranks, [misplaced, differs])
    if differs:
        raise ProbeMismatch(
            f"an engine computes with other constants than the trainer: {differs}. Both read the model's config.json: "
            "look at rollout.engine.hf_overrides, and at what vLLM's version makes of that file"
        )
    if (wrong := excess(gap, limits, first, trainer.rounding)) is not None:
        why = cause(engine if death is None else None, theirs) + (misplaced and f"; {misplaced}")
        raise ProbeMismatch(
            f"after the weight sync, engine and trainer disagree on the probe: {wrong}. Likely cause: {why}. If the "
            "gap is known to be rounding, raise rollout.probe_max_gap and rollout.probe_mean_gap"
        )
    if misplaced:
        raise ProbeMismatch(
            f"after the weight sync an engine has other experts than the trainer: {misplaced}. Report it, please, with "
            "the layout and vLLM's version: weights were put into the wrong place"
        )
    if unwanted:
        raise ProbeMismatch(
            f"an engine rounds its logits to 16 bits: they are multiples of {gap.logit_step:g}, although it is to "
            "compute them in float32. Change vLLM's version, or accept rounded logits with "
            "rollout.engine.hf_overrides.head_dtype=model"
        )
    return gap, death


def _told_by_any(ranks: Ranks, mine: list[str]) -> list[str]:
    """Return for each of these texts that of a rank where it is not empty, the same on all ranks. Collective."""

    def first(parts: Sequence[bytes]) -> bytes:
        several = zip(*map(json.loads, parts), strict=True)
        return json.dumps([next(filter(None, texts), "") for texts in several]).encode()

    found: list[str] = json.loads(ranks.exchange.transport.tree_all_reduce(json.dumps(mine).encode(), first))
    return found


def canary(sequences: Sequences, longest: int) -> list[int]:
    """Return all tokens of the probe in one sequence, which fills blocks of the prefix cache.

    Each sync asks for it once. It must never be found there, for the sync before was followed by a reset.
    """
    return [int(token) for tokens in sequences for token in tokens][: longest - 1]
