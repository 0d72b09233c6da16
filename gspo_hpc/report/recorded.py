"""Recorded steps as data for their pages: groups, samples with what their tokens add up to, and the tokens themselves.

The record (:mod:`gspo_hpc.runs.sample_record`) has every token. A page shows sums and extremes of each sample at once,
and has the tokens beside them in compressed form, which its script unpacks when somebody opens the sample.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gspo_hpc.algorithms import objective
from gspo_hpc.config.schema import Config
from gspo_hpc.report.scales import number
from gspo_hpc.report.texts.samples import Passage, fields, passage, tone
from gspo_hpc.runs.sample_record import Numbers, RecordedGroup, RecordedSample, RecordedStep

LONGEST_TEXT = 40_000  # characters of a prompt or completion; the tokens have all of it
UNKNOWN = "–"


@dataclass(frozen=True)
class ClipRange:
    """The range to which the run's objective clips its ratios, each of a whole sequence or of a token."""

    low: float
    high: float
    by_sequence: bool


@dataclass(frozen=True)
class SampleView:
    """One completion. `cells` has a text for each column of its group's table, after its number."""

    anchor: str
    number: int
    tone: str
    words: str  # what its line says before it is opened
    cells: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]  # name and value
    passage: Passage
    tokens: str  # base64 of gzip of JSON; see `tokens_of`


@dataclass(frozen=True)
class GroupView:
    """A prompt with its completions."""

    anchor: str
    title: str
    prompt: Passage
    fields: tuple[str, ...]
    columns: tuple[str, ...]
    samples: tuple[SampleView, ...]


@dataclass(frozen=True)
class StepRow:
    """A line of the table of recorded steps on the report's page."""

    step: int
    file: str  # of its page, relative to the report
    cells: tuple[str, ...]  # see COLUMNS


COLUMNS = ("Groups", "Samples", "Reward", "Tokens", "Truncated", "Largest ratio off 1", "Engine against trainer")


def clip_range(config: Config | None) -> ClipRange | None:
    """Return the range of the run's objective; None without a config, and where no ratio is clipped to a range."""
    if config is None:
        return None
    terms = objective.resolve(config.algorithm)
    if terms.trust_region != "clip":
        return None
    return ClipRange(1.0 - terms.clip_low, 1.0 + terms.clip_high, terms.ratio != "token")


def row(step: RecordedStep, file: str) -> StepRow:
    """Return the line about a step: of its recorded groups, which are a part of its batch."""
    samples = [one for group in step.groups for one in group.samples]
    rewards = [one.reward for one in samples if one.reward is not None and not one.excluded]
    lengths = [one.length for one in samples]
    ratios = [abs(one - 1.0) for sample in samples for one in _known(sample.ratios)]
    gaps = [abs(one) for sample in samples for one in _gaps(sample)]
    cells = (
        str(len(step.groups)),
        str(len(samples)),
        number(math.fsum(rewards) / len(rewards)) if rewards else UNKNOWN,
        number(math.fsum(lengths) / len(lengths)) if lengths else UNKNOWN,
        f"{sum(one.truncated for one in samples)}",
        number(max(ratios, default=None)),
        number(max(gaps, default=None)),
    )
    return StepRow(step.step, file, cells)


def group_view(group: RecordedGroup, clip: ClipRange | None) -> GroupView:
    """Return a group as its page shows it."""
    names = sorted({name for one in group.samples for name in one.reward_parts})
    parts = names if len(names) > 1 else []  # a single one is the reward
    columns = ("Reward", *parts, "Advantage", "Tokens", "Sequence ratio", "Token ratios", "Engine against trainer", "")
    anchor = f"g{group.slot}"
    return GroupView(
        anchor=anchor,
        title=f"Group {group.slot}, prompt {group.prompt_index}",
        prompt=passage(group.prompt, LONGEST_TEXT),
        fields=tuple(fields(group.fields)),
        columns=columns,
        samples=tuple(_sample_view(one, f"{anchor}s{one.index}", parts, clip) for one in group.samples),
    )


def _sample_view(sample: RecordedSample, anchor: str, parts: Sequence[str], clip: ClipRange | None) -> SampleView:
    ratios, gaps = _known(sample.ratios), [abs(one) for one in _gaps(sample)]
    whole = sequence_ratio(sample)
    remarks = [
        *(["truncated"] if sample.truncated else []),
        *(["excluded"] if sample.excluded else []),
        *([f"failed: {sample.failure}"] if sample.failure is not None else []),
        *(["clipped"] if _is_clipped(sample, whole, clip) else []),
    ]
    if sample.logprobs is None:
        remarks.append("not computed: no advantage" if not sample.excluded else "not computed")
    cells = (
        number(sample.reward),
        *(number(sample.reward_parts.get(name)) for name in parts),
        number(sample.advantage),
        str(sample.length),
        ratio_text(whole),
        f"{ratio_text(min(ratios))} to {ratio_text(max(ratios))}" if ratios else UNKNOWN,
        number(max(gaps, default=None)),
        ", ".join(remarks),
    )
    means = {
        "Mean log-prob, engine": sample.rollout_logprobs,
        "Mean log-prob, old policy": sample.old_logprobs,
        "Mean log-prob, updated policy": sample.logprobs,
        "Mean log-prob, reference": sample.reference_logprobs,
    }
    facts = [
        ("Advantage, of each of its tokens", number(sample.advantage)),
        ("Weights of step", str(sample.weights_version)),
        ("Seed", str(sample.seed)),
        *((f"Reward: {name}", number(one)) for name, one in sorted(sample.reward_parts.items())),
        *((f"Outcome: {name}", one.replace("_", " ")) for name, one in sorted(sample.outcomes.items())),
        *((name, _mean(values)) for name, values in means.items() if _known(values)),
        ("Mean difference of engine and trainer", number(math.fsum(gaps) / len(gaps)) if gaps else UNKNOWN),
    ]
    if clip is not None and not clip.by_sequence and ratios:
        outside = sum(not clip.low <= one <= clip.high for one in ratios)
        facts.append(("Tokens outside the clip range", f"{outside} of {len(ratios)}"))
    return SampleView(
        anchor=anchor,
        number=sample.index,
        tone=tone(sample.reward),
        words=", ".join(
            [
                f"reward {number(sample.reward)}",
                f"advantage {number(sample.advantage)}",
                f"{sample.length} token{'s' if sample.length != 1 else ''}",
                *remarks,
            ]
        ),
        cells=cells,
        facts=tuple(facts),
        passage=passage(sample.text, LONGEST_TEXT),
        tokens=tokens_of(sample),
    )


def tokens_of(sample: RecordedSample) -> str:
    """Return the tokens of a sample as the page's script reads them: base64 of gzip of a JSON object of lists."""
    content = {
        "id": sample.tokens,
        "text": sample.token_texts,
        "engine": sample.rollout_logprobs,
        "old": sample.old_logprobs,
        "new": sample.logprobs,
        "reference": sample.reference_logprobs,
        "ratio": sample.ratios,
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(text, mtime=0)).decode("ascii")


def sequence_ratio(sample: RecordedSample) -> float | None:
    """Return the ratio of the whole sequence: the geometric mean of those of its tokens, as GSPO defines it."""
    if sample.ratios is None or not sample.ratios or any(one is None or one <= 0.0 for one in sample.ratios):
        return None
    return math.exp(math.fsum(math.log(one) for one in _known(sample.ratios)) / sample.length)


def ratio_text(ratio: float | None) -> str:
    """Return a ratio with the digits that a clip range of 3e-4 needs."""
    if ratio is None:
        return UNKNOWN
    return f"{ratio:.5f}" if 0.001 <= ratio < 1000.0 else number(ratio)


def _is_clipped(sample: RecordedSample, whole: float | None, clip: ClipRange | None) -> bool:
    """Return True for a sample whose ratio is where the objective's policy term has no gradient."""
    if clip is None or not clip.by_sequence or whole is None or not sample.advantage:
        return False
    return whole > clip.high if sample.advantage > 0 else whole < clip.low


def _gaps(sample: RecordedSample) -> Iterator[float]:
    """Yield log-prob of the policy that sampled, by the trainer, minus that of the engine, of each token."""
    trainer = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
    for ours, theirs in zip(trainer or (), sample.rollout_logprobs, strict=False):
        if ours is not None and theirs is not None:
            yield ours - theirs


def _known(values: Numbers | None) -> list[float]:
    return [one for one in values or () if one is not None]


def _mean(values: Iterable[float | None] | None) -> str:
    known = [one for one in values or () if one is not None]
    return f"{math.fsum(known) / len(known):.4f}".replace("-", "−") if known else UNKNOWN
