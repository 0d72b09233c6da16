"""Prompts, completions and rewards as text for a person, or as JSON: what ``gspo-hpc try`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_hpc.config.schema import Config
from gspo_hpc.data.prompts import own_fields
from gspo_hpc.data.records import OUT_OF_TIME, Completion, Group, Prompt
from gspo_hpc.data.sources.selection import find_source
from gspo_hpc.rewards.registry import part_names, source_weights
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.system.text import counted, printable, rounded, shortened

Graded = Sequence[tuple[Group, Sequence[RewardResult] | None]]  # None: there are no reward functions

_ENDS = {"length": "cut off", OUT_OF_TIME: "out of time"}  # by finish_reason
FIELDS_LENGTH = 300  # characters of a prompt's fields that are shown


def as_json(graded: Graded, config: Config) -> str:
    """Return one JSON object with everything that :func:`as_text` shows."""
    names = part_names(config.reward)
    return json.dumps(
        {
            "weights": {name: term.weight for name, term in zip(names, config.reward.functions, strict=True)},
            "prompts": [
                {
                    "row": group.prompt.index,
                    "prompt": group.prompt.text,
                    "prompt_tokens": len(group.prompt.tokens),
                    "fields": own_fields(group.prompt),
                    "completions": [
                        _completion(c, None if results is None else results[i]) for i, c in enumerate(group.completions)
                    ],
                }
                for group, results in graded
            ],
        }
    )


def as_text(graded: Graded, config: Config) -> str:
    """Return each prompt as the model sees it, its completions with the parts of their rewards, and a summary."""
    lines: list[str] = []
    for number, (group, results) in enumerate(graded, 1):
        prompt = group.prompt
        tokens = counted(len(prompt.tokens), "token")
        lines.append(f"prompt {number} of {len(graded)}: row {prompt.index}, {tokens}")
        lines += _indented(prompt.text)
        if fields := own_fields(prompt):
            lines.append(f"  fields: {shortened(printable(json.dumps(fields, ensure_ascii=False)), FIELDS_LENGTH)}")
        for index, completion in enumerate(group.completions):
            reward = "" if results is None else f"{_reward(results[index], config, prompt)}; "
            lines.append(f"completion {index + 1} of {len(group.completions)}: {reward}{_end(completion)}")
            lines += _indented(completion.text)
        lines.append("")
    return "\n".join([*lines, *_summary(graded, config)])


def _completion(completion: Completion, result: RewardResult | None) -> dict[str, Any]:
    found = {"text": completion.text, "tokens": len(completion.tokens), "finish_reason": completion.finish_reason}
    if result is None:
        return found
    return found | {
        "reward": result.value if result.failure is None else None,
        "parts": result.parts,
        "failure": result.failure,
        "outcomes": result.outcomes,
        "seconds": result.seconds,
    }


def _reward(result: RewardResult, config: Config, prompt: Prompt) -> str:
    if result.failure is not None:
        return f"no reward: {printable(result.failure)}"
    names, source = part_names(config.reward), find_source(prompt.fields, config.data)
    weights = {names[term]: weight for term, weight in source_weights(config.reward, source).items()}
    parts = (
        f"{name} {value:g}" + (f" x {weights[name]:g}" if weights[name] != 1 else "")
        for name, value in result.parts.items()
    )
    return f"reward {result.value:g} = {' + '.join(parts)}"


def _end(completion: Completion) -> str:
    end = _ENDS.get(completion.finish_reason, "ended by itself")
    return f"{counted(len(completion.tokens), 'token')}, {end}"


def _indented(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield f"    {printable(line.expandtabs())}".rstrip()


def _summary(graded: Graded, config: Config) -> Iterator[str]:
    completions = [completion for group, _ in graded for completion in group.completions]
    cut = sum(completion.finish_reason == "length" for completion in completions)
    yield f"{counted(len(completions), 'completion')} of {counted(len(graded), 'prompt')}"
    if cut:
        were = "was" if cut == 1 else "were"
        yield f"{cut} {were} cut off at {config.rollout.max_response_length} tokens (rollout.max_response_length)"
    results = [results for _, results in graded if results is not None]
    if not results:
        yield "nothing is graded: reward.functions is empty"
        return
    every = [result for group in results for result in group]
    rewards = [result.value for result in every if result.failure is None]
    if failed := len(every) - len(rewards):
        yield f"{failed} {'has' if failed == 1 else 'have'} no reward"
    if rewards:
        yield f"rewards from {min(rewards):g} to {max(rewards):g}, mean {rounded(sum(rewards) / len(rewards))}"
    differ = sum(len({result.value for result in group if result.failure is None}) > 1 for group in results)
    yield f"{differ} of {len(results)} prompts have completions with different rewards, from which a run can learn"
    for name in part_names(config.reward):
        seconds = [result.seconds[name] for result in every if name in result.seconds]
        if not seconds:  # it grades other sources
            continue
        yield f"{name}: {rounded(sum(seconds) / len(seconds))} s a call, {rounded(max(seconds))} s at most"
