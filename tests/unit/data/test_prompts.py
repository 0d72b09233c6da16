"""Rows of files good and bad, their tokens through a real tokenizer, and the order in which they are asked."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.config.schema import Data
from gspo_hpc.data import counting
from gspo_hpc.data.prompts import Position, PromptStream, build_prompts
from gspo_hpc.data.rows import Row, load_rows

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer that puts <bos> before plain text, as many real ones do: one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<bos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*special, *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", additional_special_tokens=special[1:])
    made.chat_template = TEMPLATE
    return made


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def rows_of(*prompts: Any, **fields: Any) -> list[Row]:
    return [Row(i, f"f.jsonl:{i + 1}", prompt, dict(fields)) for i, prompt in enumerate(prompts)]


def test_jsonl_rows_keep_their_fields(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2?"}]
    path = write(
        tmp_path / "a.jsonl", {"q": "1+1? \u2028 é", "answer": 2, "tags": ["x"]}, b"", {"q": chat, "answer": 4}
    )
    rows = load_rows(path, Data(prompt_key="q"))
    assert [row.prompt for row in rows] == ["1+1? \u2028 é", chat]
    assert [row.fields for row in rows] == [{"answer": 2, "tags": ["x"]}, {"answer": 4}]
    assert [row.index for row in rows] == [0, 1]
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:3"]


def test_a_raw_line_separator_and_a_byte_order_mark_split_and_spoil_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes("\ufeff".encode() + '{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}'.encode())
    assert [row.prompt for row in load_rows(path, Data())] == ["a\u2028b\u0085c", "d"]


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    chats = [
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": 1, "w": 0.5},
        {"prompt": [{"role": "user", "content": "v"}], "answer": None, "w": 2.0},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", *chats)
    columns, lines = (load_rows(tmp_path / name, Data()) for name in ("a.parquet", "a.jsonl"))
    assert [(r.prompt, r.fields) for r in columns] == [(r.prompt, r.fields) for r in lines]
    assert columns[1].where == f"{tmp_path / 'a.parquet'}:row 2"


def test_parquet_that_json_cannot_hold_or_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist(
        [{"prompt": "a", "day": datetime.date(2026, 1, 1)}, {"prompt": None, "day": None}]
    )
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(ValueError, match=r"2 of 2 rows(.|\n)*row 1: its fields(.|\n)*date(.|\n)*row 2: .*null"):
        load_rows(path, Data())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="a.parquet: cannot be read"):
        load_rows(path, Data())


USER = {"role": "user", "content": "u"}
BAD_ROWS: list[tuple[object, str]] = [
    (b'{"prompt": "a"', "not JSON: .* at character"),
    (b'{"prompt": "\xff"}', "not UTF-8 at byte 13"),
    (b"[" * 100_000, "not JSON that can be read"),
    (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "not JSON that can be read"),
    (["a"], "a row must be an object .* not a list"),
    (None, "not null"),
    ({"question": "a"}, "no 'prompt' .* it has: question"),
    ({"prompt": 3}, "the prompt is a number"),
    ({"prompt": " \n"}, "the prompt is empty"),
    ({"prompt": "\ud800"}, "contains half of a character"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": ["a"]}, "message 1 is text"),
    ({"prompt": [{"role": "user"}]}, "message 1 has role"),
    ({"prompt": [{**USER, "tool_calls": []}]}, "message 1 has role, content, tool_calls"),
    ({"prompt": [{"role": "human", "content": "a"}]}, "the role 'human': it must be one of system, user, assistant"),
    ({"prompt": [{"role": "user", "content": ["a"]}]}, "the content of message 1 is a list"),
    ({"prompt": [{"role": "user", "content": ""}]}, "message 1 is empty"),
    (
        {"prompt": [USER, {"role": "assistant", "content": "a"}]},
        "the last message has the role 'assistant': it must have the role 'user'",
    ),
    ({"prompt": [USER, {"role": "system", "content": "a"}, USER]}, "only the first message can be a system message"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_ROWS)
def test_each_malformed_row_is_told_by_file_and_line(tmp_path: Path, bad: object, why: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "good"}, bad, {"prompt": [USER]})
    with pytest.raises(ValueError, match=why) as caught:
        load_rows(path, Data())
    headline, *told = str(caught.value).splitlines()
    assert headline == f"{path}: 1 of 3 rows cannot be used"
    assert len(told) == 1
    assert told[0].startswith(f"  {path}:2: ")


def test_all_malformed_rows_are_counted_and_ten_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"prompt": "good"}, {"prompt": 1}] * 13)
    with pytest.raises(ValueError, match="13 of 26 rows") as caught:
        load_rows(path, Data())
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert lines[1].startswith(f"  {path}:2: ")
    assert lines[10].startswith(f"  {path}:20: ")
    assert lines[11] == "  and 3 more"


def test_files_that_are_none(tmp_path: Path) -> None:
    write(tmp_path / "empty.jsonl")
    write(tmp_path / "blank.jsonl", b"", b"  ")
    (tmp_path / "folder.jsonl").mkdir()
    for name, why in [
        ("empty.jsonl", "no rows"),
        ("blank.jsonl", "no rows"),
        ("missing.jsonl", "No such file"),
        ("missing.parquet", "No such file"),
        ("folder.jsonl", "has no data files"),
        ("data.xlsx", "must end in .jsonl or .parquet or .csv"),
    ]:
        with pytest.raises(ValueError, match=why) as caught:
            load_rows(tmp_path / name, Data())
        assert str(tmp_path / name) in str(caught.value)


def test_a_system_prompt_that_plain_text_would_lose_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a"})
    with pytest.raises(ValueError, match="data.system_prompt needs a chat template"):
        load_rows(path, Data(system_prompt="s", chat_template=False))


def test_variables_of_the_chat_template_that_plain_text_would_lose_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a"})
    with pytest.raises(ValueError, match="data.chat_template_kwargs needs a chat template"):
        load_rows(path, Data(chat_template_kwargs={"enable_thinking": False}, chat_template=False))
    assert load_rows(path, Data(chat_template=False))


def test_the_chat_template_gets_its_variables(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<end>{% endif %}"
    try:
        for given, end in (({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "<end>")):
            (prompt,) = build_prompts(rows_of("a"), tokenizer, Data(chat_template_kwargs=given), 99)
            assert prompt.text == f"<|user|>a<|end|><|assistant|>{end}"
            assert tokenizer.decode(prompt.tokens.tolist()) == prompt.text
        assert not caplog.text
        build_prompts(rows_of("a"), tokenizer, Data(chat_template_kwargs={"enable_thinkin": False}), 99)
        assert "the chat template has no enable_thinkin, so it changes nothing" in caplog.text
        other = Data(chat_template_kwargs={"chat_template": "{{ messages[0].content }}!"})
        assert build_prompts(rows_of("a"), tokenizer, other, 99)[0].text == "a!"
    finally:
        tokenizer.chat_template = TEMPLATE


def test_chat_prompts_are_rendered_once_with_no_second_bos(tokenizer: Any) -> None:
    own = [{"role": "system", "content": "mine"}, USER]
    prompts = build_prompts(rows_of("hé", [USER], own, answer=7), tokenizer, Data(system_prompt="sys"), 99)
    assert [prompt.text for prompt in prompts] == [
        "<|system|>sys<|end|><|user|>hé<|end|><|assistant|>",
        "<|system|>sys<|end|><|user|>u<|end|><|assistant|>",
        "<|system|>mine<|end|><|user|>u<|end|><|assistant|>",
    ]
    for prompt in prompts:
        assert prompt.tokens.dtype == np.int32
        assert tokenizer.decode(prompt.tokens.tolist()) == prompt.text
        assert 0 not in prompt.tokens  # <bos>
        assert prompt.fields == {"answer": 7}
    direct = tokenizer.apply_chat_template(
        [{"role": "system", "content": "sys"}, {"role": "user", "content": "hé"}],
        add_generation_prompt=True,
        return_dict=True,
    )
    assert prompts[0].tokens.tolist() == direct["input_ids"]


def test_plain_text_gets_the_tokenizers_special_tokens_and_messages_still_the_template(tokenizer: Any) -> None:
    plain, chat, last = build_prompts(rows_of("ab", [USER], "c"), tokenizer, Data(chat_template=False), 99)
    assert plain.text == "ab"
    assert plain.tokens.tolist() == [0, *tokenizer("ab", add_special_tokens=False)["input_ids"]]
    assert chat.text == "<|user|>u<|end|><|assistant|>"
    assert len(chat.tokens) == 4
    assert last.tokens.tolist() == tokenizer("c")["input_ids"]


def test_overlong_prompts_by_each_rule(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of("a", "abcdefgh", "xy")  # 4, 11, 5 tokens with the template's three
    with pytest.raises(ValueError, match=r"1 of 3 prompts are longer than rollout.max_prompt_length \(5\)") as caught:
        build_prompts(rows, tokenizer, Data(), 5)
    told = str(caught.value).splitlines()
    assert len(told) == 2 and "first f.jsonl:2 with 11 tokens, at most 11 (f.jsonl:2)" in told[0]
    assert told[1] == "set rollout.max_prompt_length=11, or data.overlong to drop or truncate_left"
    with pytest.raises(ValueError, match=r"max_prompt_length=11, or data\.overlong to truncate_left$"):
        build_prompts(rows, tokenizer, Data(), 3)  # to drop all of them would leave none
    dropped = build_prompts(rows, tokenizer, Data(overlong="drop"), 5)
    assert [prompt.index for prompt in dropped] == [0, 2]
    assert "1 of 3 prompts" in caplog.text
    with pytest.raises(ValueError, match=r"leaves none: set rollout\.max_prompt_length=11$"):
        build_prompts(rows, tokenizer, Data(overlong="drop"), 3)
    cut = build_prompts(rows, tokenizer, Data(overlong="truncate_left"), 5)
    assert [prompt.text for prompt in cut] == ["<|user|>a<|end|><|assistant|>", "fgh<|end|><|assistant|>", cut[2].text]
    whole = build_prompts(rows, tokenizer, Data(), 11)
    assert cut[1].tokens.tolist() == whole[1].tokens.tolist()[-5:]


def test_a_tokenizer_without_a_chat_template_says_what_to_set(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    try:
        with pytest.raises(ValueError, match="data.chat_template=false"):
            build_prompts(rows_of("a"), tokenizer, Data(), 9)
        assert build_prompts(rows_of("a"), tokenizer, Data(chat_template=False), 9)[0].text == "a"
    finally:
        tokenizer.chat_template = TEMPLATE


def test_messages_that_the_template_refuses_are_told_by_row(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    try:
        system = [{"role": "system", "content": "s"}, USER]
        with pytest.raises(ValueError, match=r"1 of 2 prompts(.|\n)*f.jsonl:2: .*no system"):
            build_prompts(rows_of("a", system), tokenizer, Data(), 9)
    finally:
        tokenizer.chat_template = TEMPLATE


STREAMS = st.integers(1, 24).flatmap(
    lambda n: st.builds(PromptStream, st.just(n), st.integers(0, 2**40), st.booleans(), st.integers(1, n))
)


@settings(deadline=None)
@given(STREAMS, st.data())
def test_every_epoch_visits_each_prompt_once_and_no_take_repeats_one(stream: PromptStream, data: st.DataObject) -> None:
    position, seen = Position(), []
    while len(seen) < 4 * stream.num_prompts:
        n = data.draw(st.integers(1, stream.window))
        taken, position = stream.take(position, n)
        assert len(taken) == len(set(taken)) == n
        seen += taken
        assert position == Position(len(seen) // stream.num_prompts, len(seen) % stream.num_prompts)
    for epoch in range(4):
        visited = Counter(seen[epoch * stream.num_prompts : (epoch + 1) * stream.num_prompts])
        assert visited == Counter(range(stream.num_prompts))


@settings(deadline=None)
@given(STREAMS, st.integers(0, 20), st.data())
def test_a_position_is_all_that_a_resumed_run_needs(stream: PromptStream, before: int, data: st.DataObject) -> None:
    position = Position()
    for _ in range(before):
        _, position = stream.take(position, stream.window)
    saved = json.loads(json.dumps(position.to_dict()))
    fresh = PromptStream(stream.num_prompts, stream.seed, stream.shuffle, stream.window)
    n = data.draw(st.integers(0, stream.window))
    ahead = stream.take(position, n)
    stream.take(Position(), 1)  # looking elsewhere in between changes nothing
    assert fresh.take(Position.from_dict(saved), n) == ahead == stream.take(position, n)


@settings(deadline=None)
@given(STREAMS, st.lists(st.integers(0, 40), max_size=6))
def test_prompts_taken_in_any_portions_are_those_of_one_epoch_after_the_other(
    stream: PromptStream, portions: list[int]
) -> None:
    """Dynamic sampling may take more than an epoch has, and takes from the same position again."""
    position, taken = Position(), list[int]()
    for n in portions:
        found, after = stream.take(position, n)
        assert stream.take(position, n) == (found, after)
        taken, position = taken + found, after
    total = sum(portions)
    fresh = PromptStream(stream.num_prompts, stream.seed, stream.shuffle, stream.window)
    every = [index for epoch in range(total // stream.num_prompts + 1) for index in fresh.order(epoch).tolist()]
    assert taken == every[:total] and position == Position(*divmod(total, stream.num_prompts))


def test_shuffled_epochs_differ_with_epoch_and_seed_and_unshuffled_ones_do_not() -> None:
    def order(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        return PromptStream(200, seed, shuffle, 16).order(epoch).tolist()

    orders = [order(1, 0), order(1, 1), order(1, 2), order(2, 0), list(range(200))]
    assert len({tuple(each) for each in orders}) == 5
    assert order(1, 0, shuffle=False) == order(1, 7, shuffle=False) == list(range(200))


def test_the_order_is_the_same_in_every_version() -> None:
    """A run that is resumed by a newer version must ask on where it stopped."""
    stream = PromptStream(10, 42, True, 4)
    assert [stream.order(epoch).tolist() for epoch in range(3)] == [
        [4, 8, 1, 9, 3, 6, 0, 7, 2, 5],
        [1, 8, 2, 5, 3, 9, 6, 0, 4, 7],
        [2, 6, 0, 3, 4, 9, 7, 5, 8, 1],
    ]


def test_the_first_prompt_of_an_epoch_is_near_enough_uniform() -> None:
    """The waiting time keeps the last few of an epoch from the start of the next, and favours nobody else."""
    firsts = Counter(int(PromptStream(8, seed, True, 3).order(1)[0]) for seed in range(1600))
    assert len(firsts) == 8
    assert all(130 <= count <= 270 for count in firsts.values()), firsts


def test_impossible_streams_and_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="a rollout takes 9 prompts .* the data has 8"):
        PromptStream(8, 0, True, 9)
    with pytest.raises(ValueError, match="run.seed is -1"):
        PromptStream(8, -1, True, 2)
    with pytest.raises(ValueError, match="lies outside the data"):
        PromptStream(8, 0, True, 2).take(Position(0, 8), 1)
    for raw in ({"epoch": 0}, {"epoch": 0, "offset": "1"}, {"epoch": -1, "offset": 0}, {"epoch": True, "offset": 0}):
        with pytest.raises(ValueError, match="position"):
            Position.from_dict(raw)


def test_prompts_rewards_and_scores_import_nothing_heavy() -> None:
    code = (
        "import sys, gspo_hpc.data.prompts, gspo_hpc.rewards.pool;"
        "import gspo_hpc.algorithms.terms.advantages, gspo_hpc.evaluation.scores;"
        "print([m for m in ('torch', 'transformers', 'vllm', 'megatron', 'wandb', 'pyarrow') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]"


def test_a_pattern_names_several_files(tmp_path: Path) -> None:
    """In the order of their names; a malformed row is told by its own file."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write(tmp_path / "part-2.jsonl", {"prompt": "c"}, {"prompt": "d"})
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), tmp_path / "part-1.parquet")
    pattern = str(tmp_path / "part-*")
    rows = load_rows(pattern, Data())
    assert [(row.prompt, row.index) for row in rows] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert rows[0].where.endswith("part-1.parquet:row 1") and rows[3].where.endswith("part-2.jsonl:2")
    assert counting.count_rows(pattern) == 4 and counting.fields(pattern) == ("prompt",)
    write(tmp_path / "part-3.jsonl", {"prompt": 3})
    with pytest.raises(ValueError, match=r"1 of 5 rows cannot be used(?s:.*)part-3\.jsonl:1"):
        load_rows(pattern, Data())
    (tmp_path / "part-4.txt").write_text("x")
    with pytest.raises(ValueError, match=r"part-4\.txt: the name of a data file must end in"):
        load_rows(pattern, Data())
    assert counting.count_rows(pattern) is None
    with pytest.raises(ValueError, match=r"none-\*: no file matches"):
        load_rows(tmp_path / "none-*", Data())
    (tmp_path / "odd[1]*.jsonl").write_text('{"prompt": "x"}\n')
    assert len(load_rows(tmp_path / "odd[1]*.jsonl", Data())) == 1, "a file by that very name is no pattern"
