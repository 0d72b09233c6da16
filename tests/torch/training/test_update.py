"""The number that a global batch is divided by: what `step` hands on to Megatron's optimizer step."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gspo_hpc.algorithms import objective
from gspo_hpc.config.loader import from_dict
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.table import EXCLUDED
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.policy.schedule import StepResult
from gspo_hpc.training import update

LONGEST = {"max_response_length": 50}


def completion(length: int, **more: Any) -> Completion:
    tokens = np.arange(length, dtype=np.int32)
    return Completion(tokens, np.full(length, -1.0, np.float32), "", "stop", 0, **more)


GROUPS = Exchange().gather_table(
    Group(
        slot,
        Prompt(slot, np.arange(4, dtype=np.int32), "", {}),
        (
            completion(3, advantage=1.0),
            completion(5, advantage=-1.0),
            completion(7, advantage=0.0),  # not computed, and it counts
            completion(11, excluded=True),  # does not count
        ),
    )
    for slot in range(2)
)


@pytest.mark.parametrize(
    ("aggregation", "denominator"),
    [("token", 2 * (3 + 5 + 7)), ("sequence", 2 * 3), ("prompt", 2), ("fixed_length", 2 * 3 * 50)],
)
def test_the_mean_is_over_the_tokens_or_the_sequences_that_count(
    aggregation: Any, denominator: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The denominator counts the whole global batch, also completions without a gradient, but not excluded ones."""
    algorithm = {"name": "grpo", "aggregation": aggregation}
    config = from_dict({"algorithm": algorithm, "batch": {"micro_batch_tokens": 96}, "rollout": LONGEST})
    policy: Any = SimpleNamespace(
        ranks=SimpleNamespace(dp_size=1, dp_rank=0, pp_size=1, device=torch.device("cpu"), exchange=Exchange()),
        chunks=[None],
        config=config,
    )
    handed: list[float] = []
    prompts: list[int] = []

    def train_step(policy: Any, batches: Any, objective: Any, denominator: float, *more: Any, **rest: Any) -> Any:
        handed.append(denominator)
        prompts.extend(n for batch in batches if batch.prompt_tokens is not None for n in batch.prompt_tokens.tolist())
        return StepResult({}, {}, {}, 0.0, False, False, 0.0)

    monkeypatch.setattr(update, "train_step", train_step)
    chosen = replace(objective.resolve(config.algorithm), kl_beta=0.0)
    assert chosen.aggregation == aggregation
    assert update.step(policy, GROUPS, chosen, config) is not None
    assert handed == [float(denominator)]
    assert prompts == ([3 + 5 + 7] * 4 if aggregation == "prompt" else [])  # of both samples with an advantage, twice


@pytest.mark.parametrize(("truncated", "count", "tokens"), [("train", 4, 26), ("mask", 2, 8), ("exclude", 2, 8)])
def test_completions_that_were_cut_off_leave_the_loss(truncated: str, count: int, tokens: int) -> None:
    """A cut completion that stays in the denominator, or a setting that does nothing, is caught here."""
    config = from_dict({"rollout": {"truncated": truncated}})
    made = [replace(completion(n, reward=float(n)), finish_reason=cut) for n, cut in CUT]
    group = Group(0, Prompt(0, np.arange(4, dtype=np.int32), "", {}), tuple(made))
    (graded,) = update.with_advantages(update.without_truncated([group], config), True)
    table = Exchange().gather_table([graded]).table
    counted = update.in_loss(table, config)
    assert (counted.sum(), table.rows["response_len"][counted].sum()) == (count, tokens)
    rewards = [3.0, 5.0] if truncated == "exclude" else [3.0, 7.0, 5.0, 11.0]  # the mask leaves statistics alone
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    assert [c.advantage for c in graded.completions][::2] == pytest.approx(
        [(3.0 - mean) / deviation, (5.0 - mean) / deviation], rel=1e-6
    )
    cut = [c.advantage for c in graded.completions][1::2]
    assert (cut == [0.0, 0.0]) == (truncated == "exclude")


CUT = ((3, "stop"), (7, "length"), (5, "stop"), (11, "length"))  # tokens, and why the completion ended


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_divergence_in_the_reward_is_that_of_the_whole_completion(estimator: str) -> None:
    """Advantages are of lowered rewards; rewards, and what is excluded, stay."""
    keys = {"name": "rloo", "kl_beta": 0.5, "kl_placement": "reward", "kl_estimator": estimator}
    chosen = objective.resolve(from_dict({"algorithm": keys}).algorithm)
    assert chosen.loss_kl_beta == 0.0
    rng = np.random.default_rng(0)
    (group, _) = GROUPS.own.values()
    made = group.with_completions(
        tuple(
            replace(c, reward=float(i), reference_logprobs=rng.normal(-1, 0.5, len(c.tokens)).astype(np.float32))
            for i, c in enumerate(group.completions)
        )
    )
    given = Exchange().gather_table([made])
    found = update.with_penalised_advantages(given, chosen, Exchange())
    lowered = []
    for i, c in enumerate(made.completions[:3]):
        assert c.reference_logprobs is not None
        x = [float(r) - float(p) for r, p in zip(c.reference_logprobs, c.logprobs, strict=True)]
        lowered.append(i - 0.5 * sum(-v if estimator == "k1" else math.exp(v) - 1 - v for v in x))
    wanted = [1.5 * (r - sum(lowered) / 3) for r in lowered]
    (own,) = found.own.values()
    assert [c.advantage for c in own.completions] == pytest.approx([*wanted, 0.0], rel=1e-5)
    assert found.table.rows["advantage"].tolist() == [c.advantage for c in own.completions]
    assert [c.reward for c in own.completions] == found.table.rows["reward"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_with_a_divergence_in_the_reward_the_deviation_is_that_of_lowered_rewards() -> None:
    """Of the whole rollout. A completion without a token, of which no pass has log-probs, keeps its reward."""
    keys = {"name": "grpo", "advantage": "batch_std", "kl_beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}
    chosen = objective.resolve(from_dict({"algorithm": keys}).algorithm)
    rewards = [[1.0, 0.0], [0.0, 4.0]]
    divergences = [[0.5, 0.0], [2.0, 1.0]]  # a token
    made = []
    for slot, (row, moved) in enumerate(zip(rewards, divergences, strict=True)):
        completions = [
            completion(3 if away else 0, reward=reward, reference_logprobs=np.full(3, -1.0 - away, np.float32))
            if away
            else completion(0, reward=reward)
            for reward, away in zip(row, moved, strict=True)
        ]
        made.append(Group(slot, Prompt(slot, np.arange(4, dtype=np.int32), "", {}), tuple(completions)))
    found = update.with_penalised_advantages(Exchange().gather_table(made), chosen, Exchange())
    lowered = [[r - 0.1 * 3 * d for r, d in zip(*both, strict=True)] for both in zip(rewards, divergences, strict=True)]
    scale = statistics.stdev(r for row in lowered for r in row)
    wanted = [(r - statistics.fmean(row)) / scale for row in lowered for r in row]
    assert found.table.rows["advantage"] == pytest.approx(wanted, rel=1e-5)


def test_a_deviation_of_the_rollout_is_in_the_table_and_in_the_groups() -> None:
    """Whoever holds a group: the scale follows from the table of all of them."""
    rewards = [[1.0, 0.0, 0.0, 7.0], [4.0, 0.0, 2.0, 0.0]]
    made = [
        group.with_completions(tuple(replace(c, reward=r) for c, r in zip(group.completions, row, strict=True)))
        for group, row in zip(GROUPS.own.values(), rewards, strict=True)
    ]
    centred = Exchange().gather_table(update.with_advantages(made, False, "reinforce_baseline"))
    found = update.with_batch_advantages(centred, "reinforce_baseline")
    alive = [2 / 3, -1 / 3, -1 / 3, 2.0, -2.0, 0.0]
    wanted = [x / statistics.stdev(alive) for x in alive]
    kept = ~found.table.flagged(EXCLUDED)
    assert found.table.rows["advantage"][kept] == pytest.approx(wanted, rel=1e-6)
    own = [c.advantage for group in found.own.values() for c in group.completions]
    assert own == found.table.rows["advantage"].tolist()
    assert update.with_batch_advantages(centred, "group") is centred


def test_each_reward_function_is_normalised_by_itself_then_by_the_rollout() -> None:
    """Names and weights are those of the config: a mistaken name, or a weight that is taken twice, is caught here."""
    parts = [[(1.0, 10.0), (0.0, 30.0), (0.0, 20.0), (9.0, 90.0)], [(1.0, 5.0), (1.0, 5.0), (0.0, 5.0), (9.0, 90.0)]]
    made = [
        group.with_completions(
            tuple(replace(c, reward_parts={"a": a, "b": b}) for c, (a, b) in zip(group.completions, row, strict=True))
        )
        for group, row in zip(GROUPS.own.values(), parts, strict=True)
    ]
    centred = Exchange().gather_table(update.with_advantages(made, False, "gdpo", {"b": 0.5, "a": 2.0}))
    found = update.with_batch_advantages(centred, "gdpo")
    third = math.sqrt(1 / 3)  # the deviation of 1, 0, 0
    first = [2 * (2 / 3) / third - 0.5, 2 * (-1 / 3) / third + 0.5, 2 * (-1 / 3) / third]
    second = [2 * (1 / 3) / third, 2 * (1 / 3) / third, 2 * (-2 / 3) / third]  # b is equal there
    scale = statistics.stdev([*first, *second])
    kept = ~found.table.flagged(EXCLUDED)
    assert found.table.rows["advantage"][kept] == pytest.approx([x / scale for x in (*first, *second)], rel=1e-6)


def rewarded(slot: int, rewards: list[float], parts: list[float], **more: Any) -> Group:
    """A group whose second reward function gave `parts`."""
    completions = tuple(
        replace(completion(2, reward=reward, reward_parts={"length": reward - part, "match": part}), **more)
        for reward, part in zip(rewards, parts, strict=True)
    )
    return Group(slot, Prompt(slot, np.zeros(1, np.int32), "", {}), completions)


def test_a_group_has_signal_if_it_has_an_advantage_or_if_the_named_reward_differs() -> None:
    groups = [
        rewarded(0, [1.0, 1.0, 1.0], [1, 1, 1]),
        rewarded(2, [1.0, 0.5, 0.8], [1, 1, 1]),  # right answers of different length
        rewarded(3, [1.0, 0.0, 0.0], [1, 0, 0]),
        rewarded(9, [1.0, 0.0, 0.0], [1, 0, 0], excluded=True),
        rewarded(10, [1.0, 0.0, 0.0], [1, 0, 0], finish_reason="length"),
    ]
    table = Exchange().gather_table(update.with_advantages(groups, normalize=True)).table

    def found(**rollout: Any) -> dict[int, bool]:
        return update.signals(table, from_dict({"rollout": rollout}))

    assert found() == {0: False, 2: True, 3: True, 9: False, 10: True}
    assert found(truncated="mask")[10] is False, "nothing of it would be in the loss"
    assert found(dynamic_sampling_metric="match") == {0: False, 2: False, 3: True, 9: False, 10: True}
    assert not any(found(dynamic_sampling_metric="another").values())
