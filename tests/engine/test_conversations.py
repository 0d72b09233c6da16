"""Conversations of a real engine with a real environment in its own processes (half a minute, for an engine's start).

It would catch tokens that are not those that were sampled, log-probs of another context than the whole conversation, a
mask that trains on an environment's words, a reply that another template would give, an environment that is asked twice
for what the journal has, a failure that costs more than its conversation, and a conversation that goes on in another
rollout otherwise than it stood.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import transformers
from safetensors.torch import load_file

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Data
from gspo_hpc.data.records import UNFINISHED, Completion, Group, Prompt
from gspo_hpc.data.replies import Replies
from gspo_hpc.engine.engine import Engine, EngineDied, EngineSettings, Sampling
from gspo_hpc.ops.weight_parts import stream_of
from gspo_hpc.rewards.environments.turns import turn_pool
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.results import RewardResult
from gspo_hpc.rollout.conversations import Conversations, turn_seed
from gspo_hpc.rollout.generation import as_graded, with_rewards
from gspo_hpc.runs.journal import Journal, read_turns

FILE = '''
import random
import time


class Quiz:
    """Asks sums, three at most, and says how it liked the answer: nobody could say it again."""

    def __init__(self, asked):
        self.asked = asked

    def reset(self, fields, seed):
        return {"left": fields["turns"], "seed": seed}

    def step(self, state, message):
        with open(self.asked, "a") as file:
            file.write("asked\\n")
        if state["left"] == "broken":
            raise RuntimeError("nobody is at home")
        if state["left"] == "hangs":
            time.sleep(3)
            return {"reward": 7.0}
        if state["left"] == 0:
            return {"reward": random.SystemRandom().random()}
        left = {**state, "left": state["left"] - 1}
        return {"reply": f"What is {state['left']} + 1?", "reward": random.SystemRandom().random(), "state": left}

    def score_group(self, fields, conversations):
        assert all(one["state"]["left"] == 0 for one in conversations)
        return [float(len(one["text"])) for one in conversations]
'''
TEXT = "<|user|>What is 3 + 4?<|assistant|>"
SAMPLING = Sampling(temperature=1.0, max_tokens=100)
TURNS = 5


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_folder / "model")


@pytest.fixture(scope="module")
def engine(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    made = Engine(
        EngineSettings(str(tiny_folder / "model"), max_model_len=128, kv_cache_gb=0.03, threads=2, log_path=log)
    )
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiz") / "asked"


@pytest.fixture(scope="module")
def pool(asked: Path) -> Iterator[RewardPool]:
    file = asked.with_name("quiz.py")
    file.write_text(FILE)
    words = [f"environment.name={file}:Quiz", f"environment.args={{asked: '{asked}'}}", "environment.workers=2"]
    with turn_pool(loader.load(None, words, run_code=True), 1) as made:
        yield made


def talk(
    engine: Engine,
    pool: RewardPool,
    tokenizer: Any,
    turns: dict[int, Any],
    *,
    journal: Journal | None = None,
    sampling: Sampling = SAMPLING,
    limit: int = TURNS,
) -> tuple[dict[int, Group], dict[int, list[tuple[float | None, str | None]]]]:
    """Return the groups of four conversations by slot, each of so many questions; and what the environment gave."""
    made = Conversations(engine, pool, Replies(tokenizer, Data()), limit, slots=turns, journal=journal)
    tokens = np.asarray(tokenizer(TEXT, add_special_tokens=False)["input_ids"], dtype=np.int32)
    for slot, count in turns.items():
        made.submit(slot, Prompt(slot, tokens, TEXT, {"turns": count}), [100 * slot + i for i in range(4)], sampling)
    groups, given, deadline = {}, {}, time.monotonic() + 240
    while made.pending:
        assert time.monotonic() < deadline
        try:
            for group in made.step():
                groups[group.slot] = group
                given[group.slot] = [(one.environment_reward, one.failure) for one in as_graded(group)]
        except EngineDied:
            engine.restart()
            engine.update_weights(stream_of(load_file(Path(engine.settings.model_path) / "model.safetensors").items()))
            engine.resubmit()
    return groups, given


def messages(one: Completion) -> list[np.ndarray]:
    """Return the places of each message of the model."""
    return [part for part in np.split(one.sampled, np.flatnonzero(np.diff(one.sampled) > 1) + 1) if len(part)]


def same(one: Completion, other: Completion) -> bool:
    arrays = ("tokens", "logprobs", "environment")
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
    return equal and (one.text, one.finish_reason, one.seed) == (other.text, other.finish_reason, other.seed)


def test_a_conversation_is_what_was_sampled_and_what_the_template_puts_between(
    engine: Engine, pool: RewardPool, tokenizer: Any
) -> None:
    groups, given = talk(engine, pool, tokenizer, {0: 2, 1: 0})
    for one in groups[0].completions:
        parts = messages(one)
        assert len(parts) == 3 and one.environment is not None and one.environment[-1] == 0 == one.environment[0]
        assert len(one.logprobs) == len(one.sampled) < len(one.tokens)
        texts = [tokenizer.decode(one.tokens[part], skip_special_tokens=True) for part in parts]
        said = [
            tokenizer.decode(one.tokens[part]).removesuffix(tokenizer.eos_token) for part in parts
        ]  # special tokens too
        spoken: list[dict[str, str]] = [{"role": "user", "content": "What is 3 + 4?"}]
        for number, text in enumerate(said):
            spoken += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"What is {2 - number} + 1?"},
            ]
        whole = tokenizer.apply_chat_template(spoken[:-1], tokenize=False)
        assert TEXT + tokenizer.decode(one.tokens) == whole.rstrip("\n"), "the template of the whole conversation"
        assert one.text.splitlines() == [texts[0], "> What is 2 + 1?", texts[1], "> What is 1 + 1?", texts[2]]
    for one in groups[1].completions:
        assert one.environment is None and len(messages(one)) == 1
    assert all(reward is not None and failure is None for rewards in given.values() for reward, failure in rewards)
    rewards = [reward for reward, _ in given[0]]
    assert len(set(rewards)) == 4 and 0 < min(map(float, rewards)) <= max(map(float, rewards)) < 3  # type: ignore[arg-type]


def test_log_probs_are_those_of_the_whole_conversation_and_seeds_those_of_its_turns(
    engine: Engine, pool: RewardPool, tokenizer: Any
) -> None:
    groups, _ = talk(engine, pool, tokenizer, {2: 2})
    prompt = groups[2].prompt.tokens
    for one in groups[2].completions:
        whole = np.concatenate((prompt, one.tokens))
        (found,) = engine.prompt_logprobs([whole.tolist()])
        np.testing.assert_allclose(one.logprobs, found[len(prompt) - 1 :][one.sampled], atol=1e-4)
        for turn, part in enumerate(messages(one)):  # as if it had been asked for by itself
            before = np.concatenate((prompt, one.tokens[: part[0]]))
            left = Sampling(temperature=1.0, max_tokens=SAMPLING.max_tokens - int(part[0]))
            engine.submit(900, Prompt(0, before, "", {}), [turn_seed(one.seed, turn)], left)
            (alone,) = [group for _ in range(200) if engine.pending for group in engine.step()]
            assert np.array_equal(alone.completions[0].tokens, one.tokens[part])
    assert turn_seed(7, 0) == 7 and len({turn_seed(7, turn) for turn in range(100)}) == 100


@pytest.mark.parametrize(("limit", "room", "ends"), [(2, 100, "stop"), (5, 30, "length"), (1, 100, "stop")])
def test_it_ends_after_so_many_messages_and_where_no_token_is_left(
    engine: Engine, pool: RewardPool, tokenizer: Any, limit: int, room: int, ends: str
) -> None:
    """The last token is the model's in any case."""
    groups, given = talk(
        engine, pool, tokenizer, {3: 50}, sampling=Sampling(temperature=1.0, max_tokens=room), limit=limit
    )
    for one in groups[3].completions:
        assert len(one.tokens) <= room and (one.environment is None or one.environment[-1] == 0)
        assert one.finish_reason == ends and len(messages(one)) <= limit
        assert len(messages(one)) == limit or ends == "length"
    assert all(reward is not None for reward, _ in given[3])


def test_an_environment_that_fails_costs_its_conversation(engine: Engine, pool: RewardPool, tokenizer: Any) -> None:
    groups, given = talk(engine, pool, tokenizer, {4: "broken", 5: 1})
    assert all(reward is None and "raised RuntimeError: nobody is at home" in str(why) for reward, why in given[4])
    assert all(len(messages(one)) == 1 for one in groups[4].completions)  # what was said stays
    assert all(reward is not None for reward, _ in given[5])


def test_what_the_journal_has_is_asked_of_nobody_again(
    engine: Engine, pool: RewardPool, tokenizer: Any, asked: Path, tmp_path: Path
) -> None:
    """The rollout was interrupted: some turns are there, and a torn line. Random rewards stay what they were."""
    whole = Journal(tmp_path / "whole", 0, fingerprint="of these weights", rollout=3)
    groups, given = talk(engine, pool, tokenizer, {6: 3, 7: 2}, journal=whole)
    whole.close()
    lines = (tmp_path / "whole" / "rank-0000.turns").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 4 * 4 + 4 * 3
    kept = lines[: 1 + 13]
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "rank-0001.turns").write_bytes(b"".join(kept) + lines[14][:40])
    known = read_turns(tmp_path / "cut", "of these weights")
    assert sum(map(len, known.values())) == 13 and not read_turns(tmp_path / "cut", "of others")

    asked.unlink()
    again = Journal(tmp_path / "cut", 0, fingerprint="of these weights", rollout=3)
    later, now = talk(engine, pool, tokenizer, {6: 3, 7: 2}, journal=again)
    again.close()
    assert asked.read_text().count("asked") == 28 - 13
    ends = {key: sum(record.reward for record in turns) for key, turns in known.items() if turns[-1].over}
    for slot in (6, 7):
        for sample, (one, other) in enumerate(zip(groups[slot].completions, later[slot].completions, strict=True)):
            assert same(one, other)
            assert other.seed == one.seed
            if (slot, sample) in ends:
                assert now[slot][sample] == given[slot][sample]
    every = read_turns(tmp_path / "cut", "of these weights")
    assert {key: len(turns) for key, turns in every.items()} == {
        (slot, sample): count for slot, count in ((6, 4), (7, 3)) for sample in range(4)
    }


def test_an_engine_that_dies_says_the_same_again(
    engine: Engine, pool: RewardPool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, _ = talk(engine, pool, tokenizer, {8: 3})
    step, calls = engine.step, []

    def dies() -> list[Group]:
        calls.append(1)
        if len(calls) == 9:
            for process in engine.pids():
                psutil.Process(process).kill()
        return step()

    monkeypatch.setattr(engine, "step", dies)
    again, _ = talk(engine, pool, tokenizer, {8: 3})
    assert len(calls) > 9
    assert all(same(one, other) for one, other in zip(straight[8].completions, again[8].completions, strict=True))


def test_turns_of_another_past_are_left_out(
    engine: Engine, pool: RewardPool, tokenizer: Any, asked: Path, tmp_path: Path
) -> None:
    """As behind a damaged line, after which the conversation went on otherwise; and what the journal has twice."""
    journal = Journal(tmp_path, 0, fingerprint="f", rollout=1)
    first, _ = talk(engine, pool, tokenizer, {9: 2}, journal=journal)
    found = read_turns(tmp_path, "f")[9, 0]
    assert [turn.turn for turn in found] == [0, 1, 2]
    other = replace(found[1], tokens=found[1].tokens[:1], logprobs=found[1].logprobs[:1], reply="Another?")
    journal.close()
    (tmp_path / "rank-0000.turns").unlink()
    journal = Journal(tmp_path, 0, fingerprint="f", rollout=1)
    journal.append_turns([found[0], other, found[1], found[2]])  # the third followed the second, not the other
    assert [turn.reply for turn in read_turns(tmp_path, "f")[9, 0]] == [found[0].reply, "Another?", ""]
    assert not read_turns(tmp_path, "f", slots=[8]) and read_turns(tmp_path, "f", slots=[9])
    asked.unlink()
    again, _ = talk(engine, pool, tokenizer, {9: 2}, journal=journal)
    journal.close()
    one, same_sample = again[9].completions[0], first[9].completions[0]
    assert "> Another?" in one.text and not np.array_equal(one.tokens, same_sample.tokens)
    assert asked.read_text().count("asked") == 3 * 3 + 1

    (tmp_path / "gap").mkdir()
    made = Journal(tmp_path / "gap", 0, fingerprint="f", rollout=1)
    made.append_turns([found[0], found[2]])
    made.close()
    assert [turn.turn for turn in read_turns(tmp_path / "gap", "f")[9, 0]] == [0]

    (tmp_path / "behind").mkdir()
    made = Journal(tmp_path / "behind", 0, fingerprint="f", rollout=1)
    made.append_turns(found[1:])  # as of a conversation that an earlier rollout began, which this one is not
    anew, _ = talk(engine, pool, tokenizer, {9: 2}, journal=made)
    made.close()
    assert all(same(one, other) for one, other in zip(anew[9].completions, first[9].completions, strict=True))


@pytest.mark.parametrize("scores_groups", [False, True])
def test_conversations_that_are_stopped_go_on_where_they_stood(
    scores_groups: bool, engine: Engine, pool: RewardPool, tokenizer: Any, asked: Path, tmp_path: Path
) -> None:
    """They are stopped again and again, each time by way of a file; whoever samples greedily says the same all along.

    Every other time the rollout is killed before it ends, and what its journal has is asked of nobody again.
    """
    greedy, counts = Sampling(temperature=0.0, max_tokens=100), {0: 3, 1: 2, 2: 0}
    straight, _ = talk(engine, pool, tokenizer, counts, sampling=greedy)
    asked.unlink()
    tokens = np.asarray(tokenizer(TEXT, add_special_tokens=False)["input_ids"], dtype=np.int32)
    left: dict[int, str] = {}
    finished: dict[int, Group] = {}
    dropped = 0  # questions that nobody waited for any more
    standing: list[str] = []  # the last message's reason to end, of all conversations that were stopped
    for rollout in range(100):
        for killed in (True, False):
            journal = Journal(tmp_path / f"{rollout}", 0, fingerprint="f", rollout=rollout)
            made = Conversations(
                engine,
                pool,
                Replies(tokenizer, Data()),
                TURNS,
                slots=counts,
                journal=journal,
                scores_groups=scores_groups,
                weights_version=lambda version=rollout: version,  # type: ignore[misc]
            )
            for slot, count in counts.items():
                begun = Group.from_json(left[slot]).completions if slot in left else ()
                seeds = [1000 * rollout + 100 * slot + i for i in range(4)]
                if slot not in finished:
                    prompt = Prompt(slot, tokens, TEXT, {"turns": count})
                    made.submit(slot, prompt, seeds, greedy, begun=begun, may_stop=True)
            now = {}
            for _ in range(2 + rollout % 3):
                now |= {group.slot: group for group in made.step()}
            if killed:
                dropped += pool.pending
                made.abort()
            else:
                finished |= now
                stopped = made.stop()
                left = {group.slot: group.to_json() for group in stopped}
                for one in (one for group in stopped for one in group.completions):
                    assert one.standing is not None and one.standing.seed < 1000, "the environment's is the first"
                    standing += [one.standing.finish_reason] if one.finish_reason == UNFINISHED else []
            journal.close()
            assert made.pending == engine.pending == pool.pending == 0
        if len(finished) == len(counts):
            break
    assert len(finished) == len(counts) and rollout > 5, rollout
    assert standing.count("unfinished") > 10 and standing.count("stop") > 0, "some wait for the environment's answer"
    given: dict[tuple[int, int], list[float]] = {}  # what the environment gave for each turn, by slot and sample
    for number in range(rollout + 1):
        for key, turns in read_turns(tmp_path / f"{number}", "f").items():
            given.setdefault(key, []).extend(turn.reward for turn in turns)
    for slot, group in finished.items():
        for sample, (one, other) in enumerate(zip(group.completions, straight[slot].completions, strict=True)):
            assert len(given[slot, sample]) == counts[slot] + 1
            assert np.array_equal(one.tokens, other.tokens) and one.text == other.text
            assert (one.environment is None) == (other.environment is None)
            assert one.environment is None or np.array_equal(one.environment, other.environment)
            assert (one.finish_reason, one.standing) == (other.finish_reason, None)
            assert one.reward == pytest.approx(len(one.text) if scores_groups else sum(given[slot, sample]))
            assert sum(count for _, count in one.pieces) == len(one.logprobs) == len(one.sampled)
            versions = [version for version, _ in one.pieces]
            assert versions == sorted(set(versions)) and len(versions) > 1
    answers = sum(4 * (count + 1) for count in counts.values())
    # Of an answer that was still to come when its rollout was left or killed, the question is asked once more.
    assert answers <= asked.read_text().count("asked") <= answers + dropped + standing.count("stop")


def test_what_is_dropped_comes_to_no_later_call(engine: Engine, pool: RewardPool, tokenizer: Any) -> None:
    """The environment still has a message when the call is stopped; the next call has the same slots."""
    made = Conversations(engine, pool, Replies(tokenizer, Data()), TURNS)
    tokens = np.asarray(tokenizer(TEXT, add_special_tokens=False)["input_ids"], dtype=np.int32)
    made.submit(0, Prompt(0, tokens, TEXT, {"turns": "hangs"}), [1], SAMPLING)
    while not pool.pending:
        assert made.step() == []
    began = time.monotonic()
    made.abort()
    assert made.pending == pool.pending == 0 and time.monotonic() - began < 2.0
    _, given = talk(engine, pool, tokenizer, {0: 0})
    assert all(reward is not None and reward < 1.0 for reward, _ in given[0])


def test_a_stop_makes_no_failures(engine: Engine, pool: RewardPool, tokenizer: Any) -> None:
    made = Conversations(engine, pool, Replies(tokenizer, Data()), TURNS, stop_requested=lambda: True)
    tokens = np.asarray(tokenizer(TEXT, add_special_tokens=False)["input_ids"], dtype=np.int32)
    made.submit(0, Prompt(0, tokens, TEXT, {"turns": "broken"}), [1], SAMPLING)
    until = time.monotonic() + 10
    while (engine.pending or pool.pending) and time.monotonic() < until:
        assert made.step() == []
    assert made.pending == 1
    made.abort()


def test_a_failed_environment_is_a_failure_whatever_else_is_graded(
    engine: Engine, pool: RewardPool, tokenizer: Any
) -> None:
    groups, _ = talk(engine, pool, tokenizer, {4: "broken"})
    for results in ({}, {place: RewardResult(1.0, {"exact_match": 1.0}, None) for place in range(4)}):
        graded = with_rewards(groups[4], results, "exclude").completions
        assert all(one.excluded and one.reward == 0.0 and "nobody is at home" in str(one.failure) for one in graded)
    assert not any(one.excluded for one in with_rewards(groups[4], {}, "zero").completions)


PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %} <|end|>{% endif %}{% endfor %}"
)
LAST = "{% for m in messages %}{{ m.content }}{% if not loop.last %}<|end|>{% else %}<|unk|>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PLAIN + "{% if add_generation_prompt %}[assistant]{% endif %}", "[user]go on[assistant]"),
        # Only the last message of the model ends otherwise.
        (LAST, "go on<|unk|>"),
    ],
)
def test_what_follows_the_end_that_was_sampled(template: str, text: str, tokenizer: Any) -> None:
    """Once: also where the template has a space before it, or another end for the last message."""
    replies = Replies(tokenizer, Data(chat_template_kwargs={"chat_template": template}))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert replies.tokens("go on", end) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}"]
)
def test_a_template_without_a_place_for_a_reply_is_refused(template: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="environment: the chat template takes no reply after an answer"):
        Replies(tokenizer, Data(chat_template_kwargs={"chat_template": template}))
