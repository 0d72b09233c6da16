"""Completions of an evaluation as they are kept: a line of JSON for each prompt, from which they can be graded again.

A run has a file for each step that it evaluates, `evaluations/000010.jsonl`; the command `eval` writes
`evaluations/000010-eval.jsonl` beside it, or the file that it is given.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.evaluation.marks import Marks, scores
from gspo_hpc.evaluation.scores import Scores, majority
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.files import make_inner_dir, plain, read_lines, write_atomically

_KINDS = {str: "text", dict: "object", list: "list", int: "whole number", bool: "true or false"}


@dataclass(frozen=True)
class Answer:
    """One completion, and what decided whether it is right. `raw` is the object of the file."""

    text: str
    tokens: tuple[int, ...]
    sampled: int  # tokens that the model sampled; others are an environment's
    right: bool
    graded: bool  # False: the function that decides failed, so the answer counts as wrong
    answer: str | None  # which one it is, for the majority
    named: bool  # the function tells which answers are alike
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """A prompt and its answers. `raw` is the object of the file."""

    prompt: str
    fields: Mapping[str, Any]
    greedy: Answer
    samples: tuple[Answer, ...]
    raw: Mapping[str, Any]

    @property
    def decides(self) -> str:
        """The reward function that decided."""
        return str(self.raw["decides"])

    @property
    def part(self) -> str:
        """The source or evaluation set; "" for other prompts, and in files of earlier versions."""
        return str(self.raw.get("set", ""))

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The greedy answer, then the samples."""
        return (self.greedy, *self.samples)


@dataclass(frozen=True)
class Stored:
    """The evaluation in a file. All prompts were asked at the same step, those of one part with as many samples."""

    path: Path
    prompts: tuple[Asked, ...]

    @property
    def step(self) -> int | None:
        """The step of the weights; None for a model that is no checkpoint."""
        found: int | None = self.prompts[0].raw["step"]
        return found

    @property
    def samples(self) -> tuple[int, ...]:
        """The numbers of samples that prompts have, ascending."""
        return tuple(sorted({len(one.samples) for one in self.prompts}))

    @property
    def deciders(self) -> str:
        """The reward functions that decided, in words."""
        return ", ".join(dict.fromkeys(one.decides for one in self.prompts))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that have a name, in the order of the file."""
        return tuple(dict.fromkeys(one.part for one in self.prompts if one.part))

    def scores(self) -> Scores:
        """Return the scores by name, as the evaluation gave them."""
        return scores([_marks(one) for one in self.prompts])


def path_of(run: RunDir, step: int, *, by_command: bool = False) -> Path:
    """Return the file of an evaluation within the run, or of one by the command."""
    return run.evaluations / f"{step:06d}{'-eval' * by_command}.jsonl"


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the lines of an evaluation, mode 0600, in the place of what the file had."""
    write_atomically(path, (json.dumps(plain(row), allow_nan=False).encode() + b"\n" for row in rows))


def write_into(run: RunDir, step: int, rows: Iterable[Mapping[str, Any]], *, by_command: bool = False) -> None:
    """Write the lines of an evaluation into the folder of the run."""
    make_inner_dir(run.evaluations)
    write(path_of(run, step, by_command=by_command), rows)


def run_of(target: Path) -> RunDir | None:
    """Return the run that is the target, or in which the target is stored."""
    folder = target if target.is_dir() else target.absolute().parent.parent
    return RunDir(folder) if (folder / "run.json").exists() else None


def find(target: Path, step: int | None = None) -> Path:
    """Return the file of a run's evaluation at a step, by default the last; the target itself where it is a file.

    Of two evaluations of one step, that which was written last. Raises ValueError where there is none.
    """
    if not target.is_dir():
        if step is not None:
            raise ValueError(f"step {step}: {target} is a file, with one evaluation; a step is one of a run's")
        return target
    run = RunDir(target)
    run.read_info()
    found = run.stored_evaluations()
    if not found:
        raise ValueError(
            f"{run.path} has no stored completions of an evaluation: gspo-hpc eval {target} stores those of its newest "
            "checkpoint; a run with unseen prompts stores them from this version on"
        )
    wanted = max(found) if step is None else step
    if wanted not in found:
        closest, steps = min(found, key=lambda one: abs(one - wanted)), ", ".join(map(str, sorted(found)))
        raise ValueError(f"{run.path} has no evaluation of step {wanted}; nearest: {closest}; it has: {steps}")
    return max(found[wanted], key=lambda path: (path.stat().st_mtime_ns, path.name))


def read(path: Path) -> Stored:
    """Return the evaluation in a file. Raises ValueError, with file and line, where a line is not as it is written."""
    if not path.read_bytes().endswith(b"\n"):
        what = "is empty" if not path.stat().st_size else "ends within a line, so it is not whole"
        raise ValueError(f"{path}: {what}; it is no stored evaluation")
    prompts = list[Asked]()
    first = dict[str, tuple[int, int]]()  # by part: the line and the samples of its first prompt
    for number, (record, _) in enumerate(read_lines(path), 1):
        try:
            prompts.append(one := _asked(record))
            line, samples = first.setdefault(one.part, (number, len(one.samples)))
            if len(one.samples) != samples:
                raise ValueError(f"has {len(one.samples)} samples, but line {line} has {samples}")
            if prompts[-1].raw["step"] != prompts[0].raw["step"]:
                raise ValueError(f"is of step {prompts[-1].raw['step']}, but line 1 of step {prompts[0].raw['step']}")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; it is no line of a stored evaluation") from None
    return Stored(path, tuple(prompts))


def most_common_failure(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return why most of the greedy answers of these lines that were not graded were not; empty if all were."""
    greedy = (row["greedy"] for row in rows)
    reasons = Counter(str(one.get("failure") or "") for one in greedy if not one["graded"])
    return reasons.most_common(1)[0][0] if reasons else ""


def regraded(stored: Stored, names: Sequence[str], graded: Sequence[Sequence[Mapping[str, Any]]]) -> Stored:
    """Return the same completions with new grades: for each prompt, in turn, who decides, and what is new of them."""
    prompts = []
    for one, name, new in zip(stored.prompts, names, graded, strict=True):
        greedy, *samples = [
            {**{key: value for key, value in each.raw.items() if key != "answer"}, **found}
            for each, found in zip(one.answers, new, strict=True)
        ]
        prompts.append(_asked({**one.raw, "decides": name, "greedy": greedy, "samples": samples}))
    return Stored(stored.path, tuple(prompts))


def _marks(one: Asked) -> Marks:
    right, votes = tuple(each.right for each in one.samples), None
    if one.samples and all(each.named for each in one.samples):
        votes = majority([each.answer for each in one.samples], right)
    greedy, graded = one.greedy, any(each.graded for each in one.samples)
    return Marks(one.part, greedy.right, greedy.sampled, greedy.graded, right, graded, votes)


def _asked(record: Mapping[str, Any]) -> Asked:
    text = _field(record, "prompt", str)
    fields = _field(record, "fields", dict)
    _field(record, "decides", str)
    _field(record, "row", int)
    _field(record, "step", int, type(None))
    if "set" in record:
        _field(record, "set", str)
    greedy = _answer("greedy", _field(record, "greedy", dict))
    samples = [_answer(f"sample {n}", one) for n, one in enumerate(_field(record, "samples", list), 1)]
    return Asked(text, fields, greedy, tuple(samples), record)


def _answer(what: str, record: Any) -> Answer:
    if not isinstance(record, dict):
        raise ValueError(f"{what} is not an object")
    within = _within(what, record)
    tokens = within("tokens", list)
    if not all(type(token) is int for token in tokens):
        raise ValueError(f"{what}: `tokens` has {next(t for t in tokens if type(t) is not int)!r}, not a whole number")
    within("finish_reason", str)
    within("reward_parts", dict)
    named = "answer" in record
    return Answer(
        within("text", str),
        tuple(tokens),
        within("sampled", int),
        within("right", bool),
        within("graded", bool),
        within("answer", str, type(None)) if named else None,
        named,
        record,
    )


def _within(what: str, record: Mapping[str, Any]) -> Callable[..., Any]:
    def found(name: str, *types: type) -> Any:
        try:
            return _field(record, name, *types)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    return found


def _field(record: Mapping[str, Any], name: str, *types: type) -> Any:
    """Return a value of a JSON object. Raises ValueError where it is missing or of another type."""
    if name not in record:
        raise ValueError(f"has no `{name}`")
    value = record[name]
    if type(value) not in types:
        raise ValueError(f"`{name}` is {json.dumps(value)[:40]}, which is no {_KINDS[types[0]]}")
    return value
