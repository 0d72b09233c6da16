"""Ratios of sequences whose weights did not change, between passes that pack them differently.

GSPO clips a sequence's ratio at 1 - 3e-4 and 1 + 4e-4. Rounding alone moves it, because the same sample meets other
neighbours, other lengths and other kernels in the next pass; where that is near the clip range, updates clip noise.

Whether prompts are shared is one setting for all passes of a run, and in 16 bits the two ways differ by more than the
clip range. So they are compared with the same model in float32, and shared prompts may not be further from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gspo_hpc.algorithms.gspo import Gspo
from gspo_hpc.data.records import Floats
from gspo_hpc.policy.process_groups import drop_layout
from gspo_hpc.training import update

from .. import models
from ..environment import Environment
from ..rows import Recorder
from ..trainers import completions, config, make_policy

BEYOND = 0.01  # share of the sequences that noise alone may clip
OVER_OWN = 1.25  # the error of a pass with shared prompts, as a multiple of that with own prompts


def run(env: Environment, record: Recorder) -> None:
    """Compare packings in each precision, and both ways to treat prompts with float32."""
    (exact,) = _passes(env, "float32", [{"micro_batch_tokens": env.sizes.micro_batch // 2}])
    for dtype in dict.fromkeys(("bfloat16", env.sizes.dtype)):
        size = env.sizes.micro_batch
        packings = [{"micro_batch_tokens": size}, {"micro_batch_tokens": size}, {"micro_batch_tokens": size // 2}]
        first, again, smaller, own = _passes(env, dtype, [*packings, packings[2] | {"share_prompts": False}])
        for name, second in (("the same packing", again), ("half the micro-batch", smaller)):
            _ratios(record, f"{dtype}, {name}, {len(first)} sequences", first, second, dtype == "bfloat16")
        if dtype == "float32":
            _ratios(record, f"{dtype}, own prompts, {len(first)} sequences", first, own, gpu_only=False)
        else:
            _sharing(record, f"{dtype}, {len(first)} sequences", first - exact, own - exact)


def _passes(env: Environment, dtype: str, batches: list[dict[str, Any]]) -> list[Floats]:
    """Return the mean log-prob [sequences] of every completion in nats, for each of these sections `batch`."""
    model = models.dense(env)
    settings = [config(env, model, dtype, batch=batch) for batch in batches]
    policy = make_policy(model, settings[0])
    groups = completions(env, policy, env.sizes.noise)
    passed = [update.logprob_pass(policy, groups, "old_logprobs", one).logprobs for one in settings]
    del policy
    drop_layout()
    return [np.array([float(one[key].mean(dtype=np.float64)) for key in sorted(one)]) for one in passed]


def _ratios(record: Recorder, what: str, first: Floats, second: Floats, gpu_only: bool) -> None:
    """Judge how many sequences leave the clip range."""
    gaps = np.abs(np.exp(second - first) - 1.0)
    clip = float(Gspo.model_fields["clip_low"].default)
    beyond = float((gaps > clip).mean())
    record.check(
        f"{what}: beyond the clip range of {clip:g}",
        f"{100 * beyond:.2f}%",
        f"at most {100 * BEYOND:g}%",
        beyond <= BEYOND,
        gpu_only=gpu_only,
    )
    values = ", ".join(f"{np.log10(max(value, 1e-12)):.2f}" for value in np.quantile(gaps, [0.5, 0.99, 1.0]))
    record.figure(f"{what}: log10 |ratio - 1|, median, 99th percentile, largest", values)


def _sharing(record: Recorder, what: str, shared: Floats, own: Floats) -> None:
    """Judge the errors against float32, in nats per token, of shared prompts and of own ones."""
    of_shared, of_own = float(np.abs(shared).mean()), float(np.abs(own).mean())
    record.check(
        f"{what}: error of shared prompts and of own ones",
        f"{of_shared:.3g} and {of_own:.3g} nats a token",
        f"of shared ones at most {OVER_OWN:g} times that of own ones",
        of_shared <= OVER_OWN * of_own,
        gpu_only=True,
    )
    between = float(np.median(np.abs(np.expm1(shared - own))))
    record.figure(f"{what}: |ratio - 1| between shared and own prompts, median", f"{between:.3g}")
