"""Reward functions that can grade nothing are found before anything is started.

Five seconds. It would catch a run that starts and fails in its first rollout, and a function that is refused although
it only dislikes the completions of the trial.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import RewardFunction
from gspo_hpc.launch.checks import check_inputs
from gspo_hpc.rewards import trial

ROW = '{"prompt": "1 + 1 = ", "answer": "2"}\n'
HEAD = "def reward(completion, *, prompt, fields):\n"


def tried(tmp_path: Path, body: str, *, seconds: float = trial.SECONDS, top: str = "") -> trial.Outcome:
    file = tmp_path / "mine.py"
    file.write_text(f"{top}\n{HEAD}    {body}\n")
    (found,) = trial.run([RewardFunction(function=f"{file}:reward")], "1 + 1 = ", {"answer": "2"}, seconds=seconds)
    return found


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("return fields['solution'] == completion", "raised KeyError: 'solution'"),
        ("return completion.contains('2')", "raised AttributeError: 'str' object has no attribute 'contains'"),
        ("return len(fields) + prompt", "raised TypeError: unsupported operand type(s) for +: 'int' and 'str'"),
        ("return None", "returned NoneType, not a number"),
        ("return float('nan')", "returned nan: a finite number up to 1e+30 is needed"),
    ],
)
def test_mistakes(tmp_path: Path, body: str, failure: str) -> None:
    assert tried(tmp_path, body) == (failure, True, False)


@pytest.mark.parametrize(
    "body",
    [
        "return float(completion == fields['answer'])",
        "print('hello'); import os; os.write(1, b'more'); return 1",
        "import json; return json.loads(completion)['answer']",  # only for a completion that is JSON
        "return completion.split()[0] == '2'",  # not for an empty one
    ],
)
def test_functions_that_grade_something(tmp_path: Path, body: str) -> None:
    assert tried(tmp_path, body) == trial.Outcome(None)


def test_what_may_be_otherwise_in_the_run_is_not_certain(tmp_path: Path) -> None:
    """A service that only nodes reach, completions of another form, and functions that are slow or end the process."""
    assert tried(tmp_path, "raise ConnectionError('refused')") == ("raised ConnectionError: refused", False, False)
    assert tried(tmp_path, "raise ValueError('no tags')") == ("raised ValueError: no tags", False, False)
    assert tried(tmp_path, "import os; os._exit(3)") == ("ended its process with exit code 3", False, False)
    hanging = tried(tmp_path, "import time; time.sleep(600)", seconds=2.0)
    assert hanging == ("gave no answer within 2 s", False, False)


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    lacks = tried(tmp_path, "return 1", top="import a_module_that_is_not_here")
    assert lacks == ("cannot be loaded: ModuleNotFoundError: No module named 'a_module_that_is_not_here'", False, True)
    broken = tried(tmp_path, "return 1", top="LIMITS = {}['none']")
    assert broken == ("cannot be loaded: KeyError: 'none'", False, True)


def test_those_after_one_that_hangs_are_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def hang(completion, **_):\n    while True: pass\n{HEAD}    return 1\n")
    functions = [RewardFunction(function=f"{tmp_path}/mine.py:{name}") for name in ("reward", "hang", "reward")]
    assert [one.failure for one in trial.run(functions, "", {}, seconds=2.0)] == [
        None,
        "gave no answer within 2 s",
        None,
    ]


def test_a_run_is_refused_with_the_row_and_its_fields(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROW)

    def check(function: str, *, here: bool = True) -> None:
        config = {"reward": {"functions": [{"function": function}]}, "data": {"train": str(rows)}}
        check_inputs(from_dict(config), here=here)

    check("number_match")
    file = tmp_path / "mine.py"
    file.write_text(f"{HEAD}    return fields['solution'] == completion\n")
    with pytest.raises(
        ValueError, match=r"mine.py:reward raised KeyError: 'solution'\n.*rows.jsonl:1 \(fields: answer"
    ):
        check(f"{file}:reward")
    file.write_text(f"import a_module_that_is_not_here\n{HEAD}    return 1\n")
    with pytest.raises(ValueError, match="No module named 'a_module_that_is_not_here'"):
        check(f"{file}:reward")
    check(f"{file}:reward", here=False)  # nodes may have it
    file.write_text(f"import os\nKEY = os.environ['ONLY_ON_NODES']\n{HEAD}    return 1\n")
    with pytest.raises(ValueError, match="cannot be loaded: KeyError: 'ONLY_ON_NODES'"):
        check(f"{file}:reward")
    check(f"{file}:reward", here=False)
    rows.write_text('{"prompt": "1 + 1 = ", "solution": "2"}\n')
    with pytest.raises(ValueError, match=r"number_match cannot grade .*rows.jsonl:1: "):
        check("number_match")
