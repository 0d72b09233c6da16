"""An error of a value in another form than its key takes says what to write, and that is taken (under 2 s).

It would catch an error without a way out, and a proposal that is refused in turn.
"""

from __future__ import annotations

import pytest

from gspo_hpc.config import loader, yaml_text

_PLACE = "command line: "


def problems(setting: str) -> list[str]:
    """Return the lines of the error for a setting."""
    with pytest.raises(ValueError) as caught:
        loader.load(None, [setting])
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("setting", "found", "form"),
    [
        ("reward.functions=[math]", "a mapping of keys; found 'math'", "{function: math}"),
        ("reward.functions=['my.py:score']", "a mapping of keys; found 'my.py:score'", "{function: 'my.py:score'}"),
        ("reward.functions=[[math]]", "a mapping of keys; found a list", "{function: math}"),
        ("reward.functions=[3]", "a mapping of keys; found 3", "{function: NAME}"),
        ("reward.functions=math", "a list; found 'math'", "[{function: math}]"),
        ("reward.functions='a, b'", "a list; found 'a, b'", "[{function: a}, {function: b}]"),
        ("reward.functions={function: math}", "a list; found a mapping", "[{function: math}]"),
        ("reward.functions={a: {weight: 2}, b: 3, c: }", "a list; found a mapping",
         "[{function: a, weight: 2}, {function: b, weight: 3}, {function: c}]"),
        ("reward.functions={a: {tag: x}}", "a list; found a mapping", "[{function: a, args: {tag: x}}]"),
        ("environment.tools=[calculator]", "a mapping of keys; found 'calculator'", "{function: calculator}"),
        ("environment.tools={calculator: {}}", "a list; found a mapping", "[{function: calculator}]"),
        ("rollout.engine=[{max_num_seqs: 3}, enforce_eager=true]", "a mapping; found a list",
         "{max_num_seqs: 3, enforce_eager: true}"),
        ("rollout.engine=['--max-num-seqs=3']", "a mapping; found a list", "{max_num_seqs: 3}"),
        ("rollout.engine=3", "a mapping; found 3", "{NAME: VALUE}"),
        ("slurm.environment=['A=1', 'B: x y']", "a mapping; found a list", "{A: '1', B: x y}"),
        ("slurm.environment=A=1", "a mapping; found 'A=1'", "{A: '1'}"),
        ("slurm.sbatch=['--mem-per-gpu=3G']", "a mapping; found a list", "{mem-per-gpu: 3G}"),
        ("data.chat_template_kwargs=[enable_thinking]", "a mapping; found a list", "{enable_thinking: VALUE}"),
        ("environment.args=[{a: 1}]", "a mapping; found a list", "{a: 1}"),
        ("adapter.targets=all-linear", "a list; found 'all-linear'", "[all-linear]"),
        ("slurm.modules={cuda: , gcc: }", "a list; found a mapping", "[cuda, gcc]"),
    ],
)  # fmt: skip
def test_the_form_that_a_key_takes_is_said_and_is_taken(setting: str, found: str, form: str) -> None:
    (line,) = problems(setting)
    key, _, value = setting.partition("=")
    shown = f"{key}[0]" if "a mapping of keys" in found else key
    assert line == f"{_PLACE}{shown} must be {found}; write {form}"
    whole = f"[{form}]" if shown != key else form
    assert loader.load(None, [f"{key}={whole}"]) is not None and yaml_text.read(value) != yaml_text.read(whole)


@pytest.mark.parametrize(
    ("setting", "form"),
    [
        ("reward.functions=[{math: {weight: 2}}]", "{function: math, weight: 2}"),
        ("reward.functions=[{math: 2}]", "{function: math, weight: 2}"),
        ("reward.functions=[{name: math}]", "{function: math}"),
        ("environment.tools=[{calculator: {precision: 3}}]", "{function: calculator, args: {precision: 3}}"),
    ],
)
def test_a_name_as_the_key_of_an_item_is_answered_with_the_keys_that_it_has(setting: str, form: str) -> None:
    missing, unknown = problems(setting)
    assert missing.endswith("[0].function is missing") and unknown.endswith(f"; write {form}")
    loader.load(None, [f"{setting.partition('=')[0]}=[{form}]"])


def test_a_section_in_another_form_names_its_keys() -> None:
    with pytest.raises(
        ValueError, match=r"reward is a section of keys; found a list; allowed: functions, models, workers, "
    ):
        loader.from_dict({"reward": ["math"]})


@pytest.mark.parametrize(
    "setting", ["reward.functions=[{function: a, clip_range: 3}]", "run.name=[a]", "reward.functions.weight=2"]
)
def test_what_has_no_form_near_it_gets_none(setting: str) -> None:
    assert "; write" not in problems(setting)[0]
