"""Conversations in which the model calls tools (20 s): what it is shown, what it gets back, and a kill between calls.

It would catch a result that is tokenized with the model's own tokens, a call that fails and costs its conversation, a
message for the environment that tools take, and a call that a resume makes again.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gspo_hpc.config.schema import Config, Data
from gspo_hpc.data.outcomes import CallRecord
from gspo_hpc.data.records import Group
from gspo_hpc.data.replies import Replies
from gspo_hpc.data.table import GroupTable
from gspo_hpc.rewards.environments import tools
from gspo_hpc.rewards.environments.turns import turn_pool
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.runs.journal import Journal, read_turns
from gspo_hpc.training.step_record import tool_calls
from tests.torch.rollout import scripted
from tests.torch.rollout.scripted import Child, call, groups_of, talk


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return scripted.settings(tmp_path_factory.mktemp("tools"), "environment.timeout=2", "environment.max_turns=3")


@pytest.fixture(scope="module")
def pool(config: Config) -> Iterator[RewardPool]:
    with turn_pool(config, 1) as made:
        yield made


def test_results_come_back_by_the_template_and_what_was_sampled_stays(config: Config, pool: RewardPool) -> None:
    first = "Two sums." + call(a=1, b=2) + call(a=3, b=4)

    def says(seen: str, seed: int) -> str:
        return first if seen.count("<|assistant|>") == 1 else "Three and seven."

    groups, engine = talk(config, pool, says)
    (one,) = groups[0].completions
    made = scripted.tokenizer()
    shown = json.dumps(tools.shown(config.environment)[0])
    assert json.loads(shown)["function"]["parameters"]["required"] == ["a", "b"]
    assert engine.seen[0].startswith(f"<|system|>{shown}<tool_call>JSON")
    assert engine.seen[0].endswith("<|end|><|user|>Question 0<|end|><|assistant|>")
    after = engine.seen[1].removeprefix(f"{engine.seen[0]}{first}<|end|>")
    assert after.startswith("<|user|><result>3 for you 0 (") and "</result><result>7 for you 0 (" in after
    assert after.endswith("</result><|end|><|assistant|>")
    assert made.decode(one.tokens[one.sampled]) == f"{first}<|end|>Three and seven.<|end|>"
    assert one.environment is not None
    assert made.decode(one.tokens[one.environment == 1]) == after
    assert (one.turns, one.calls, one.failure, len(one.logprobs)) == (2, {"done": 2}, None, len(one.sampled))
    assert one.text.splitlines()[1].startswith("> 3 for you 0") and one.text.endswith("Three and seven.")


def test_calls_that_fail_are_told_to_the_model_and_counted(config: Config, pool: RewardPool) -> None:
    wrong = ["<tool_call>{</tool_call>", '<tool_call>{"name": "sub"}</tool_call>', call(a=1), call(a=1, b=13)]
    said = "".join([*wrong, call(a=1, b=14), call(a=1, b=2)])
    groups, engine = talk(config, pool, lambda seen, seed: said if seen.count("<|assistant|>") == 1 else "No.")
    (one,) = groups[0].completions
    assert one.failure is None and one.calls == {"malformed": 2, "unknown": 1, "failed": 1, "timed_out": 1, "done": 1}
    for text in ("no valid JSON", "there is no tool 'sub'", "missing arguments: b", "RuntimeError: an unlucky number"):
        assert f"<result>Error: {text}" in engine.seen[1] or text in engine.seen[1]
    assert engine.waited > 1.5, "a timeout is a wait for tools"
    assert "gave no answer within 2 s" in engine.seen[1] and "<result>3 for you 0" in engine.seen[1]

    table = GroupTable.from_bytes(GroupTable.of(list(groups.values()), 0).to_bytes())
    assert tool_calls(table) == {
        "tool_calls": 6.0,
        "tool_calls/unknown": 1 / 6,
        "tool_calls/malformed": 2 / 6,
        "tool_calls/failed": 1 / 6,
        "tool_calls/timed_out": 1 / 6,
    }
    again = Group.from_json(groups[0].to_json())
    assert again.completions[0].calls == one.calls
    assert tool_calls(GroupTable.of([again.with_completions(())], 0)) == {}


def test_it_ends_after_so_many_messages_and_where_no_token_is_left(config: Config, pool: RewardPool) -> None:
    groups, engine = talk(config, pool, lambda seen, seed: call(a=1, b=2))
    (one,) = groups[0].completions
    assert len(engine.seen) == 3 == one.turns and one.calls == {"done": 3}
    assert one.environment is not None and one.environment[-1] == 0 and one.failure is None
    groups, engine = talk(config, pool, lambda seen, seed: call(a=1, b=2), room=100)
    (one,) = groups[0].completions
    assert one.finish_reason == "length" and one.turns == 1 and len(one.tokens) <= 100
    # What is cut off may be half a call: none of it is made.
    groups, _ = talk(config, pool, lambda seen, seed: call(a=1, b=2) + "and so on", room=50)
    assert groups[0].completions[0].finish_reason == "length" and groups[0].completions[0].calls == {}


def test_what_calls_no_tool_is_the_environments(tmp_path: Path) -> None:
    name = f"environment.name={tmp_path / 'own.py'}:Critic"
    config = scripted.settings(tmp_path, name)

    def says(seen: str, seed: int) -> str:
        return call(a=1, b=2) if seen.count("<|assistant|>") in (1, 3) else "Three."

    with turn_pool(config, 1) as pool:
        groups, engine = talk(config, pool, says)
    (one,) = groups[0].completions
    assert one.turns == 4 and one.calls == {"done": 2} and one.reward_parts == {"environment": 0.75}
    assert "<|user|>Are you sure?<|end|>" in engine.seen[2] and len(engine.seen) == 4


def test_turns_with_calls_are_in_the_journal(config: Config, pool: RewardPool, tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, fingerprint="f", rollout=0)
    groups, _ = talk(
        config,
        pool,
        lambda seen, seed: call(a=1, b=2) if seen.count("<|assistant|>") == 1 else "Three.",
        journal=journal,
    )
    ((first, last),) = read_turns(tmp_path, "f").values()
    assert [type(one) for one in first.calls] == [CallRecord] and first.calls[0].result.startswith("3 for you 0")
    assert (first.over, first.reply, last.over, last.calls) == (False, "", True, ())
    again, engine = talk(config, pool, lambda seen, seed: "never asked", journal=journal)
    journal.close()
    assert not engine.seen and np.array_equal(again[0].completions[0].tokens, groups[0].completions[0].tokens)
    assert again[0].completions[0].calls == {"done": 1}


def test_a_result_has_the_name_of_its_tool(config: Config) -> None:
    """Templates of Hermes refuse one without."""
    named = scripted.TEMPLATE.replace("<result>", "<result>{{ m.name if m.name else raise_exception('no name') }}: ")
    made, data = scripted.tokenizer(), Data(chat_template_kwargs={"chat_template": named})
    replies = Replies(made, data, tools.shown(config.environment), users=False)
    found = made.decode(replies.tokens([("add", "7"), ("look", "x")], made.convert_tokens_to_ids("<|end|>")))
    assert found == "<|user|><result>add: 7</result><result>look: x</result><|end|><|assistant|>"


@pytest.mark.parametrize("template", ["{{ messages[0].content }}{{ tools }}", "{{ raise_exception('no') }}{{ tools }}"])
def test_templates_that_do_not_fit_are_refused(config: Config, template: str) -> None:
    made, data = scripted.tokenizer(), Data(chat_template_kwargs={"chat_template": template})
    with pytest.raises(ValueError, match="environment: the chat template takes no reply after an answer"):
        Replies(made, data, tools.shown(config.environment), users=False)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child(tmp_path)
    yield made
    made.close()


def test_a_killed_rollout_goes_on_behind_its_last_call(tmp_path: Path, child: Child) -> None:
    """Its tools are random, so a call that is made again gives another conversation; what the journal has is kept."""
    turns = tmp_path / "000000" / "rank-0000.turns"
    known: dict[tuple[int, int], list[str]] = {}

    def read() -> dict[tuple[int, int], list[str]]:
        return {key: [one.to_json() for one in found] for key, found in read_turns(turns.parent, "f").items()}

    def has(lines: int) -> bool:
        return turns.exists() and turns.read_bytes().count(b"\n") > lines

    for lines in (10, 50, 80):
        assert child.run(partial(has, lines)) == signal.SIGKILL
        found = read()
        assert all(found[key][: len(before)] == before for key, before in known.items())
        known = found
    assert sum(map(len, known.values())) < 4 * 4 * 6, "killed between turns"
    before = (tmp_path / "asked").read_text().count("\n")
    assert child.run() == 0
    asked = (tmp_path / "asked").read_text().count("\n") - before
    assert all(read()[key][: len(kept)] == kept for key, kept in known.items())
    every = read_turns(turns.parent, "f")
    made = [one for key in every for turn in every[key][len(known.get(key, ())) :] for one in turn.calls]
    again = asked - sum(one.outcome in ("done", "failed") for one in made)
    assert 0 <= again <= 2, "only calls that the journal lacked; processes of the killed one may have noted their last"
    for group in groups_of(tmp_path):
        for sample, completion in enumerate(group["completions"]):
            recorded = [one for turn in every[group["slot"], sample] for one in turn.calls]
            assert sum(completion["calls"].values()) == len(recorded)
            assert all(f"> {one.result}" in completion["text"] for one in recorded)

    whole, asked_so_far = (tmp_path / "groups").read_bytes(), (tmp_path / "asked").read_bytes()
    assert child.run() == 0, "from the journal alone"
    assert (tmp_path / "groups").read_bytes() == whole and (tmp_path / "asked").read_bytes() == asked_so_far
