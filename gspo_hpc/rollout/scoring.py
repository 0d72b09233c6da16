"""Scores of reward models: what a rank's engines of these give to the completions that the rank holds.

Beside each engine of the policy there is one of each reward model. Where they share GPUs, they take turns at their
memory: a reward model's engine is awake only while nobody generates and nobody trains. One on GPUs of its own never
sleeps. The rank that holds a group scores it, so no text travels; ranks meet once all are done. A group goes to the
journal as soon as it has all of its scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gspo_hpc.config.schema import Config
from gspo_hpc.config.sections.reward_models import is_apart
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.engine.engine import Engine, EngineDied, Sampling
from gspo_hpc.engine.scoring.classifier import Classifier
from gspo_hpc.engine.scoring.reading import Reader
from gspo_hpc.policy.passes import never
from gspo_hpc.rewards import judges
from gspo_hpc.rewards.calls import LARGEST
from gspo_hpc.rewards.registry import clipped, part_names, source_weights
from gspo_hpc.rewards.results import RewardResult, weighted
from gspo_hpc.rollout.recovery import EngineRecovery
from gspo_hpc.system.progress import mark, waiting

Score = float | str  # or why there is none
Keep = Callable[[Group], None]

_AT_ONCE = {"classification": 16, "generative": 256}  # sequences that an engine is given at least, if there are more


def keep_nowhere(group: Group) -> None:
    """Do nothing with a group that has its scores."""


@dataclass
class ScoringEngine:
    """This rank's engine of one reward model, and what that reads."""

    engine: Engine
    reader: Reader

    def scores(self, groups: Sequence[Group]) -> Iterator[tuple[int, list[Score]]]:
        """Yield for each group its slot and the score of each completion, as it has them all. Raises EngineDied.

        After that the groups without scores may be given again, once the engine is restarted.
        """
        read = {group.slot: [self._read(group.prompt, one) for one in group.completions] for group in groups}
        if isinstance(self.engine, Classifier):
            yield from self._classified(self.engine, read)
        else:
            yield from self._asked(read)

    def _read(self, prompt: Prompt, completion: Completion) -> list[int] | str:
        try:
            return self.reader.tokens(prompt, completion.text)
        except ValueError as error:
            return str(error)

    def _classified(
        self, engine: Classifier, read: Mapping[int, Sequence[list[int] | str]]
    ) -> Iterator[tuple[int, list[Score]]]:
        sequences = [one for of_group in read.values() for one in of_group if not isinstance(one, str)]
        found = iter(engine.score(sequences) if sequences else ())
        for slot, of_group in read.items():
            yield slot, [one if isinstance(one, str) else _usable(next(found)) for one in of_group]

    def _asked(self, read: Mapping[int, Sequence[list[int] | str]]) -> Iterator[tuple[int, list[Score]]]:
        """Ask the model for a reply to each message: greedy, so that the same completion has the same score."""
        model, places = self.reader.model, dict[int, tuple[int, int]]()
        sampling = Sampling(temperature=0.0, max_tokens=model.max_reply_length)
        scores: dict[int, dict[int, Score]] = {slot: {} for slot in read}
        self.engine.abort()  # what was asked before the engine died, of which others may have come meanwhile
        for slot, of_group in read.items():
            for index, one in enumerate(of_group):
                if isinstance(one, str):
                    scores[slot][index] = one
                    continue
                place = len(places)
                places[place] = slot, index
                prompt = Prompt(place, np.asarray(one, np.int32), "", {})
                self.engine.submit(place, prompt, [0], sampling, reports_experts=False)
        ready = [slot for slot, of_group in scores.items() if len(of_group) == len(read[slot])]
        while True:
            yield from ((slot, [scores[slot][i] for i in range(len(read[slot]))]) for slot in ready)
            if not self.engine.pending:
                return
            mark()
            ready = []
            for reply in self.engine.step():
                slot, index = places[reply.slot]
                scores[slot][index] = self._score_in(reply.completions[0].text)
                ready += [slot] if len(scores[slot]) == len(read[slot]) else []

    def _score_in(self, reply: str) -> Score:
        pattern = self.reader.model.pattern
        try:
            return _usable(judges.score_in(reply, judges.PATTERN if pattern is None else pattern))
        except ValueError as error:
            return str(error)


@dataclass
class RewardModels:
    """The reward models of a run on one rank. `engines` is empty on ranks that own no engine."""

    config: Config
    engines: Mapping[str, ScoringEngine]  # by the name of the model
    recovery: EngineRecovery
    agree: Callable[[Sequence[float]], list[float]] = list  # the largest of each number over all ranks
    stop_requested: Callable[[], bool] = never
    _scored: dict[int, dict[int, list[Score]]] = field(default_factory=dict)  # by slot and term

    def score(self, groups: Mapping[int, Group], keep: Keep = keep_nowhere) -> tuple[dict[int, Group], bool]:
        """Return the groups, which this rank holds, with scores and the rewards that follow; and if all ranks are done.

        `keep` is called with each group once it has all. Where they share GPUs, all engines of the policy sleep, and
        those of reward models do so before and afterwards. Where a stop was requested on any rank, groups are not all
        scored. Collective. Raises EngineLost where an engine died too often.
        """
        self._scored = {slot: {} for slot in groups}
        found: dict[int, Group] = {}
        stopped = False
        for name, one in self.engines.items():
            if stopped or not groups:
                break
            stopped = not self._score_with(name, one, groups, found, keep)
        with waiting():  # for ranks that have more to score
            (stops,) = self.agree([float(stopped or self.stop_requested())])
        return found, stops == 0

    def close(self) -> None:
        """End the engines."""
        for one in self.engines.values():
            one.engine.close()

    def _score_with(
        self, name: str, one: ScoringEngine, groups: Mapping[int, Group], found: dict[int, Group], keep: Keep
    ) -> bool:
        """Score all groups with one model; return False if a stop is requested meanwhile."""
        terms = [term for term, model in self.config.reward.scored.items() if model.name == name]
        shares = not any(is_apart(self.config, self.config.reward.scored[term]) for term in terms)
        try:
            if shares:
                self._wake(one.engine)
            todo = [group for _, group in sorted(groups.items())]
            while todo:
                mark("reward_model")
                if self.stop_requested():
                    return False
                batch = _first(todo, _AT_ONCE[one.reader.model.kind])
                done = set[int]()
                try:
                    for slot, scores in one.scores(batch):
                        done.add(slot)
                        self._note(groups[slot], terms, scores, found, keep)
                except EngineDied as death:
                    if not self.recovery.restart(death, one.engine):
                        return False
                todo = [group for group in todo if group.slot not in done]
        finally:
            with contextlib.suppress(EngineDied):  # found dead, and restarted, when it is woken
                one.engine.abort()
                if shares:
                    one.engine.sleep(1)
        return True

    def _wake(self, engine: Engine) -> None:
        try:
            engine.wake_up()
            engine.reset_prefix_cache()  # its memory held something else meanwhile
        except EngineDied as death:
            self.recovery.restart(death, engine)

    def _note(
        self, group: Group, terms: Sequence[int], scores: list[Score], found: dict[int, Group], keep: Keep
    ) -> None:
        scored = self._scored[group.slot]
        scored |= dict.fromkeys(terms, scores)
        if len(scored) == len(self.config.reward.scored):
            found[group.slot] = whole = with_scores(group, scored, self.config)
            keep(whole)


def with_scores(group: Group, scored: Mapping[int, Sequence[Score]], config: Config) -> Group:
    """Return the group with the rewards that functions and reward models make up together; `scored` is by term."""

    def judged(index: int, one: Completion) -> Completion:
        of_functions = RewardResult(one.reward, one.reward_parts, one.failure, dict(one.outcomes))
        result = added({term: scores[index] for term, scores in scored.items()}, of_functions, group.prompt, config)
        excluded = one.excluded or (result.failure is not None and config.reward.on_failure == "exclude")
        return replace(
            one,
            reward=result.value,
            reward_parts=result.parts,
            outcomes=result.outcomes,
            failure=result.failure,
            excluded=excluded,
        )

    return group.with_completions(tuple(judged(index, one) for index, one in enumerate(group.completions)))


def added(scored: Mapping[int, Score], result: RewardResult, prompt: Prompt, config: Config) -> RewardResult:
    """Return the reward of a completion with what reward models gave it, by term, beside what functions did."""
    reward, names = config.reward, part_names(config.reward)
    weights = source_weights(reward, find_source(prompt.fields, config.data))
    given = {term: score for term, score in scored.items() if term in weights}
    values = {term: clipped(score, reward.functions[term]) for term, score in given.items() if isinstance(score, float)}
    failures = [f"{names[term]}: {score}" for term, score in given.items() if isinstance(score, str)]
    known = result.parts | {names[term]: value for term, value in values.items()}
    parts = {name: known[name] for name in names if name in known}
    outcomes = result.outcomes | {names[term]: "failed" for term, score in given.items() if isinstance(score, str)}
    failure = "; ".join(filter(None, [result.failure, *failures])) or None
    total = 0.0
    if failure is None:
        total, failure = weighted({term: parts[names[term]] for term in weights}, weights)
    return replace(result, value=total, parts=parts, failure=failure, outcomes=outcomes)


def _first(groups: Sequence[Group], sequences: int) -> list[Group]:
    """Return the first groups, of so many completions at least."""
    taken, count = list[Group](), 0
    for group in groups:
        if count >= sequences:
            break
        taken.append(group)
        count += len(group.completions)
    return taken


def _usable(score: float) -> Score:
    return score if abs(score) <= LARGEST else f"returned {score}: a finite number up to {LARGEST:g} is needed"
