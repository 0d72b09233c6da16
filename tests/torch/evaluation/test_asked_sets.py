"""The requests of an evaluation with several sets, and its scores, on two ranks that hold other groups (3 s).

It would catch a set that is sampled as another is, prompts of one set that count for another, a set that is asked more
often than its setting says, and scores that the stored file cannot give again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import replace
from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.data.sources.unseen import by_set
from gspo_hpc.engine.engine import Sampling
from gspo_hpc.evaluation import evaluate, stored
from gspo_hpc.evaluation.scores import Scores
from gspo_hpc.exchange.exchange import Exchange
from gspo_hpc.exchange.transport import Transport
from gspo_hpc.rollout.generation import Request
from gspo_hpc.training import phases
from gspo_hpc.training.jobs import evaluate as evaluate_job
from tests.torch.exchange.ranks import on_ranks

CONFIG = from_dict(
    {
        "reward": {"functions": [{"function": "number_match"}, {"function": "regex", "args": {"pattern": "x"}}]},
        "rollout": {"max_response_length": 100},
        "eval": {"samples": 2, "max_prompts": 3},
        "data": {
            "eval_sets": [
                {"name": "alike", "files": "a.jsonl"},
                {"name": "often", "files": "b.jsonl", "samples": 4, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
                {"name": "short", "files": "c.jsonl", "samples": 1, "max_tokens": 8, "rewards": {"regex": 1}},
            ]
        },
    }
)


def prompt(number: int, name: str | None) -> Prompt:
    fields: dict[str, Any] = {"answer": number} | ({} if name is None else {"data_source": name})
    return Prompt(number, np.zeros(2, np.int32), f"question {number}", fields)


# In the order of files: five of no set, two of each set; `other` is a source of somebody else's data.
NAMES = [None, None, "other", None, None, "alike", "alike", "often", "often", "short", "short"]
ASKED = by_set([prompt(number, name) for number, name in enumerate(NAMES)], CONFIG)


def completion(one: Prompt, index: int) -> Completion:
    """Answers are right for even prompts; of `short`, both functions say other things."""
    right, tokens = one.index % 2 == 0, np.arange(one.index + 1, dtype=np.int32)
    parts = {"number_match": float(right)} if one.fields.get("data_source") != "short" else {"regex": float(not right)}
    return Completion(tokens, np.zeros(len(tokens), np.float32), str(one.index + index), "stop", 0, reward_parts=parts)


def evaluated() -> tuple[Scores, list[dict[str, Any]], list[tuple[Sampling, int, list[str]]]]:
    """The scores that two ranks agree on, the rows, and what was asked: sampling, number, and names of sets."""
    every = [one for own in ASKED.values() for one in own]

    def work(link: Transport) -> Any:
        asked: list[tuple[Sampling, int, list[str]]] = []

        def generate(request: Request) -> Any:
            asked.append((request.sampling, request.samples, [f"{every[slot].index}" for slot in request.slots]))
            groups = {
                slot: Group(slot, every[slot], tuple(completion(every[slot], i) for i in range(request.samples)))
                for slot in request.slots
                if slot % 2 == link.rank
            }
            return SimpleNamespace(own=groups)

        exchange = Exchange(link)
        worker: Any = SimpleNamespace(ranks=SimpleNamespace(exchange=exchange), generate=generate)
        sizes = {name: len(own) for name, own in ASKED.items()}
        found = evaluate.run(worker, [] if link.rank else every, sizes, CONFIG)
        return found.scores, evaluate.rows(exchange, found, CONFIG, 20), asked

    first, second = on_ranks(2, work)
    assert second == (first[0], [], first[2])
    return first


def test_each_set_is_sampled_as_it_says() -> None:
    assert {name: [one.index for one in own] for name, own in ASKED.items()} == {
        "": [0, 1, 2],
        "alike": [5, 6],
        "often": [7, 8],
        "short": [9, 10],
    }
    _, _, asked = evaluated()
    assert asked == [
        (Sampling(0.0, 1.0, -1, 100), 1, ["0", "1", "2", "5", "6", "7", "8"]),
        (Sampling(0.0, 1.0, -1, 8), 1, ["9", "10"]),
        (Sampling(1.0, 1.0, -1, 100), 2, ["0", "1", "2", "5", "6"]),
        (Sampling(0.6, 0.95, 20, 100), 4, ["7", "8"]),
    ]


def test_a_set_may_have_another_number_of_prompts() -> None:
    first, *others = CONFIG.data.eval_sets
    sets = (replace(first, max_prompts=1), *others)
    fewer = replace(CONFIG, data=replace(CONFIG.data, eval_sets=sets))
    found = by_set([prompt(number, name) for number, name in enumerate(NAMES)], fewer)
    assert {name: len(own) for name, own in found.items()} == {"": 3, "alike": 1, "often": 2, "short": 2}


def test_scores_are_by_set_and_those_of_the_file(tmp_path: Path) -> None:
    scores, rows, _ = evaluated()
    stored.write(tmp_path / "kept.jsonl", rows)
    found = stored.read(tmp_path / "kept.jsonl")
    assert found.scores() == scores and found.parts == ("alike", "often", "short")
    assert Counter(one.part for one in found.prompts) == {"": 3, "alike": 2, "often": 2, "short": 2}
    assert [one.decides for one in found.prompts] == ["number_match"] * 7 + ["regex"] * 2
    assert scores["eval/accuracy"] == 5 / 9 and scores["eval/avg@2"] == 0.6
    assert scores["eval/avg@4"] == scores["eval/often/avg@4"] == scores["eval/often/maj@4"] == 0.5
    # Of `short`, prompt 9 is right: regex decides. It has no answers that could be counted, and no samples.
    assert scores["eval/short/accuracy"] == 0.5 and not any(name.startswith("eval/short/avg") for name in scores)
    assert scores["eval/alike/response_length"] == 6.5 and scores["eval/short/response_length"] == 10.5


def test_the_console_and_the_command_name_the_sets() -> None:
    scores, rows, _ = evaluated()
    told = phases.told(scores, len(rows))
    assert told == "accuracy 0.556 on 9 unseen prompts (alike 0.500, often 0.500, short 0.500)"
    page = evaluate_job.shown(len(rows), scores, "", as_json=False)
    assert ["often/maj@4_high", f"{scores['eval/often/maj@4_high']:.4f}"] in [
        line.split() for line in page.splitlines()
    ]
    assert len({line.rfind(" ") for line in page.splitlines()}) == 1, "the numbers stand in one column"
