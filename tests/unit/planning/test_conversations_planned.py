"""Time of conversations: what is supposed, what is given, and what each of it changes (2 s).

It would catch an estimate that takes replies for sampled tokens, forgets the seconds of an environment or of its
processes, goes beyond the limits of the config, or changes where a completion is one message.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.planning.estimates import devices, engines, time
from gspo_hpc.planning.estimates.time import Talk, Times, Work

COMPLETIONS, LENGTH, CACHE = 2048, 2000.0, 4e5
ENGINES = 32
PRESET = "qwen3_8b_tp2_cp4_32k"


def made(**environment: Any) -> Config:
    return from_dict(
        {
            "cluster": {"nodes": 4, "gpus_per_node": 8, "gpu": "H100"},
            "model": {"path": "Qwen2.5-7B"},
            "batch": {"micro_batch_tokens": 16384, "global_batch_size": 512, "num_generations": 16},
            "rollout": {"max_prompt_length": 1024, "max_response_length": 8192},
            "environment": environment,
        }
    )


def work(config: Config, *talk: float | None) -> Work:
    return time.work(config, COMPLETIONS, LENGTH, Talk(*talk))


def estimated(config: Config, *talk: float | None) -> Times:
    return time.estimate(time.sizes_of(config), config, devices.find("H100"), work(config, *talk), CACHE)


def game(**environment: Any) -> Config:
    return made(name="guess_number", **environment)


def test_one_message_takes_what_a_completion_takes() -> None:
    alone, single = estimated(made()), estimated(game(max_turns=1))
    assert single.seconds == alone.seconds and alone.talk is None
    assert single.talk is not None and single.talk.turns == single.talk.answer_seconds + 1 == 1.0
    assert single.talk.reply_tokens == 0.0 and single.talk.sampled_tokens == LENGTH


def test_half_of_the_turns_and_replies_as_long_as_messages_are_supposed() -> None:
    found = work(game(max_turns=9))
    assert (found.turns, found.answer_seconds) == (5.0, 0.0)
    assert found.reply_tokens == pytest.approx(LENGTH / 9)  # five messages and four replies
    assert found.sampled == pytest.approx(5 / 9)
    assert time.work(game(), COMPLETIONS).response_tokens == 4096  # half of what is allowed, for the conversation


def test_replies_are_read_at_once_and_not_sampled() -> None:
    config = game(max_turns=9)
    none, half = estimated(config, 5, 0.0), estimated(config, 5, LENGTH / 8)
    assert none.talk is not None and half.talk is not None
    assert half.talk.sampled_tokens == pytest.approx(LENGTH / 2)
    assert half.talk.engine_steps == pytest.approx(none.talk.engine_steps / 2)
    assert 0.5 * none.seconds["generation"] < half.seconds["generation"] < 0.65 * none.seconds["generation"]
    model, device = time.sizes_of(config), devices.find("H100")
    read = [engines.prefill(model, config, device, work(config, 5, tokens)) for tokens in (0.0, LENGTH / 8)]
    assert read[1] - read[0] == pytest.approx(read[0] * COMPLETIONS * LENGTH / 2 / (COMPLETIONS / 16 * 512))
    # The trainer reads conversations whole.
    assert {**half.seconds, "generation": 0} == {**none.seconds, "generation": 0}
    assert half.talk.group_tokens == none.talk.group_tokens == 512 + 16 * LENGTH


def test_a_rollout_waits_for_the_answers_of_its_last_conversation() -> None:
    config = game(max_turns=9, workers=100)
    at_once, slow = (estimated(config, 5, None, seconds).seconds["generation"] for seconds in (None, 3.0))
    assert slow - at_once == pytest.approx(5 * 3.0)
    tools = made(tools=[{"function": "calculator"}], workers=100)  # the last message calls none
    at_once, slow = (estimated(tools, 5, None, seconds).seconds["generation"] for seconds in (None, 3.0))
    assert slow - at_once == pytest.approx(4 * 3.0)


def test_too_few_processes_bound_a_rollout() -> None:
    found = estimated(game(max_turns=9, workers=2), 5, None, 30.0)
    assert engines.count(game()) == ENGINES
    assert found.seconds["generation"] > COMPLETIONS * 5 * 30.0 / (2 * ENGINES)
    more = estimated(game(max_turns=9, workers=64), 5, None, 30.0)
    assert more.seconds["generation"] < found.seconds["generation"] / 4


@pytest.mark.parametrize("turns", [1.0, 3.0, 8.0])
def test_nothing_goes_beyond_what_the_config_allows(turns: float) -> None:
    found = work(game(max_turns=8, timeout=20), 50, None, 100.0)
    assert (found.turns, found.answer_seconds) == (8, 20.0)
    long = work(game(max_turns=8), turns, 1e6)
    assert 0 < turns <= long.sampled * LENGTH + 1e-6  # every message has a token


def test_the_page_says_what_it_supposes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    talks = ["environment.name=guess_number", "reward.functions=[{function: environment}]"]
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "Game {number}"}}\n' for number in range(4000)))
    command = ["plan", PRESET, "data.train=rows.jsonl", *talks]
    assert main([*command, "--turns", "3", "--reply-tokens", "100", "--answer-seconds", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "conversations of 3.0 messages (--turns), with 15,160 tokens of the model and 200 of replies" in shown
    assert "answers of 2 s (--answer-seconds), 6.0 s in each; a group has 123,904 tokens" in shown
    main([*command, "--json"])
    found = json.loads(capsys.readouterr().out)["time"]["conversations"]
    assert found["turns"] == 4.5 and found["answer_seconds"] == 0.0
    main(["plan", PRESET, "--turns", "3"])
    assert "--answer-seconds change nothing: completions are no conversations" in " ".join(
        capsys.readouterr().out.split()
    )
    for few in ("0", "0.5"):
        assert main([*command, "--turns", few]) == 2
    assert "--turns 0" in capsys.readouterr().err
