"""Write the reward functions of a project that begins from another project's script, and the test for them.

Those of TRL grade a batch, and the one of verl has arguments of its own; both are copied where they are found, and
called for one completion at a time. One that is not found is there by its name, to be filled in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.starter.python_code import Code

_HEAD = '"""Reward functions of {source}. gspo-hpc calls each for one completion, in worker processes."""\n'
_BATCH = '''

def _graded(function, completion, prompt, fields):
    """Call a function of TRL, which grades a batch, with a batch of one."""
    row = {{"prompt": prompt, **fields{rows}}}
{chat}    given = {{name: [value] for name, value in row.items() if name not in ("prompt", "completion")}}
    given |= {{"prompts": [row["prompt"]], "completions": [completion]}}
    taken = inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        given = {{name: value for name, value in given.items() if name in taken}}
    (reward,) = function(**given)
    return 0.0 if reward is None else float(reward)
'''
_ONE = '''

def grade_{name}(completion, *, prompt, fields):
    """Return what {name} of {source} gives for one completion."""
    return _graded({name}, completion, prompt, fields)
'''
_VERL = '''

def grade_{name}(completion, *, prompt, fields):
    """Return what {name} of {source} gives for one completion."""
    return _number(
        {name}(
            data_source=fields.get("data_source"),
            solution_str=completion,
            ground_truth=(fields.get("reward_model") or {{}}).get("ground_truth"),
            extra_info=fields.get("extra_info"),
        )
    )


def _number(score):
    """Return the reward in what a function of verl gives: a number, or a score with what else it tells."""
    return float(score["score"] if isinstance(score, dict) else score)
'''
_OPEN = '''

def {name}(completion, *, prompt, fields):
    """Grade a completion as {given} of {source} does: fill it in, for its code was not found there."""
    raise NotImplementedError("reward.py: fill in {name}, the reward function of {source}")
'''
_TEST = '''"""Reward functions that are wrong train a model to be wrong: add answers that should not be rewarded.

Run it with: python -m pytest test_reward.py
"""

import pytest

import reward

PROMPT = "What is 17 + 25?"
FIELDS = {fields}


@pytest.mark.parametrize("name", {names})
def test_it_returns_a_number(name):
    if FIELDS is None:
        pytest.skip("write the fields of a row of your data into FIELDS")
    try:
        found = getattr(reward, name)("17 + 25 = 42", prompt=PROMPT, fields=FIELDS)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert isinstance(found, float)
'''


@dataclass(frozen=True)
class Rewards:
    """The file of reward functions, the test for it, and the functions with their weights."""

    text: str
    test: str
    functions: tuple[tuple[str, float | None], ...]
    notes: tuple[str, ...]
    unfilled: tuple[str, ...]  # functions whose code was not found


def of_trl(names: Sequence[str], weights: Sequence[float], code: Code, source: str, prompt_key: str) -> Rewards:
    """Return the functions that `names` of a script are; `code` is the script if it is Python."""
    found = [name for name in names if name.isidentifier() and code.needed(name)]
    rows = code.rows() if found else None
    mapped = code.needed(rows) if rows is not None else None
    body = code.needed(*found, *([] if mapped is None or rows is None else [rows])) or ""
    text, functions = _HEAD.format(source=source), []
    if found:
        text += f"\nimport inspect\n\n{body}\n"
        given = f', **_row({{"{prompt_key}": prompt, **fields}})' if mapped is not None and rows is not None else ""
        if given and rows is not None:
            text += f"\n\n# {source} maps its rows with it.\n_row = {code.segment(rows)}\n"
        chat = re.search(r"""\[["']content["']\]""", body) is not None
        sent = '[{"role": "assistant", "content": completion}]'
        line = f"    completion = {sent}\n" if chat else ""
        if given and not chat:
            line = f'    if isinstance(row["prompt"], list):\n        completion = {sent}\n'
        text += _BATCH.format(rows=given, chat=line)
    for name in names:
        if name in found:
            text += _ONE.format(name=name, source=source)
            functions.append(f"grade_{name}")
        else:
            own = _own_name(name)
            text += _OPEN.format(name=own, given=name, source=source)
            functions.append(own)
    return _with(text, functions, weights, found, names, source, None)


def of_verl(file: Path | None, name: str, source: str) -> Rewards:
    """Return the function of a verl run: custom_reward_function.path and name."""
    code = Code(file.read_text("utf-8", "replace")) if file is not None else Code("")
    body, text = code.needed(name), _HEAD.format(source=source)
    if body is None or file is None:
        text += _OPEN.format(name=name, given=name, source=source)
        functions, found = [name], []
    else:
        text += f"\n{body}\n{_VERL.format(name=name, source=file.name)}"
        functions, found = [f"grade_{name}"], [name]
    row = {"data_source": "mine", "reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {}}
    return _with(text, functions, (), found, [name], source, row)


def _with(
    text: str,
    functions: Sequence[str],
    weights: Sequence[float],
    found: Sequence[str],
    names: Sequence[str],
    source: str,
    row: Mapping[str, Any] | None,
) -> Rewards:
    weighed = weights if len(weights) == len(functions) else [None] * len(functions)
    notes = []
    if found:
        notes.append(
            f"reward.py has {', '.join(found)} of {source}, copied; each is called for one completion at a time"
        )
    if left := [name for name in names if name not in found]:
        notes.append(f"reward.py: fill in {', '.join(map(_own_name, left))}, whose code is not in {source}")
    test = _TEST.format(fields=row and dict(row), names=list(functions))
    return Rewards(text, test, tuple(zip(functions, weighed, strict=True)), tuple(notes), tuple(left))


def _own_name(name: str) -> str:
    """Return a name of Python for a reward function that is a path, a model or a dotted name."""
    own = re.sub(r"\W", "_", name.rsplit("/", 1)[-1].rsplit(".", 1)[-1])
    return own if own.isidentifier() else f"reward_{own}"
