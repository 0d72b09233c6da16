"""Output of `gspo-hpc try`: prompts, completions and rewards. Milliseconds.

Catches a weight, a failure or an end that is not shown, sums that are wrong, and text that a terminal would obey.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.evaluation import transcript
from gspo_hpc.rewards.results import RewardResult

TWO = [{"function": "number_match"}, {"function": "length_penalty", "weight": 0.5}]


def config(functions: list[dict[str, Any]]) -> Config:
    return from_dict({"reward": {"functions": functions}, "rollout": {"max_response_length": 24}})


def group(*texts: str, prompt: str = "<|user|>\n1 + 1?", reason: str = "stop") -> Group:
    def completion(text: str) -> Completion:
        tokens = np.arange(len(text), dtype=np.int32)
        return Completion(tokens, np.zeros(len(text), np.float32), text, reason, 0)

    return Group(0, Prompt(7, np.arange(5, dtype=np.int32), prompt, {"answer": 2}), tuple(map(completion, texts)))


def result(match: float, penalty: float, seconds: float = 0.25) -> RewardResult:
    parts = {"number_match": match, "length_penalty": penalty}
    return RewardResult(match + 0.5 * penalty, parts, None, seconds={"number_match": 0.5, "length_penalty": seconds})


FAILED = RewardResult(0.0, {"number_match": 1.0}, "length_penalty: KeyError: 'x'", {"length_penalty": "failed"},
                      {"number_match": 0.5, "length_penalty": 1.25})  # fmt: skip


def test_parts_weights_failures_and_ends_are_shown() -> None:
    graded = [(group("2", "three"), [result(1.0, -1.0), FAILED]), (group("x" * 24, reason="length"), [result(0, 0)])]
    assert transcript.as_text(graded, config(TWO)).split("\n") == [
        "prompt 1 of 2: row 7, 5 tokens",
        "    <|user|>",
        "    1 + 1?",
        '  fields: {"answer": 2}',
        "completion 1 of 2: reward 0.5 = number_match 1 + length_penalty -1 x 0.5; 1 token, ended by itself",
        "    2",
        "completion 2 of 2: no reward: length_penalty: KeyError: 'x'; 5 tokens, ended by itself",
        "    three",
        "",
        "prompt 2 of 2: row 7, 5 tokens",
        "    <|user|>",
        "    1 + 1?",
        '  fields: {"answer": 2}',
        "completion 1 of 1: reward 0 = number_match 0 + length_penalty 0 x 0.5; 24 tokens, cut off",
        f"    {'x' * 24}",
        "",
        "3 completions of 2 prompts",
        "1 was cut off at 24 tokens (rollout.max_response_length)",
        "1 has no reward",
        "rewards from 0 to 0.5, mean 0.25",
        "0 of 2 prompts have completions with different rewards, from which a run can learn",
        "number_match: 0.5 s a call, 0.5 s at most",
        "length_penalty: 0.583 s a call, 1.25 s at most",
    ]


def test_prompts_from_which_a_run_can_learn_are_counted() -> None:
    one = [{"function": "number_match"}]
    differ = [RewardResult(value, {"number_match": value}, None, seconds={"number_match": 0.0}) for value in (0.0, 1.0)]
    text = transcript.as_text([(group("a", "b"), differ), (group("a", "b"), differ[:1] * 2)], config(one))
    assert "1 of 2 prompts have completions with different rewards" in text


def test_control_characters_reach_no_terminal() -> None:
    graded = [(group("a\x1b[2Jb\tc\rd", prompt="\x07bell"), [FAILED])]
    text = transcript.as_text(graded, config(TWO))
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "a?[2Jb" in text


def test_without_reward_functions() -> None:
    text = transcript.as_text([(group("2"), None)], config([]))
    assert "completion 1 of 1: 1 token, ended by itself" in text
    assert text.endswith("nothing is graded: reward.functions is empty")
    (prompt,) = json.loads(transcript.as_json([(group("2"), None)], config([])))["prompts"]
    assert prompt["completions"] == [{"text": "2", "tokens": 1, "finish_reason": "stop"}]


def test_json_has_everything() -> None:
    found = json.loads(transcript.as_json([(group("2", "three"), [result(1.0, -1.0), FAILED])], config(TWO)))
    assert found["weights"] == {"number_match": 1.0, "length_penalty": 0.5}
    (prompt,) = found["prompts"]
    assert (prompt["row"], prompt["prompt_tokens"], prompt["fields"]) == (7, 5, {"answer": 2})
    right, failed = prompt["completions"]
    assert right["reward"] == 0.5 and right["parts"] == {"number_match": 1.0, "length_penalty": -1.0}
    assert right["seconds"] == {"number_match": 0.5, "length_penalty": 0.25}
    assert failed["reward"] is None and failed["failure"] == "length_penalty: KeyError: 'x'"
    assert failed["outcomes"] == {"length_penalty": "failed"}
