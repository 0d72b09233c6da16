"""Symptoms of an engine that does not compute what the trainer computes, told apart by what the run says is the cause.

What ended the last attempt is a problem; what the run recovered from is a warning.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gspo_hpc.diagnose.evidence import Evidence
from gspo_hpc.diagnose.excerpts import failure_matching, quoted, severity_of
from gspo_hpc.diagnose.patterns import MISMATCH
from gspo_hpc.diagnose.registry import Finding, symptom


class _Cause(NamedTuple):
    """A cause that the error names."""

    name: str
    pattern: str  # of the error
    text: str
    settings: tuple[str, ...]
    look: str


_CAUSES = (
    _Cause(
        "stale_prefix_cache",
        "stale prefix cache",
        "the engine reads keys and values of older weights from its prefix cache",
        ("rollout.engine.enable_prefix_caching=false",),
        "the engine's log: vLLM says there why it did not reset its prefix cache",
    ),
    _Cause(
        "swapped_experts",
        r"go to experts? [\d and]+ of layer|other experts than the trainer|; expert \d+ of layer \d+ has those",
        "single experts of the engine are swapped or have older weights",
        (),
        "the order of experts in the checkpoint and in the weight map of its family (gspo_hpc/ops/weight_map.py)",
    ),
    _Cause(
        "wrong_rope",
        "wrong rotary embeddings",
        "engine and trainer rotate queries and keys by different angles",
        (),
        "rope_theta, rope_scaling and rope_parameters in the model's config.json, and the engine's hf_overrides",
    ),
    _Cause(
        "other_constants",
        "other constants than the trainer",
        "the engine computes by other settings of the model than the trainer, beside its weights",
        (),
        "the model's config.json, the engine's hf_overrides, and what vLLM's version makes of the file",
    ),
    _Cause(
        "unwanted_rounding",
        r"rounds its logits to 16 bits: [^,]*, although",
        "the engine rounds its logits to 16 bits, although it is told to compute them in fp32",
        ("rollout.engine.hf_overrides.head_dtype=model",),
        "the engine's log: vLLM says there if it replaces head_dtype; another version of it may not",
    ),
    _Cause(
        "rounded_logits",
        "rounds its logits to 16 bits",
        "the engine rounds its logits to 16 bits, and the trainer does not",
        ("rollout.engine.hf_overrides.head_dtype=float32",),
        "the engine's log: vLLM says there if it replaces head_dtype",
    ),
)
_OTHER = _Cause(
    "weight_sync_mismatch",
    "",
    "the engine does not compute what the trainer computes: it uses another precision, or weights did not arrive",
    ("rollout.dtype=float32", "model.dtype=float32"),
    "rollout.probe_max_gap and rollout.probe_mean_gap: raise them only if you know that the gap is rounding",
)


@symptom(
    "weight_sync_mismatch",
    *(cause.name for cause in _CAUSES),
    severity="problem",
    shows="engine and trainer disagreed, on the probe after a weight sync or on the tokens of a rollout; and the cause",
    change="`rollout.dtype`, `model.dtype`, `rollout.engine`",
    explains_failure=True,
)
def mismatch(run: Evidence) -> Finding | None:
    """Find an attempt that ended because engine and trainer disagreed, and name the cause that its error gives.

    Rounded logits are a warning where the run goes on.
    """
    hit = failure_matching(run, MISMATCH)
    if hit is None:
        return _rounded(run)
    attempt, excerpt = hit
    cause = next((one for one in _CAUSES if re.search(one.pattern, excerpt.text)), _OTHER)
    return Finding(
        (f"attempt {attempt.number}: {quoted(excerpt)}",),
        cause.text,
        cause.settings,
        (excerpt.before, cause.look),
        severity_of(run, attempt),
        cause.name,
    )


def _rounded(run: Evidence) -> Finding | None:
    """Find an engine whose logits the first probe of an attempt saw on a grid."""
    steps = run.points("probe_logit_step")
    if not steps:
        return None
    cause = next(one for one in _CAUSES if one.name == "rounded_logits")
    step, size = steps[-1]
    shown = f"step {step}: the engine's logits were multiples of {size:g} (`probe_logit_step`)"
    return Finding((shown,), cause.text, cause.settings, (cause.look,), "warning", cause.name)
