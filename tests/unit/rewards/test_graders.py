"""The graders that come with the package, without the processes that call them; test_mathematics.py has that one.

It takes two seconds. It would catch a choice that is read where none was made, a tolerance that lets wrong numbers
pass, a format that is taken for another, a penalty that grows in the wrong direction, and a language that is punished
for its formulas.
"""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.rewards import builtin, trial
from gspo_hpc.rewards.catalogue import ASK_ELSEWHERE, PEER_NAMES, REGISTRY, UnparsableGold
from gspo_hpc.rewards.choices import chosen_letter
from gspo_hpc.rewards.registry import check
from gspo_hpc.rewards.texts import words_of


def grade(name: str, completion: str, *, prompt: str = "", answer: Any = None, **args: Any) -> Any:
    return REGISTRY[name](completion, prompt=prompt, fields={"answer": answer}, **args)


# ---- numbers and exact text


@pytest.mark.parametrize(
    ("completion", "answer", "args", "value"),
    [
        ("3.14", "3.14159", {"rel_tol": 0.01}, 1.0),
        ("3.14", "3.14159", {"rel_tol": 0.0001}, 0.0),
        ("-3.14", "3.14159", {"rel_tol": 0.01}, 0.0),
        ("0.1", 0.2, {"abs_tol": 0.1}, 1.0),  # exactly a tenth, although 0.2 - 0.1 in binary is not
        ("0.3", 0.2, {"abs_tol": 0.1}, 1.0),
        ("0.30000001", 0.2, {"abs_tol": 0.1}, 0.0),
        ("95", 100, {"rel_tol": 0.05}, 1.0),  # a share of the right number: not of the larger one
        ("105.1", 100, {"rel_tol": 0.05}, 0.0),
        ("1", 0, {"rel_tol": 0.5}, 0.0),
        ("1", 0, {"rel_tol": 0.5, "abs_tol": 1}, 1.0),
        ("it is 7, then 9", 7.1, {"abs_tol": 0.2, "position": "any"}, 1.0),
        ("it is 7, then 9", 7.1, {"abs_tol": 0.2}, 0.0),
        ("9e999999", "-9e999999", {"abs_tol": 1e300}, 0.0),  # a difference that no Decimal holds
        ("9e999999", "9e999999", {"abs_tol": 1.0}, 1.0),
        ("<answer>12</answer> or 13", 12, {"tag": "answer"}, 1.0),
        ("12", 12, {"tag": "answer"}, 0.0),
        ("<answer>12", 12, {"tag": "answer"}, 0.0),
        ("<answer>11</answer> no: <answer>12</answer>", 12, {"tag": "answer"}, 1.0),
    ],
)
def test_number_match_with_a_tolerance_and_a_tag(
    completion: str, answer: Any, args: dict[str, Any], value: float
) -> None:
    assert grade("number_match", completion, answer=answer, **args) == value


@given(
    st.decimals(-1000, 1000, places=3), st.decimals(-1000, 1000, places=3), st.sampled_from([0.0, 0.001, 0.01, 0.25])
)
def test_a_tolerance_is_that_of_exact_arithmetic(given_: Decimal, wanted: Decimal, tolerance: float) -> None:
    near = abs(given_ - wanted) <= Decimal(str(tolerance)) * abs(wanted)
    assert grade("number_match", f"{given_}", answer=f"{wanted}", rel_tol=tolerance) == float(near)
    near = abs(given_ - wanted) <= Decimal(str(tolerance))
    assert grade("number_match", f"{given_}", answer=f"{wanted}", abs_tol=tolerance) == float(near)


def test_exact_match_within_a_tag() -> None:
    assert grade("exact_match", "I think <answer> Paris\n</answer> it is", answer="Paris", tag="answer") == 1.0
    assert grade("exact_match", "Paris", answer="Paris", tag="answer") == 0.0
    assert grade("exact_match", "", answer="", tag="answer") == 0.0


# ---- multiple choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C", "C"),
        ("(c)", "C"),
        ("**C**", "C"),
        ("C. Paris", "C"),
        ("C) Paris", "C"),
        ("Paris is a city.\n\nC", "C"),
        ("The answer is (C).", "C"),
        ("answer: c", "C"),
        ("**Answer:** C", "C"),
        ("The correct answer is: **B. Paris**", "B"),
        ("The correct option is B, not C.", "B"),
        ("I choose D", "D"),
        ("Option B is correct.", "B"),
        ("B is the best, although D is close", "B"),
        (r"so \boxed{\text{D}}, not (A)", "D"),
        (r"the answer is \(\mathrm{B}\)", "B"),
        ("The answer is B. No, wait: the answer is D.", "D"),
        ("The answer is A because Paris is large", "A"),
        ("\u7b54\u6848\u662fC\u3002", "C"),
        ("\u7b54\u6848\uff1a\uff08B\uff09", "B"),
        ("\u56e0\u6b64\u9009C", "C"),
        ("\u6545\u9009\uff1aB\uff0e", "B"),
        ("\u7b54\u6848\u5e94\u8be5\u662f D", "D"),
        ("The answer should be B.", "B"),
        ("I would go with C.", "C"),
        ("Why not.\n<answer>B</answer>", "B"),
        ("Answer: B\nAnswer: C", "C"),
        ("A) Rome\nB) Paris\nSo it is (B)", "B"),
        ("It cannot be (A). It is (C)", "C"),
    ],
)
def test_the_letter_that_a_text_chooses(text: str, letter: str) -> None:
    assert chosen_letter(text, "ABCD") == letter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I do not know",
        "A cat sat on a mat",
        "The answer is a cat",
        "The answer is Dublin",
        "The answer is I'm not sure",
        "The answer is 4",
        "The answer is not A.",
        "The answer is between B and C",
        "Answer: All of the above",
        "I choose a cat",
        "the choice is a matter of taste",
        "answer",
        "A) Rome\nB) Paris\nC) Oslo",  # the question's own list
        "(E)",
        "The answer is E",
    ],
)
def test_a_text_that_chooses_nothing(text: str) -> None:
    assert chosen_letter(text, "ABCD") is None
    value = grade("multiple_choice", text, answer="A", letters="ABCD")
    assert (float(value), value.outcome) == (0.0, "unparsable")


@pytest.mark.parametrize("answer", ["C", "c", "(C)", "C.", " C ", 2])
def test_a_choice_is_right_or_wrong(answer: Any) -> None:
    right, wrong = (grade("multiple_choice", text, answer=answer) for text in ("It is (C)", "It is (B)"))
    assert (float(right), right.outcome, float(wrong), wrong.outcome) == (1.0, "right", 0.0, "wrong")
    inside = grade("multiple_choice", "not (B) <answer>C</answer>", answer=answer, tag="answer")
    assert inside.outcome == "right"
    assert grade("multiple_choice", "It is (C)", answer=answer, tag="answer").outcome == "unparsable"


@pytest.mark.parametrize("answer", [None, True, -1, 4, "E", "Paris", "", ["A"], 1.0])
def test_a_row_without_a_letter_is_refused(answer: Any) -> None:
    with pytest.raises(
        UnparsableGold, match="field 'answer' is .*one of the letters ABCD, or a whole number from 0 to 3"
    ):
        grade("multiple_choice", "C", answer=answer, letters="ABCD")
    why = builtin.refusal("multiple_choice", {"letters": "ABCD"}, {"answer": answer})
    assert why is not None and why.endswith("args: {answer: FIELD} names another field")


# ---- form


def test_regex() -> None:
    assert grade("regex", " <a>1</a>\n", pattern=r"<a>\d</a>") == 1.0
    assert grade("regex", "so <a>1</a>", pattern=r"<a>\d</a>") == 0.0
    assert grade("regex", "so <a>1</a>", pattern=r"<a>\d</a>", mode="search") == 1.0
    assert grade("regex", "a\nb", pattern=r"a.b") == 0.0
    assert grade("regex", "a\nb", pattern=r"(?s)a.b") == 1.0


FULL = "<think>\nwhy\n</think>\n\n<answer>42</answer>\n"


@pytest.mark.parametrize(
    ("completion", "args", "value"),
    [
        (FULL, {}, 1.0),
        (f"So: {FULL}", {}, 0.0),
        (f"{FULL} So.", {}, 0.0),
        (f"{FULL} So.", {"text_after": True}, 1.0),
        ("<think>why</think> because <answer>42</answer>", {}, 0.0),
        ("<answer>42</answer><think>why</think>", {}, 0.0),
        ("<think>why</think>", {}, 0.0),
        ("<think>a</think><think>b</think><answer>42</answer>", {}, 0.0),
        ("<think>a<answer>b</think>42</answer>", {}, 0.0),
        ("<think></think><answer></answer>", {}, 1.0),
        ("<think>why</think> It is 42.", {"tags": ["think"], "text_after": True}, 1.0),
        ("<think>why</think> It is 42.", {"tags": ["think"]}, 0.0),
        ("why</think> It is 42.", {"tags": ["think"], "text_after": True}, 0.0),
        (FULL, {"partial": True}, 1.0),
        ("<think>why</think> 42", {"partial": True}, 0.5),
        ("<think>a</think></think><answer>4</answer>", {"partial": True}, 0.75),
        ("42", {"partial": True}, 0.0),
        ("<a.b>1</a.b>", {"tags": ["a.b"]}, 1.0),
        ("<axb>1</axb>", {"tags": ["a.b"]}, 0.0),
    ],
)
def test_tag_format(completion: str, args: dict[str, Any], value: float) -> None:
    assert grade("tag_format", completion, **args) == value


def test_the_prompt_may_have_opened_the_first_section() -> None:
    rest = "why</think><answer>42</answer>"
    assert grade("tag_format", rest, prompt="<|assistant|>\n<think>\n") == 1.0
    assert grade("tag_format", rest, prompt="Write <think> first.") == 0.0
    assert grade("tag_format", f"<think>{rest}", prompt="<think>\n") == 0.0  # opened twice


# ---- a text by itself


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (10, 0.0), (11, -0.1), (15, -0.5), (20, -1.0), (500, -1.0)])
def test_length(tokens: int, value: float) -> None:
    sizes = {"target": 10, "limit": 20}
    assert grade("length", "", response_length=tokens, **sizes) == pytest.approx(value)
    got = grade("length", "x" * tokens, response_length=0, unit="characters", **sizes)
    assert got == pytest.approx(value)


@pytest.mark.parametrize(("tokens", "value"), [(0, -1.0), (2, -0.5), (4, 0.0), (10, 0.0), (15, -0.5)])
def test_length_has_a_lower_bound_too(tokens: int, value: float) -> None:
    assert grade("length", "", response_length=tokens, minimum=4, target=10, limit=20) == pytest.approx(value)


def test_length_is_the_soft_overlong_punishment_of_dapo() -> None:
    longest, cache = 200, 50
    for tokens in range(0, 260, 7):
        if tokens <= longest - cache:
            expected = 0.0
        elif tokens <= longest:
            expected = (longest - cache - tokens) / cache
        else:
            expected = -1.0
        got = grade("length", "", response_length=tokens, target=longest - cache, limit=longest)
        assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "size", "value"),
    [
        ("", 3, 0.0),
        ("a b", 3, 0.0),
        ("a b c d e f", 3, 0.0),
        ("a b c a b c", 3, -0.25),
        ("A b, c. a B C!", 3, -0.25),
        ("x x x x x", 1, -0.8),
        ("x x x x x", 2, -0.75),
        ("\u597d\u597d\u597d\u597d\u597d", 3, -2 / 3),
        ("caf\u00e9 cafe\u0301", 1, -0.5),
    ],
)
def test_repetition(text: str, size: int, value: float) -> None:
    assert grade("repetition", text, ngram_size=size) == pytest.approx(value)


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 5))
def test_repetition_is_the_share_of_ngrams_seen_before(words: list[str], size: int) -> None:
    seen, again, total = set(), 0, 0
    for start in range(len(words) - size + 1):
        ngram = tuple(words[start : start + size])
        total, again = total + 1, again + (ngram in seen)
        seen.add(ngram)
    expected = -again / total if total else 0.0
    assert grade("repetition", " ".join(words), ngram_size=size) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("language", "text", "value"),
    [
        ("en", "It is large, so the answer is 42.", 1.0),
        ("fr", "Ce caf\u00e9 est tr\u00e8s bon", 1.0),
        ("en", "so \u56e0\u6b64", 1 / 3),
        ("zh", "\u56e0\u6b64 so", 2 / 3),
        (
            "zh",
            "\u56e0\u6b64 $\\sin x$, \\frac{1}{2}, `print(x)` <answer>\u56db</answer> x",
            1.0,
        ),
        ("en", "the angle \u03b1 and \u03b2", 1.0),  # a single letter is a symbol
        ("el", "\u03b7 \u03b3\u03c9\u03bd\u03af\u03b1 is", 0.5),
        ("ja", "\u3053\u308c\u306f\u30da\u30f3\u3067\u3059\u3002\u30b3\u30fc\u30d2\u30fc", 1.0),
        ("zh", "\u3053\u308c\u306f", 0.0),
        ("ru", "\u043e\u0442\u0432\u0435\u0442 is \u0434\u0432\u0430", 2 / 3),
        ("hi", "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902 text", 2 / 3),
        ("ko", "\ud55c\uad6d\uc5b4 word", 0.5),
        ("en", "\uff48\uff45\uff4c\uff4c\uff4f world", 1.0),  # letters of full width
        ("zh", "42 + 1 = 43", 1.0),
        ("zh", "", 1.0),
    ],
)
def test_language_consistency(language: str, text: str, value: float) -> None:
    assert grade("language_consistency", text, language=language) == pytest.approx(value)
    row = {"lang": language}
    got = REGISTRY["language_consistency"](text, prompt="", fields=row, field="lang")
    assert got == pytest.approx(value)


def test_the_language_of_a_row_is_checked_before_a_run() -> None:
    assert builtin.refusal("language_consistency", {"field": "lang"}, {"lang": "en"}) is None
    for row, why in (
        ({}, "no field 'lang'"),
        ({"lang": "english"}, "'english' is not a known code"),
        ({"lang": 3}, "3"),
    ):
        refused = builtin.refusal("language_consistency", {"field": "lang"}, row)
        assert refused is not None and why in refused and "answer" not in refused


def test_words_of_scripts_with_vowel_signs_stay_whole() -> None:
    assert list(words_of("\u0939\u093f\u0928\u094d\u0926\u0940 \u4e2d\u6587ab12")) == [
        ("\u0939\u093f\u0928\u094d\u0926\u0940", "DEVANAGARI"),
        ("\u4e2d", "CJK"),
        ("\u6587", "CJK"),
        ("ab", "LATIN"),
        ("12", ""),
    ]


LONG = [
    "answer:",
    "\n",
    " ",
    "(",
    "*",
    "\\(",
    "\\[",
    "$$ ",
    "```",
    "<a>",
    "\\boxed{",
    "A ",
    "A)\n",
    "</think>",
    "choose ",
]
EACH = """
import json, sys
from gspo_hpc.rewards.builtin import REGISTRY
for piece in json.loads(sys.argv[1]):
    for name, args in json.loads(sys.argv[2]).items():
        REGISTRY[name](piece * (60_000 // len(piece)), prompt="", fields={"answer": 1}, **args)
"""


def test_long_texts_of_one_piece_take_time_in_proportion() -> None:
    """They take seconds. With time that grows with the square, a single one takes minutes."""
    names = ("multiple_choice", "language_consistency", "tag_format", "number_match", "repetition")
    words = [json.dumps(LONG), json.dumps({name: ARGS.get(name, {}) for name in names})]
    subprocess.run([sys.executable, "-c", EACH, *words], check=True, timeout=120)


# ---- a config with them


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("number_match", {"rel_tol": -0.1}, "rel_tol is -0.1: it must be a finite number, at least 0"),
        ("number_match", {"abs_tol": -1}, "abs_tol is -1"),
        ("number_match", {"rel_tol": "1%"}, "argument rel_tol is '1%': it must be a number"),
        ("number_match", {"tag": "<answer>"}, "tag '<answer>' must be a name without brackets"),
        ("exact_match", {"tag": "a b"}, "tag 'a b' must be a name"),
        ("math_verify", {"precision": -1}, "precision is -1"),
        ("multiple_choice", {"letters": "abcd"}, "letters is 'abcd': it must be two or more different capital letters"),
        ("multiple_choice", {"letters": "AAB"}, "letters is 'AAB'"),
        ("multiple_choice", {"letters": "A]"}, "letters is 'A]'"),
        ("tag_format", {"tags": "think"}, "tags is 'think': it must be a list of names"),
        ("tag_format", {"tags": []}, "it must be a list of names"),
        ("tag_format", {"tags": ["think", 3]}, "tags has 3"),
        ("tag_format", {"tags": ["think", "think"]}, "a name twice"),
        ("tag_format", {"tags": ["</think>"]}, "must be a name without brackets"),
        ("tag_format", {"tag": ["think"]}, "unknown argument 'tag'; nearest: tags"),
        ("length", {"target": 5, "limit": 9, "minimum": 6}, "minimum 6, target 5 and limit 9 do not fit"),
        ("repetition", {"ngram_size": 0}, "ngram_size is 0"),
        ("repetition", {"n_grams": 3}, "unknown argument 'n_grams'; nearest: ngram_size"),
        ("language_consistency", {}, "give either language, such as en, or field"),
        ("language_consistency", {"language": "en", "field": "x"}, "give either language, such as en, or field"),
        ("language_consistency", {"language": "xx"}, "language 'xx' is not a known code"),
    ],
)
def test_arguments_that_make_no_sense_are_named(name: str, args: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match="reward.functions") as caught:
        check(Reward(functions=(RewardFunction(function=name, args=args),)))
    assert why in str(caught.value)


def test_names_of_other_projects_are_answered_with_those_of_here() -> None:
    for name, here in PEER_NAMES.items():
        assert here in REGISTRY and name not in REGISTRY
        with pytest.raises(ValueError, match=f"no such reward function; here it is {here}\\."):
            check(Reward(functions=(RewardFunction(function=name),)))


ARGS: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "4"},
    "length": {"target": 1, "limit": 9},
    "language_consistency": {"language": "en"},
}


def test_every_function_of_its_own_grades_a_row_in_the_trial_before_a_run() -> None:
    plain = (
        {*REGISTRY} - ASK_ELSEWHERE - {"reasoning_gym"}
    )  # which has rows of its own: tests/unit/data/test_gym_tasks.py
    terms = [RewardFunction(function=name, args=ARGS.get(name, {})) for name in sorted(plain)]
    check(Reward(functions=tuple(terms)))
    row = {"answer": 2, "tests": [{"input": "", "output": "2"}]}
    assert trial.run(terms, "What?", row) == [trial.Outcome(None)] * len(terms)
    assert [builtin.refusal(term.function, term.args, row) for term in terms] == [None] * len(terms)
