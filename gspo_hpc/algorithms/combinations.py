"""Combinations of the parts of an objective: those without meaning, that defeat it, or that nobody has published."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_hpc.config.algorithm import AlgorithmSettings

_MEANS = {
    "token": "a mean over all tokens",
    "prompt": "a mean over the tokens of a prompt",
    "fixed_length": "a sum of tokens",
}
# Trust regions that papers combine with each ratio.
_PUBLISHED = {
    "token": {"clip", "weight", "mask", "gate", "geometric"},
    "sequence": {"clip"},
    "sequence_token": {"clip"},
}
# Settings that act with some values of another one alone.
_ACT_WITH = {
    "weight_max": ("trust_region", ("mask",)),
    "gate_positive": ("trust_region", ("gate",)),
    "gate_negative": ("trust_region", ("gate",)),
    "correction_low": ("correction", ("masked", "rejection")),
    "correction_high": ("correction", ("truncated", "masked", "rejection")),
}

# Clip ranges from here on are those of single tokens. Ratios of short sequences go beyond 0.05 (docs/results.md).
_OF_TOKENS = 0.1


def inert(given: AlgorithmSettings) -> dict[str, str]:
    """Return the settings that change nothing beside the others, each with the setting that makes it so."""
    found = {
        name: f"{key} {getattr(given, key)}"
        for name, (key, values) in _ACT_WITH.items()
        if getattr(given, key) not in values
    }
    if given.trust_region == "gate":
        found |= dict.fromkeys(("clip_low", "clip_high"), "trust_region gate")
    if given.kl_beta == 0:
        names = ("kl_estimator", "kl_placement", "reference_interval", "reference_mixup")
        found |= dict.fromkeys(names, "kl_beta 0")
    elif given.reference_interval == 0:
        found["reference_mixup"] = "reference_interval 0"
    if not given.dual_clip and given.trust_region != "clip":
        found["dual_clip"] = f"trust_region {given.trust_region}"
    return found


def contradictions(given: AlgorithmSettings) -> Iterator[str]:
    """Yield the reasons, one line each, for which these settings make no objective."""
    region = given.trust_region
    if given.ratio != "token" and given.aggregation != "sequence":
        name, mean = given.aggregation, _MEANS[given.aggregation]
        yield (
            f"algorithm.aggregation {name} contradicts algorithm.name {given.name}: its ratio belongs to a whole "
            f"sequence, and {mean} would weigh sequences by their length; use aggregation sequence, or name grpo"
        )
    if region in ("mask", "geometric") and given.ratio != "token":
        why = (
            "compares the probabilities of single tokens" if region == "mask" else "is made of ratios of single tokens"
        )
        yield f"algorithm.trust_region {region} {why}, and algorithm.ratio is {given.ratio}: use ratio token"
    if region == "geometric" and given.aggregation != "sequence" and given.ratio == "token":
        yield (
            "algorithm.trust_region geometric has one term per sequence, and algorithm.aggregation "
            f"{given.aggregation} is over tokens: use aggregation sequence"
        )
    if region in ("clip", "geometric") and given.clip_low >= 1:
        yield f"algorithm.clip_low ({given.clip_low:g}) must be below 1 with trust_region {region}: nothing is clipped"
    if given.dual_clip and region != "clip":
        yield (
            f"algorithm.dual_clip ({given.dual_clip:g}) bounds a minimum, and trust_region {region} has none: set "
            "dual_clip 0, or trust_region clip"
        )
    elif given.dual_clip and given.dual_clip <= 1 + given.clip_high:
        yield (
            f"algorithm.dual_clip ({given.dual_clip:g}) must be above 1 + clip_high ({1 + given.clip_high:g}), or 0: "
            "it bounds ratios that the clip range leaves free"
        )
    if given.top_entropy_quantile < 1 and (given.ratio == "sequence" or region == "geometric"):
        which = "trust_region geometric" if region == "geometric" else "ratio sequence"
        yield (
            f"algorithm.top_entropy_quantile ({given.top_entropy_quantile:g}) drops policy terms of tokens, and "
            f"{which} has one term per sequence: use ratio sequence_token (name gspo_token) or token"
        )
    if given.normalize_advantage and given.advantage not in ("group", "leave_one_out"):
        yield (
            f"algorithm.normalize_advantage true contradicts algorithm.advantage {given.advantage}, which divides by "
            "something else: set normalize_advantage false"
        )
    if given.advantage == "gdpo" and given.kl_beta and given.kl_placement == "reward":
        yield (
            "algorithm.advantage gdpo normalises every reward function by itself, and kl_placement reward takes the KL "
            "term off their sum: use kl_placement loss"
        )
    if given.correction in ("masked", "rejection") and given.correction_low >= given.correction_high:
        yield (
            f"algorithm.correction_low ({given.correction_low:g}) must be below correction_high "
            f"({given.correction_high:g}): no ratio lies between them"
        )
    elif given.correction in ("masked", "rejection") and not given.correction_low <= 1 <= given.correction_high:
        yield (
            f"algorithm.correction_low to correction_high ({given.correction_low:g} to {given.correction_high:g}) must "
            "include 1, the ratio of an engine that agrees with the trainer"
        )
    elif given.correction == "truncated" and given.correction_high < 1:
        yield (
            f"algorithm.correction_high ({given.correction_high:g}) must be at least 1 with correction truncated: all "
            "tokens would weigh less than they count"
        )
    if given.kl_beta and given.kl_placement == "reward" and given.kl_estimator == "unbiased":
        yield (
            "algorithm.kl_estimator unbiased is about a gradient, and kl_placement reward has none: use k1, k2, k3 or "
            "absolute"
        )
    if given.teacher is not None and not given.kl_beta:
        yield (
            "algorithm.teacher needs a weight: set algorithm.kl_beta above 0, such as 1 where the teacher is the only "
            "signal, or algorithm.teacher=null"
        )
    if given.teacher is not None and given.reference_interval:
        yield (
            f"algorithm.reference_interval ({given.reference_interval}) would make the policy its own teacher: set "
            "reference_interval 0, or teacher null"
        )
    if given.kl_target and not given.kl_beta:
        yield "algorithm.kl_target needs a weight to begin with: set algorithm.kl_beta above 0, such as 0.001"
    if given.kl_target and given.kl_placement == "reward":
        yield "algorithm.kl_target follows the divergence that the loss measures, and kl_placement is reward: use loss"
    if given.kl_target and given.kl_estimator in ("k1", "absolute", "k2", "unbiased"):
        yield (
            f"algorithm.kl_target is a divergence, which k3 estimates: with kl_estimator {given.kl_estimator} the "
            "measured value is another one; use k3, or a fixed kl_beta"
        )
    if given.kl_beta and given.kl_placement == "loss" and given.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator k1 is no term of a loss: its gradient is zero in expectation, so nothing would "
            "hold the policy; use k2, k3 or unbiased, or kl_placement reward"
        )


def warnings(given: AlgorithmSettings) -> Iterator[str]:
    """Yield the settings, one line each, that are allowed but defeat the objective or do nothing."""
    if given.trust_region == "clip" and given.ratio == "token":
        if (narrowest := min(given.clip_low, given.clip_high)) < 0.01:
            yield (
                f"a clip range of {narrowest:g} is made for ratios of whole sequences (GSPO): with one ratio per token "
                "it clips nearly everything; grpo has 0.2/0.2"
            )
    elif given.trust_region == "clip" and (widest := max(given.clip_low, given.clip_high)) >= _OF_TOKENS:
        low, high = (type(given).model_fields[name].default for name in ("clip_low", "clip_high"))
        own = f"{given.name} has {low:g}/{high:g}" if max(low, high) < _OF_TOKENS else "gspo has 0.0003/0.0004"
        yield (
            f"a clip range of {widest:g} is made for ratios of single tokens (GRPO): the ratio of a sequence is a mean "
            f"over its tokens and hardly ever gets there; {own}"
        )
    if given.has_teacher and given.kl_placement == "loss" and given.kl_estimator in ("k3", "absolute"):
        yield (
            f"algorithm.kl_estimator {given.kl_estimator} in the loss does not have the gradient of the divergence "
            "from the teacher, so the policy learns something else; unbiased and k2 have it"
        )
    for name, why in inert(given).items():
        field = type(given).model_fields[name]
        if name in given.model_fields_set and getattr(given, name) != field.default and not name.startswith("clip"):
            yield f"algorithm.{name} ({getattr(given, name)}) changes nothing with {why}"


def notes(given: AlgorithmSettings) -> Iterator[str]:
    """Yield what nobody has published, one line each."""
    if given.trust_region not in _PUBLISHED[given.ratio]:
        yield (
            f"Nobody has published algorithm.trust_region {given.trust_region} with algorithm.ratio {given.ratio}: "
            "compare it with a preset before you rely on it."
        )
    if given.correction in ("truncated", "masked") and (given.ratio == "sequence" or given.trust_region == "geometric"):
        yield (
            f"Nobody has published algorithm.correction {given.correction} with one term per sequence: its weight is "
            "the exponential of the mean log-ratio of engine and trainer; rejection is what papers use."
        )
