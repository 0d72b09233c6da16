"""Convert what TRL adds to the loss: a bonus for entropy, and the balance of experts."""

from __future__ import annotations

import re
from pathlib import PurePath

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers import report
from gspo_hpc.importers.draft import Draft

# Names of models with experts: Qwen3-30B-A3B, Mixtral-8x7B, gpt-oss-20b.
_MIXTURE = re.compile(r"(?i)-a\d+(\.\d+)?b|mixtral|moe|gpt-oss|deepseek-v[234]")


def put(draft: Draft) -> None:
    """Put the bonus, and say what TRL adds besides."""
    _entropy(draft)
    _balancing(draft)
    parts.router(draft, "model_name_or_path")


def unbiased(draft: Draft, level: str) -> None:
    """Put the estimator of the divergence that TRL weighs by the ratio; `level`: of that."""
    name = "use_bias_correction_kl"
    if not draft.switch(name):
        if draft.given(name):
            draft.drop(name, report.OFF)
    elif not draft.number("beta", 0.0):
        draft.drop(name, "it is read with a beta above 0 only")
    elif level == "token":
        draft.put("algorithm.kl_estimator", "unbiased", name)
    else:
        draft.drop(name, "the weight of the KL term is the ratio of its sequence there, and that of its token here")


def _entropy(draft: Draft) -> None:
    """Put the entropy bonus, and what its weight follows."""
    if bonus := draft.number("entropy_coef", 0.0):
        text = "the bonus is a mean over all tokens there, and over what aggregation says here"
        draft.put("algorithm.entropy_coef", bonus, "entropy_coef", text)
    elif draft.given("entropy_coef"):
        draft.drop("entropy_coef", report.OFF)
    if draft.switch("use_adaptive_entropy"):
        text = "above the target, and in the first update, the bonus is off there; here its weight falls step by step"
        draft.put("algorithm.entropy_target", draft.number("entropy_target", 0.2), "entropy_target", text)
        draft.credit("algorithm.entropy_target", "use_adaptive_entropy")
    elif draft.given("entropy_target"):
        draft.drop("entropy_target", "it is read with use_adaptive_entropy only")


def _balancing(draft: Draft) -> None:
    """Say that the experts of a mixture are balanced there by default."""
    name, text = "router_aux_loss_coef", "it balances experts over all layers together, and moe.aux_loss_coeff in each"
    weight = draft.number(name, 0.001)
    if weight and draft.given(name):
        draft.drop(name, text)
    elif weight and _MIXTURE.search(PurePath(draft.text("model_name_or_path") or "").name):
        draft.assumed.append(f"{name} is {weight:g} where it is not given (0 up to 1.6): {text}, which is 0 here")
