"""Ratios of sequences whose weights did not change, between passes that pack them differently.

GSPO clips a sequence's ratio at 1 - 3e-4 and 1 + 4e-4. Rounding alone moves it, because the same sample meets other
neighbours, other lengths and other kernels in the next pass; where that is near the clip range, updates clip noise.
"""

from __future__ import annotations

import numpy as np

from gspo_hpc.algorithms.gspo import Gspo
from gspo_hpc.policy.process_groups import drop_layout
from gspo_hpc.training import update

from .. import models
from ..environment import Environment
from ..rows import Recorder
from ..trainers import completions, config, make_policy

BEYOND = 0.01  # share of the sequences that noise alone may clip


def run(env: Environment, record: Recorder) -> None:
    """Compare a pass with shared prompts with ones of half the micro-batch and without sharing."""
    for dtype in dict.fromkeys(("bfloat16", env.sizes.dtype)):
        _compare(env, record, dtype)
        drop_layout()


def _compare(env: Environment, record: Recorder, dtype: str) -> None:
    sizes, model = env.sizes, models.dense(env)
    settings = config(env, model, dtype)
    policy = make_policy(model, settings)
    groups = completions(env, policy, sizes.noise)
    first = update.logprob_pass(policy, groups, "old_logprobs", settings).logprobs
    smaller = {**settings.batch.model_dump(exclude_none=True), "micro_batch_tokens": sizes.micro_batch // 2}
    for name, batch in (
        ("the same packing", settings.batch.model_dump(exclude_none=True)),
        ("half the micro-batch", smaller),
        ("own prompts", smaller | {"share_prompts": False}),
    ):
        other = config(env, model, dtype, batch=batch)
        second = update.logprob_pass(policy, groups, "old_logprobs", other).logprobs
        ratios = np.array([np.exp(float((second[key] - first[key]).mean(dtype=np.float64))) for key in first])
        _judge(record, f"{dtype}, {name}, {len(ratios)} sequences", np.abs(ratios - 1.0), dtype == "bfloat16")


def _judge(record: Recorder, what: str, gaps: np.ndarray, gpu_only: bool) -> None:
    clip = float(Gspo.model_fields["clip_low"].default)
    beyond = float((gaps > clip).mean())
    figure = f"{100 * beyond:.2f}%"
    record.check(
        f"{what}: beyond the clip range of {clip:g}",
        figure,
        f"at most {100 * BEYOND:g}%",
        beyond <= BEYOND,
        gpu_only=gpu_only,
    )
    values = ", ".join(f"{np.log10(max(value, 1e-12)):.2f}" for value in np.quantile(gaps, [0.5, 0.99, 1.0]))
    record.figure(f"{what}: log10 |ratio - 1|, median, 99th percentile, largest", values)
