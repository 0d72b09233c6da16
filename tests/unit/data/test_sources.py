"""Several sources of prompts: which rows are used, how sources are mixed, what a pass rate weighs (15 s).

It would catch a mixture that depends on how it is drawn or resumed, a source without its share, a prompt that comes
twice in a rollout, a condition or a rename that keeps other rows, and a mistake in a config that names nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config.loader import ConfigError, from_dict
from gspo_hpc.config.schema import Config, Data
from gspo_hpc.data.prompts import Position, PromptStream, build_prompts, prior_rates
from gspo_hpc.data.prompts import sizes as prompt_sizes
from gspo_hpc.data.records import Prompt
from gspo_hpc.data.retired import PassRates, Retirement
from gspo_hpc.data.rows import Row, load_parts
from gspo_hpc.data.sources import mixing, parts, selection, stream
from gspo_hpc.data.sources.sizes import sizes
from gspo_hpc.data.sources.stream import MixedStream
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.runs import same_run
from gspo_hpc.runs.directory import open_run

WEIGHTS = st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 20)), min_size=1, max_size=5)


def merged(weights: list[float], count: int) -> list[int]:
    """The first draws, by sorting the times of all that may be among them."""
    most = [int(count * weight / sum(weights)) + len(weights) + 3 for weight in weights]
    times = [((i + 0.5) / weight, place) for place, weight in enumerate(weights) for i in range(most[place])]
    return [place for _, place in sorted(times)[:count]]


@settings(deadline=None, max_examples=200)
@given(WEIGHTS, st.integers(0, 200), st.integers(1, 30))
def test_draws_follow_from_weights_and_number(weights: list[float], count: int, window: int) -> None:
    order = merged(weights, count)
    draws, stepwise = [0] * len(weights), list[int]()
    for _ in range(count):
        stepwise.append(mixing.next_source(draws, weights, range(len(weights))))
        draws[stepwise[-1]] += 1
    assert stepwise == order and mixing.draws_after(weights, count) == draws
    for place, weight in enumerate(weights):
        assert abs(draws[place] - count * weight / sum(weights)) <= len(weights)
        in_a_row = [order[i : i + window].count(place) for i in range(max(1, count - window + 1))]
        assert max(in_a_row) <= mixing.most_of(weights, place, window)


def config_of(count: int, **data: Any) -> Config:
    sources = [{"name": f"s{place}", "files": f"{place}.jsonl"} for place in range(count)]
    return from_dict({"run": {"seed": data.pop("seed", 42)}, "data": {"sources": sources, **data}})


def mixed(lengths: list[int], weights: list[float], wanted: int, **data: Any) -> MixedStream:
    config = config_of(len(lengths), **data)
    weighed = [
        one.model_copy(update={"weight": weight}) for one, weight in zip(config.data.sources, weights, strict=True)
    ]
    config = config.model_copy(update={"data": config.data.model_copy(update={"sources": tuple(weighed)})})
    found = stream.of(config, {f"s{i}": n for i, n in enumerate(lengths)}, wanted, lambda size: max(wanted, size // 2))
    assert isinstance(found, MixedStream)
    return found


def restored(position: Position) -> Position:
    return Position.from_dict(json.loads(json.dumps(position.to_dict())))


@settings(deadline=None, max_examples=120)
@given(st.data(), WEIGHTS, st.integers(1, 12), st.booleans(), st.sampled_from([None, 0.2, 1.0]))
def test_a_mixture_is_the_same_however_it_is_drawn_and_resumed(
    data: st.DataObject, weights: list[float], wanted: int, shuffle: bool, floor: float | None
) -> None:
    least = [mixing.most_of(weights, place, wanted) for place in range(len(weights))]
    lengths = [data.draw(st.integers(one, one + 8)) for one in least]
    options = {"shuffle": shuffle, "curriculum_floor": floor, "seed": data.draw(st.integers(0, 2**40))}
    made, position = mixed(lengths, weights, wanted, **options), Position()
    begins = [*made.begins, sum(lengths)]
    drawn = list[int]()
    for number in range(8):
        count = data.draw(st.integers(1, wanted))  # dynamic sampling may use fewer than it draws
        if made.left(position.retired) < wanted:
            break
        indices, after = made.take(position, wanted)
        used, middle = mixed(lengths, weights, wanted, **options).take(restored(position), count)
        assert used == indices[:count], "a resumed run draws the same, and in any portions"
        # Once a source is used up, others take its place, and may be asked for more than they have.
        assert len(set(indices)) == wanted or position.retired, "no prompt comes twice in a rollout"
        if count < wanted and not floor and not position.retired:
            rest, end = made.take(middle, wanted - count)
            assert used + rest == indices and end == after
        drawn += used
        rates = {index: data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for index in used}
        more = [Retirement(index, number, 1.0) for index in used if data.draw(st.integers(0, 9)) == 0]
        position = middle.__class__(
            middle.epoch,
            middle.offset,
            middle.retired.with_more(more),
            middle.rates.with_more(rates) if floor else middle.rates,
            middle.parts,
        )
        assert not {one.prompt for one in position.retired.prompts} & set(
            made.take(position, 1)[0] if made.left(position.retired) else []
        )
    if not position.retired:
        assert [sum(index >= begin for begin in begins) - 1 for index in drawn] == merged(weights, len(drawn))


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(0, 2**40))
def test_a_source_is_gone_through_as_if_it_were_alone(weights: list[float], seed: int) -> None:
    """Every prompt of a source comes once an epoch, whatever the others are."""
    lengths = [mixing.most_of(weights, place, 4) + 3 for place in range(len(weights))]
    made, position = mixed(lengths, weights, 4, seed=seed), Position()
    drawn = list[int]()
    for _ in range(30):
        indices, position = made.take(position, 4)
        drawn += indices
    for begin, length in zip(made.begins, lengths, strict=True):
        own = [index - begin for index in drawn if begin <= index < begin + length]
        for epoch in range(len(own) // length):
            assert sorted(own[epoch * length : (epoch + 1) * length]) == [*range(length)]
    assert made.epochs(position) == {
        name: sum(begin <= index < begin + length for index in drawn) / length
        for name, begin, length in zip(made.names, made.begins, lengths, strict=True)
    }


def test_the_mixture_is_the_same_in_every_version() -> None:
    made = mixed([8, 5], [2.0, 1.0], 6)
    first, position = made.take(Position(), 6)
    second, _ = made.take(position, 6)
    assert (first, second) == PINNED
    assert (
        mixed([8, 8], [1.0, 1.0], 4).take(Position(), 16)[0]
        != mixed([8, 8], [1.0, 1.0], 4, seed=1).take(Position(), 16)[0]
    )
    both = mixed([8, 8], [1.0, 1.0], 4).take(Position(), 16)[0]
    assert [one for one in both if one < 8] != [one - 8 for one in both if one >= 8], "each has an order of its own"


PINNED = ([4, 12, 1, 3, 9, 6], [0, 10, 7, 2, 11, 5])


def test_a_source_without_prompts_left_gives_its_place_to_the_others() -> None:
    made = mixed([4, 40], [1.0, 1.0], 4)
    retired = Position().retired.with_more(Retirement(index, 0, 1.0) for index in range(3))
    indices, _ = made.take(Position(retired=retired), 12)
    assert all(index >= 4 for index in indices) and made.left(retired) == 40
    with pytest.raises(ValueError, match="no source of s0, s1 has enough prompts"):
        everything = retired.with_more(Retirement(index, 0, 1.0) for index in range(4, 44))
        made.take(Position(retired=everything), 1)


def test_a_small_source_is_refused() -> None:
    with pytest.raises(ValueError, match="source s1 has 2 prompts, but a rollout takes up to 4 different ones of it"):
        mixed([40, 2], [1.0, 1.0], 8)


def test_pass_rates_weigh_prompts() -> None:
    """Half-right prompts come in every epoch, solved ones with the chance of the floor; prior rates count at first."""
    rates = PassRates({index: (0.5, 1.0, 0.0, 0.25)[index % 4] for index in range(400)})
    made = PromptStream(400, 7, True, 10, 10, floor=0.1)
    found, position, epochs = Counter[float](), Position(rates=rates), 40
    while position.epoch < epochs:
        indices, position = made.take(position, 10)
        assert len(set(indices)) == 10
        found.update(rates.rates[index] for index in indices)
    chances = {rate: count / 100 / epochs for rate, count in found.items()}
    assert chances == pytest.approx({0.5: 1.0, 1.0: 0.1, 0.0: 0.1, 0.25: 0.75}, abs=0.02)
    prior = np.array([0.5, 1.0] * 200)
    before = PromptStream(400, 7, True, 10, 10, floor=0.1, prior=prior)
    first, _ = before.take(Position(), 150)
    assert sum(index % 2 for index in first) < 40
    told = Position(rates=PassRates(dict.fromkeys(range(400), 0.5)))
    assert sorted(before.take(told, 400)[0]) == [*range(400)], "a group of its own outweighs the row"
    plain, weighed = PromptStream(50, 3, True, 5), PromptStream(50, 3, True, 5, floor=0.5)
    assert plain.take(Position(), 50)[0] == weighed.take(Position(), 50)[0], "nothing is known in the first epoch"


def files(folder: Path) -> None:
    rows = [{"question": f"q{i}", "gold": i, "level": i % 5, "subject": "ab"[i % 2]} for i in range(20)]
    (folder / "math.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "sums.csv").write_text("prompt,answer,level\n" + "".join(f"s{i},{i},{i % 5}\n" for i in range(10)))


def loaded(folder: Path, *sources: dict[str, Any], **data: Any) -> list[Row]:
    given = [{"files": str(folder / one.pop("files", "math.jsonl")), **one} for one in map(dict, sources)]
    config = from_dict({"data": {"sources": given, **data}})
    rows = load_parts(parts.training(config.data), config.data, 42)
    counted = Counter(row.fields["data_source"] for row in rows)
    assert sizes(config.data, 42) == {one["name"]: counted[one["name"]] for one in given}, "the plan counts the same"
    return rows


MATH = {"name": "math", "columns": {"question": "prompt", "gold": "answer", "subject": None}}
SUMS = {"name": "sums", "files": "sums.csv"}


def test_columns_constants_and_names(tmp_path: Path) -> None:
    files(tmp_path)
    rows = loaded(tmp_path, MATH | {"constants": {"kind": {"of": 1}}}, SUMS)
    assert [row.index for row in rows] == [*range(30)]
    assert rows[1].prompt == "q1" and rows[1].fields == {
        "answer": 1,
        "level": 1,
        "kind": {"of": 1},
        "data_source": "math",
    }
    assert rows[21].fields == {"answer": "1", "level": "1", "data_source": "sums"} and rows[21].where.endswith("csv:3")


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ({"level": 3}, lambda i: i % 5 == 3),
        ({"level": [0, 4]}, lambda i: i % 5 in (0, 4)),
        ({"level": {"min": 1, "max": 2}}, lambda i: i % 5 in (1, 2)),
        ({"level": {"min": 3}}, lambda i: i % 5 >= 3),
        ({"level": {"max": 1.5}, "answer": {"min": 10}}, lambda i: i % 5 <= 1 and i >= 10),
        ({"subject": "a"}, lambda i: i % 2 == 0),
    ],
)
def test_filters(tmp_path: Path, condition: dict[str, Any], kept: Any) -> None:
    files(tmp_path)
    source = {"name": "math", "columns": {"question": "prompt", "gold": "answer"}, "filter": condition}
    assert [row.prompt for row in loaded(tmp_path, source)] == [f"q{i}" for i in range(20) if kept(i)]


@pytest.mark.parametrize(
    ("value", "wanted", "fit"),
    [
        ("3", 3, True),
        ("3.0", 3, True),
        ("x", 3, False),
        (3, "3", False),
        (True, 1, False),
        (1, True, False),
        ("true", True, True),
        (None, None, True),
        ("", None, True),
        ("5", {"min": 5, "max": 5}, True),
        (None, {"min": 0}, False),
        (True, {"min": 0}, False),
        ([1], [1], False),
        ("__import__('os')", "__import__('os')", True),
    ],
)
def test_conditions(value: object, wanted: object, fit: bool) -> None:
    assert selection.fits(value, wanted) is fit


def test_lengths_repeats_and_samples(tmp_path: Path) -> None:
    files(tmp_path)
    assert [row.prompt for row in loaded(tmp_path, MATH | {"characters": [3, 3]})] == [f"q{i}" for i in range(10, 20)]
    twice = [MATH, MATH | {"name": "again", "filter": {"level": 0}, "constants": {"n": 1}}]
    assert len(loaded(tmp_path, *twice)) == 24
    with pytest.raises(ValueError, match="math.jsonl: data.deduplicate leaves none of its 4 rows"):
        loaded(tmp_path, *twice, deduplicate=True)
    (tmp_path / "more.jsonl").write_text('{"prompt": " q1  "}\n{"prompt": "new"}\n{"prompt": "new"}\n')
    more = loaded(tmp_path, MATH, {"name": "more", "files": "more.jsonl"}, deduplicate=True)
    assert [row.prompt for row in more[20:]] == ["new"]
    some = [row.prompt for row in loaded(tmp_path, MATH | {"files": "math.jsonl#7"})]
    assert len(some) == 7 and some != [f"q{i}" for i in range(7)] and some == sorted(some, key=lambda one: int(one[1:]))
    with pytest.raises(ValueError, match="#21 asks for more rows than are left, 20: give #20, or none"):
        loaded(tmp_path, MATH | {"files": "math.jsonl#21"})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            MATH | {"columns": {"qestion": "prompt"}},
            "source math names what no row has\n  columns 'qestion': no row has it; nearest",
        ),
        (MATH | {"filter": {"levl": 1}}, "filter 'levl': no row has it; nearest: level"),
        (MATH | {"filter": {"level": 9}}, "math.jsonl: filter and characters leave none of its 20 rows"),
        (MATH | {"columns": {"question": "prompt", "gold": "level"}}, "two fields would be called 'level'"),
        (MATH | {"constants": {"level": 1}}, "two fields would be called 'level'"),
        (
            MATH | {"constants": {"data_source": "x"}, "columns": {"question": "prompt", "gold": "data_source"}},
            "two fields",
        ),
        ({"name": "math", "columns": {"question": "prompt", "subject": "data_source"}}, "it has a field 'data_source'"),
        ({"name": "math"}, "it has no 'prompt'"),
    ],
)
def test_what_cannot_be_used_says_so(tmp_path: Path, source: dict[str, Any], why: str) -> None:
    files(tmp_path)
    with pytest.raises(ValueError, match=why):
        loaded(tmp_path, source)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"filter": {"level": {"min": "a"}}}, "must have for each field a value"),
        ({"filter": {"level": {"over": 1}}}, "must have for each field a value"),
        ({"filter": {"level": []}}, "must have for each field a value"),
        ({"columns": {"a": 1}}, "must have new names of columns"),
        ({"rewards": {}}, "must have a number for each reward function"),
        ({"rewards": {"number_match": True}}, "must have a number for each reward function"),
        ({"name": "a b"}, "must be 1 to 40 letters"),
        ({"wieght": 1}, "weight"),
    ],
)
def test_a_source_with_a_mistake(source: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_dict({"data": {"sources": [{"name": "a", "files": "a.jsonl"} | source]}})


BASE: dict[str, Any] = {
    "run": {"max_steps": 10},
    "batch": {"num_generations": 4, "global_batch_size": 32, "micro_batch_size": 1},
    "reward": {"functions": [{"function": "number_match"}, {"function": "length_reward"}]},
}


def broken(folder: Path, *sources: dict[str, Any], **sections: Any) -> list[str]:
    given = [{"files": str(folder / one.pop("files", "math.jsonl")), **one} for one in map(dict, sources)]
    config = from_dict(BASE | sections | {"data": {"sources": given, **sections.get("data", {})}})
    found = sizes(config.data, 42)
    return [item.message for item in make_plan(config, None if found is None else sum(found.values())).broken]


def test_the_plan_says_what_a_run_has_of_each_source(tmp_path: Path) -> None:
    files(tmp_path)
    given = [
        {"files": str(tmp_path / "math.jsonl"), **MATH, "weight": 3},
        {**SUMS, "files": str(tmp_path / "sums.csv"), "weight": 1},
    ]
    plan = make_plan(from_dict(BASE | {"data": {"sources": given}}), 30)
    assert plan.valid, plan.broken
    assert [tuple(one) for one in plan.sources] == [("math", 20, 0.75, 6, 60, 3.0), ("sums", 10, 0.25, 2, 20, 2.0)]
    assert plan.to_json()["sources"][1]["epochs"] == 2.0


def test_the_plan_warns_of_what_changes_nothing(tmp_path: Path) -> None:
    files(tmp_path)

    def told(weight: float = 1, steps: int = 2, **data: Any) -> str:
        both = [{**MATH, "weight": weight}, {**SUMS, "weight": 1}]
        given = [{**one, "files": str(tmp_path / one.get("files", "math.jsonl"))} for one in both]
        config = from_dict(BASE | {"run": {"max_steps": steps}, "data": {"sources": given, **data}})
        plan = make_plan(config, 30)
        return "\n".join([*plan.warnings, *plan.notes])

    assert "draws no prompt of source sums" in told(weight=99) and "draws no prompt" not in told()
    inert = "data.curriculum_floor (0.1) changes nothing"
    assert inert in told(curriculum_floor=0.1) and "chance 4p(1 - p), at least 0.1" in told(curriculum_floor=0.1)
    assert inert not in told(curriculum_floor=0.1, curriculum_key="rate") and inert not in told()
    assert inert not in told(curriculum_floor=0.1, steps=20)


@pytest.mark.parametrize(
    ("sources", "sections", "why"),
    [
        ([MATH, MATH], {}, "data.sources has 2 sources with the name math"),
        ([MATH | {"weight": 1}, SUMS], {}, "data.sources has no weight for sums"),
        (
            [MATH | {"weight": 1}, SUMS | {"weight": 20}],
            {"batch": BASE["batch"] | {"global_batch_size": 48}},
            "source sums has 10",
        ),
        (
            [MATH | {"rewards": {"number_mach": 1}}],
            {},
            "rewards of source math .* number_mach, .*; nearest: number_match",
        ),
        ([MATH], {"data": {"train": "x.jsonl"}}, "data.train .* and data.sources exclude each other"),
        ([MATH], {"data": {"curriculum_key": "p"}}, "weighs nothing without data.curriculum_floor"),
        (
            [MATH | {"rewards": {"length_reward": 1}}],
            {"rollout": {"dynamic_sampling": True, "dynamic_sampling_metric": "number_match"}},
            "grades no completion of math",
        ),
    ],
)
def test_rules(tmp_path: Path, sources: list[dict[str, Any]], sections: dict[str, Any], why: str) -> None:
    files(tmp_path)
    found = broken(tmp_path, *sources, **sections)
    assert any(re.search(why, message) for message in found), found


def test_files_of_every_source_are_those_that_the_run_began_with(tmp_path: Path) -> None:
    files(tmp_path)
    sources = [{**MATH, "files": f"{tmp_path}/math.jsonl#9"}, {**SUMS, "files": f"{tmp_path}/sums.csv"}]
    config = from_dict({"run": {"dir": str(tmp_path / "run")}, "data": {"sources": sources}})
    run, _ = open_run(config)
    hashes = run.read_info()["data_sha256"]
    assert hashes.keys() == {"data.sources[0].files", "data.sources[1].files"} and all(map(len, hashes.values()))
    assert same_run.changes(run, config) == ""
    (tmp_path / "sums.csv").write_text("prompt,answer,level\nother,1,1\n")
    told = same_run.changes(run, config)
    assert told.startswith(f"data.sources[1].files ({tmp_path}/sums.csv) is not the file") and "math" not in told
    heavier = from_dict(
        {"run": {"dir": str(tmp_path / "run")}, "data": {"sources": [{**one, "weight": 1} for one in sources]}}
    )
    told = same_run.changes(run, heavier)
    assert "data.sources[0].weight: None -> 1.0" in told and "columns" not in told, "weights cannot change within a run"
    fewer = from_dict({"run": {"dir": str(tmp_path / "run")}, "data": {"sources": sources[:1]}})
    assert "data.sources: (" in same_run.changes(run, fewer)


def test_the_system_prompt_of_a_source(tmp_path: Path) -> None:
    """It takes the place of data.system_prompt for its rows alone, and `tokens` counts it."""

    class Letters:
        """A tokenizer of letters whose template shows roles."""

        chat_template = "messages"

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return "".join(f"<{one['role']}>{one['content']}" for one in messages)

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [[*map(ord, text)] for text in texts]}

    files(tmp_path)
    sources = [{**MATH, "system_prompt": "Own", "tokens": [19, 19]}, SUMS]
    given = [{**one, "files": str(tmp_path / one.get("files", "math.jsonl"))} for one in sources]
    config = from_dict({"data": {"sources": given, "system_prompt": "All"}})
    rows = load_parts(parts.training(config.data), config.data, 42)
    found = build_prompts(rows, Letters(), config.data, 99)
    texts = [prompt.text for prompt in found]
    assert texts[0] == "<system>Own<user>q0" and len(texts) == 20 and texts[10] == "<system>All<user>s0"
    assert prompt_sizes(found, config.data) == {"math": 10, "sums": 10}
    none = config.model_copy(update={"data": from_dict({"data": {"sources": [{**given[0], "tokens": [1, 2]}]}}).data})
    with pytest.raises(ValueError, match=r"source math: no prompt has 1 to 2 tokens"):
        build_prompts(rows[:20], Letters(), none.data, 99)


@pytest.mark.parametrize(
    ("values", "why"),
    [([0.5, 2], "'rate' .* is 2: it must be from 0 to 1"), ([0.5, "x"], "is 'x'"), ([None, None], "no prompt has")],
)
def test_pass_rates_of_rows_are_shares(values: list[object], why: str) -> None:
    prompts = [Prompt(i, np.zeros(1, np.int32), "", {"rate": value}) for i, value in enumerate(values)]
    with pytest.raises(ValueError, match=why):
        prior_rates(prompts, Data(curriculum_key="rate"))
