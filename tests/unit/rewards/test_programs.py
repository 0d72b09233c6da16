"""The reward function `code` and the tool `python`: programs of the model, in the sandbox.

It takes about forty seconds. It would catch a program that is paid without passing its tests (one that exits, prints
what a test prints, or is no program), an endless one that costs its sample instead of being wrong, and a run that
starts without a sandbox.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Reward, RewardFunction
from gspo_hpc.config.schema import Sandbox as Settings
from gspo_hpc.data.outcomes import OUTCOMES
from gspo_hpc.launch import checks
from gspo_hpc.rewards import trial
from gspo_hpc.rewards.builtin import REGISTRY, refusal
from gspo_hpc.rewards.catalogue import UnparsableGold
from gspo_hpc.rewards.environments import tools
from gspo_hpc.rewards.environments.tool_calls import Call
from gspo_hpc.rewards.environments.tools import Toolbox
from gspo_hpc.rewards.environments.turns import asked, turn_pool
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.programs import cases, harness
from gspo_hpc.rewards.programs.cases import Cases, Pair
from gspo_hpc.rewards.programs.code import program_in
from gspo_hpc.rewards.registry import part_names
from gspo_hpc.sandbox.outcomes import Outcome
from gspo_hpc.sandbox.runner import Sandbox
from tests.unit.rewards.processor_time import at_most
from tests.unit.rewards.test_rewards import drain
from tests.unit.sandbox import rungs

FENCE = "```"
PAIRS = [{"input": "1 2\n", "output": "3"}, {"input": "5 6", "output": "11\n"}]
ADDS = "a, b = map(int, input().split())\nprint(a + b)"
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]


def said(program: str, language: str = "python") -> str:
    return f"Let me see.\n{FENCE}{language}\n{program}\n{FENCE}\nThat is it."


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (said("print(1)"), "print(1)\n"),
        (said("print(1)", ""), "print(1)\n"),
        (said("print(1)", "Python3"), "print(1)\n"),
        (said("print(1)", "python title=x"), "print(1)\n"),
        (said("print(1)") + said("print(2)"), "print(2)\n"),
        (said("print(1)") + said("1", "json"), "print(1)\n"),  # the last of Python
        (f"{FENCE}`\n{FENCE}\ninner\n{FENCE}\n{FENCE}`\n", f"{FENCE}\ninner\n{FENCE}\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        (f"~~~~python\nprint(1)\n~~~\n{FENCE}\n~~~~", f"print(1)\n~~~\n{FENCE}\n"),  # another one does not end it
        (f"~~~json\n{said('print(1)')}", "print(1)\n"),  # one without an end is none
        (f"{FENCE}python\n{FENCE}python\nprint(1)\n{FENCE}`\n{FENCE}\nprint(2)\n{FENCE}", "print(2)\n"),
        (f"- first\n  {FENCE}python\n  print(1)\n  {FENCE}\n", "  print(1)\n"),
        ("print(1)", None),
        (f"{FENCE}python\nprint(1)", None),  # cut off
        (f"{FENCE}python\n\n{FENCE}", None),
        (f"{FENCE}rust\nfn main() {{}}\n{FENCE}", None),
        ("", None),
    ],
)
def test_the_last_block_is_the_program(completion: str, program: str | None) -> None:
    assert program_in(completion) == program


PAIR = Pair("1", "2")


@pytest.mark.parametrize("text", [f"{FENCE}python\n~~~\n", "~~~a\n", f"{FENCE}a b\n", "~" * 40, f"{FENCE}`\n{FENCE}\n"])
def test_fences_that_are_repeated_take_no_time_beyond_their_length(text: str) -> None:
    """A search from each of them took minutes, in which the grader's time ended: no reward in the place of 0."""
    with at_most(20.0):
        for repeated in (text * 30_000, f"{text * 30_000}`"):
            program_in(repeated)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"input": "1", "output": "2"}], Cases((PAIR,))),
        ([{"input": ["1", "3"], "output": 2, "kind": "x"}], Cases((Pair("1\n3", "2"),))),
        ({"inputs": ["1", "1"], "outputs": ["2", "2"]}, Cases((PAIR, PAIR))),
        (json.dumps({"inputs": ["1"], "outputs": ["2"], "fn_name": None}), Cases((PAIR,))),
        (json.dumps(["assert f() == 1"]), Cases((), ("assert f() == 1",))),
        (["assert f() == 1", {"input": "1", "output": "2"}], Cases((PAIR,), ("assert f() == 1",))),
        ("def check(f):\n    assert f(1)\n\ncheck(f)", Cases((), ("def check(f):\n    assert f(1)\n\ncheck(f)",))),
    ],
)
def test_forms_of_tests(value: Any, expected: Cases) -> None:
    assert cases.cases_of({"tests": value}, "tests") == expected


@pytest.mark.parametrize(
    "value", [[], "", 7, None, [7], [{"input": "1"}], {"inputs": ["1"], "outputs": []}, {"a": 1}, [""]]
)
def test_what_is_no_test_is_told_beforehand(value: Any) -> None:
    with pytest.raises(UnparsableGold, match="field 'tests'"):
        cases.cases_of({"tests": value}, "tests")
    assert "field 'tests'" in str(refusal("code", {}, {"tests": value}))


def test_a_row_without_tests_is_told_beforehand() -> None:
    assert "the data row has no field 'cases'; it has: tests" in str(refusal("code", {"tests": "cases"}, {"tests": []}))
    assert "no field 'before'" in str(refusal("code", {"setup": "before"}, {"tests": PAIRS}))


@pytest.mark.parametrize(
    ("printed", "alike"),
    [("3\n4\n", True), ("3\n4", True), ("3  \n4\n\n\n", True), ("3\r\n4", True), ("3\n\n4", False), (" 3\n4", False)],
)
def test_white_space_at_ends_does_not_count(printed: str, alike: bool) -> None:
    assert cases.same(printed, "3\n4\n") == alike


GRADED: dict[str, tuple[str, Any, float, str]] = {  # with `partial`: the reward and the outcome
    "right": (ADDS, PAIRS, 1.0, "right"),
    "half": ("input(); print(3)", PAIRS, 0.5, "wrong"),
    "a crash": ("1 / 0", PAIRS, 0.0, "crashed"),
    "an exit status": (f"{ADDS}\nraise SystemExit(1)", PAIRS, 0.0, "crashed"),
    "the second crashes": (f"{ADDS}\nassert a == 1", PAIRS, 0.5, "crashed"),
    "no compiling": ("def f(:", PAIRS, 0.0, "not_compiled"),
    "endless": ("while True:\n    pass", PAIRS, 0.0, "too_slow"),
    "memory": ("kept = [0] * 10**10", PAIRS, 0.0, "crashed"),
    "a flood": ("while True:\n    print('x' * 1000)", PAIRS, 0.0, "crashed"),
    "assertions": ("def add(a, b):\n    return a + b", ASSERTIONS, 1.0, "right"),
    "some assertions": ("def add(a, b):\n    return 0", ASSERTIONS, 0.5, "wrong"),
    "another name": ("def sub(a, b):\n    return a - b", ASSERTIONS, 0.0, "crashed"),
    "assertions that raise": ("def add(a, b):\n    return 3 if a == 1 else 1 / 0", ASSERTIONS, 0.25, "crashed"),
    "assertions of what does not compile": ("def f(:", ASSERTIONS, 0.0, "not_compiled"),
    "assertions of what does not end": ("while True:\n    pass", ASSERTIONS, 0.0, "too_slow"),
    "an assertion that does not end": (
        "def add(a, b):\n    while a == 2:\n        pass\n    return a + b",
        ASSERTIONS,
        0.25,
        "too_slow",
    ),
    "a main part": (
        "def add(a, b):\n    return a + b\n\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))",
        [*PAIRS, *ASSERTIONS],
        1.0,
        "right",
    ),
    # What a program may try that wants the reward and not the task.
    "exits with 0": ("import sys\nsys.exit(0)", ASSERTIONS, 0.0, "crashed"),
    "exits at once": ("import os\nos._exit(0)", ASSERTIONS, 0.0, "crashed"),
    "exits in the call": ("import os\ndef add(a, b):\n    os._exit(0)", ASSERTIONS, 0.0, "crashed"),
    "equals everything": (
        "class All:\n    def __eq__(self, other):\n        return True\n\ndef add(a, b):\n    return All()",
        ASSERTIONS,
        0.0,
        "wrong",
    ),
    "equals everything within": (
        "class All(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n\n"
        "def add(a, b):\n    return {'sum': [(All(),)]}",
        [
            "assert add(1, 2) == {'sum': [(3,)]}",
            "def check(f):\n    assert {'sum': [(4,)]} == f(2, 2), 'sum'\ncheck(add)",
        ],
        0.0,
        "wrong",
    ),
    "equals everything by a library": (
        "from unittest.mock import ANY\n\ndef add(a, b):\n    return ANY",
        ASSERTIONS,
        0.0,
        "wrong",
    ),
    "equals as others do": (  # values of libraries and of classes of its own, which compare as they always did
        "import collections, fractions, typing, numpy\n\nclass Point(typing.NamedTuple):\n    x: int\n\n"
        "class Own:\n    def __eq__(self, other):\n        return isinstance(other, Own)\n\n"
        "def make(n):\n    return [numpy.int64(1), fractions.Fraction(1, 2), collections.Counter('a'), Point(3), 1.0, "
        "numpy.arange(2).tolist()][n]",
        [
            "assert make(0) == 1",
            "assert make(1) == 0.5",
            "assert make(2) == {'a': 1}",
            "assert (3,) == make(3)",
            "assert make(4) == 1 and make(5) == [0, 1]",
            "assert Own() == Own()",
            "assert [make(4), make(5)] == [True, [0, 1.0]], 'one'",
        ],
        1.0,
        "right",
    ),
    "prints what is told": ("for n in range(4):\n    print('word', n, 'right')\n1 / 0", ASSERTIONS, 0.0, "crashed"),
    "reads the tests": ("import sys\nprint(open(0).read())\n1 / 0", ASSERTIONS, 0.0, "crashed"),
}


@pytest.mark.parametrize("what", GRADED)
def test_programs_are_graded(what: str) -> None:
    program, tests, reward, outcome = GRADED[what]
    box = rungs.sandbox(rungs.KINDS[-1], memory_gb=0.5)
    # A busy machine is no reason to fail: only what does not end is given little time.
    limit = 4.0 if outcome == "too_slow" else 60.0
    given = {"prompt": "", "fields": {"tests": tests}, "sandbox": box, "time_limit": limit}
    partly = REGISTRY["code"](said(program), **given, partial=True)
    assert (float(partly), partly.outcome) == (reward, outcome)
    wholly = REGISTRY["code"](said(program), **given)
    assert (float(wholly), wholly.outcome) == (float(reward == 1.0), outcome)


def test_what_stands_before_assertions() -> None:
    box = rungs.sandbox(rungs.KINDS[-1])
    row = {"tests": ["assert near(f(), 1)"], "helpers": "def near(a, b):\n    return abs(a - b) < 0.1"}
    given = {"prompt": "", "fields": row, "sandbox": box, "time_limit": 60.0}
    assert REGISTRY["code"](said("def f():\n    return 1.01"), **given, setup="helpers") == 1.0
    assert REGISTRY["code"](said("def f():\n    return 1.01"), **given) == 0.0


def test_where_the_harness_says_nothing_the_end_decides() -> None:
    assert harness.verdicts(Outcome("w 0 right\nx 1 right\n", "", None, "seconds"), "w", 3) == [
        "right",
        "too_slow",
        "too_slow",
    ]
    assert harness.verdicts(Outcome("", "", 0), "w", 1) == ["crashed"]


TWO_RIGHT = "w 0 right\nw 1 right\n"


@pytest.mark.parametrize(
    "told",
    [
        "w 0 banana\nw 1 right\n",
        "w zero right\n",
        "w 0\n",
        "w \n",
        "w 0 right more\n",
        "w -1 right\n",
        "w 0.0 right\n",
        "w \u0660 right\n",  # a digit to int()
        f"w {'9' * 5000} right\n",  # more digits than int() takes
        "w 0 ['right']\n",
        "w 0 RIGHT\n",
        "w 0 too_slow\n",
        "w 0 failed\n",
        "w 1 right\nw 0 right\n",
        "w 0 wrong\nw 0 right\nw 1 right\n",
        "w 0 not_compiled\nw 1 right\n",
        "w 1 not_compiled\n",
        TWO_RIGHT + "w 2 right\n",
        TWO_RIGHT + "w 0 right\n",
    ],
)
def test_forged_lines_are_no_verdict(told: str) -> None:
    """Lines of a program that found the harness's word: whatever they say, it is neither an outcome nor an error."""
    assert harness.verdicts(Outcome(TWO_RIGHT, "", 0), "w", 2) == ["right", "right"]
    assert harness.verdicts(Outcome(told, "", 0), "w", 2) == ["crashed", "crashed"]


FORGES = """
import os, sys
frame = sys._getframe(1)
os.write(frame.f_globals["told"], f"{frame.f_locals['word']} LINE\\n".encode())
os._exit(0)
"""


@pytest.mark.parametrize("line", ["0 banana", "zero right", "0 right right", "0"])
def test_a_program_that_forges_its_verdict_has_crashed(line: str) -> None:
    box = rungs.sandbox(rungs.KINDS[-1])
    given = {"prompt": "", "fields": {"tests": ASSERTIONS}, "sandbox": box, "time_limit": 60.0}
    found = REGISTRY["code"](said(FORGES.replace("LINE", line)), **given, partial=True)
    assert (float(found), found.outcome) == (0.0, "crashed")


@pytest.mark.parametrize("outcome", ["'banana'", "['right']", "0"])
def test_the_pool_refuses_outcomes_that_nobody_knows(outcome: str, tmp_path: Path) -> None:
    """Whatever a function of one's own calls its outcome, the trainer's table of groups gets one that it has."""
    path = tmp_path / "own.py"
    path.write_text(
        "from gspo_hpc.rewards.catalogue import Graded\n\n"
        f"def grade(completion, *, prompt, fields):\n    return Graded(1.0, {outcome})\n"
    )
    reward = Reward(functions=(RewardFunction(function=f"{path}:grade"),), workers=1)
    with RewardPool(reward) as pool:
        pool.submit("k", "x", 1, "", {})
        found = drain(pool)["k"]
    assert "returned the outcome" in str(found.failure) and "one of right, wrong" in str(found.failure)
    assert list(found.outcomes.values()) == ["failed"] and found.value == 0.0


def test_the_pool_tells_outcomes_apart() -> None:
    rungs.sandbox(rungs.KINDS[-1])
    reward = Reward(functions=(RewardFunction(function="code", timeout=8.0),), workers=1)
    with RewardPool(reward, sandbox=Settings(kind=rungs.KINDS[-1])) as pool:  # type: ignore[arg-type]
        for name in ("right", "a crash", "no compiling", "endless", "half"):
            pool.submit(name, said(GRADED[name][0]), 5, "", {"tests": GRADED[name][1]})
        pool.submit("none", "I do not know", 5, "", {"tests": PAIRS})
        pool.submit("gold", said(ADDS), 5, "", {"tests": "[7]"})
        found = drain(pool)
    assert part_names(reward) == ("code",) and {one.outcomes["code"] for one in found.values()} <= set(OUTCOMES)
    assert {key: (one.value, one.outcomes["code"]) for key, one in found.items()} == {
        "right": (1.0, "right"),
        "a crash": (0.0, "crashed"),
        "no compiling": (0.0, "not_compiled"),
        "endless": (0.0, "too_slow"),
        "half": (0.0, "wrong"),
        "none": (0.0, "unparsable"),
        "gold": (0.0, "unparsable_gold"),
    }
    assert [key for key, one in found.items() if one.failure is not None] == ["gold"]  # and not the endless one


NOWHERE = Settings(kind="http", url="http://127.0.0.1:9")


def test_without_a_sandbox_no_run_starts(tmp_path: Path) -> None:
    reward = Reward(functions=(RewardFunction(function="code"),), workers=1)
    with pytest.raises(ValueError, match="code: the function cannot be loaded: SandboxError: no sandbox can be used"):
        RewardPool(reward, sandbox=NOWHERE)
    (found,) = trial.run(reward.functions, "", {"tests": PAIRS}, sandbox=NOWHERE)
    assert found.not_here and "no sandbox can be used here" in str(found.failure)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "Add.", "tests": PAIRS}) + "\n")
    config = from_dict(
        {
            "data": {"train": str(tmp_path / "d.jsonl")},
            "reward": {"functions": [{"function": "code"}]},
            "sandbox": {"kind": "http", "url": "http://127.0.0.1:9"},
        }
    )
    with pytest.raises(ValueError, match="code cannot be loaded: SandboxError: no sandbox can be used here"):
        checks.check_inputs(config)
    checks.check_inputs(config, here=False)  # from a login node, whose nodes may have one


def test_a_function_of_ones_own_may_ask_for_the_sandbox(tmp_path: Path) -> None:
    rungs.sandbox(rungs.KINDS[-1])
    path = tmp_path / "own.py"
    path.write_text(
        "def runs(completion, *, prompt, fields, sandbox):\n"
        "    return float(sandbox.run(completion).stdout == 'yes\\n')\n"
    )
    reward = Reward(functions=(RewardFunction(function=f"{path}:runs"),), workers=1)
    with RewardPool(reward, sandbox=Settings(kind=rungs.KINDS[-1])) as pool:  # type: ignore[arg-type]
        pool.submit(0, "print('yes')", 1, "", {})
        pool.submit(1, "print('no')", 1, "", {})
        assert {key: one.value for key, one in drain(pool).items()} == {0: 1.0, 1: 0.0}
    with pytest.raises(ValueError, match="no sandbox can be used"):
        RewardPool(reward, sandbox=NOWHERE)


CALLS = {
    "a result": ("print(6 * 7)", "42\n", "done"),
    "nothing printed": ("6 * 7", "", "done"),
    "an error": ("print(1)\n1 / 0", "Error: RuntimeError: ZeroDivisionError: division by zero", "failed"),
    "a syntax error": ("def f(:", "Error: RuntimeError: SyntaxError: invalid syntax", "failed"),
    "an exit": ("raise SystemExit(3)", "Error: RuntimeError: the program ended with exit status 3", "failed"),
    "too long": (
        "while True:\n    pass",
        "Error: RuntimeError: the program was ended: it is beyond its limit of cpu_seconds",
        "failed",
    ),
    "no network": (
        "import socket\nsocket.socket()",
        "Error: RuntimeError: OSError: [Errno 38] Function not implemented",
        "failed",
    ),
}


def test_the_tool_runs_programs(tmp_path: Path) -> None:
    rungs.sandbox("landlock")
    config = from_dict(
        {
            "environment": {"tools": [{"function": "python"}], "workers": 2, "timeout": 30.0},
            "sandbox": {"kind": "landlock", "cpu_seconds": 1.0},
        }
    )
    (shown,) = tools.shown(config.environment)
    assert shown["function"]["name"] == "python"
    assert (
        shown["function"]["parameters"]["properties"].keys()
        == {"code"}
        == {*shown["function"]["parameters"]["required"]}
    )
    assert "sandbox" not in json.dumps(shown)
    box = Toolbox.of(config.environment, '{{ tools }}<tool_call>{"name": ...}</tool_call>')
    with turn_pool(config, 1) as pool:
        for name, (code, _, _) in CALLS.items():
            call = Call("python", {"code": code})
            pool.submit(name, "", 0, "", asked({}, 1, {}, call))
        found = {}
        while pool.pending:
            for key, result in pool.poll(timeout=None):
                record = box.result(Call("python", {}), result)
                found[key] = (record.result, record.outcome)
    assert found == {name: (result, outcome) for name, (_, result, outcome) in CALLS.items()}


def test_the_tool_needs_a_sandbox() -> None:
    tool = {"environment": {"tools": [{"function": "python"}], "workers": 1}}
    nowhere = {"sandbox": {"kind": "http", "url": "http://127.0.0.1:9"}}
    with pytest.raises(ValueError, match="environment.tools: python: .*no sandbox can be used here"):
        turn_pool(from_dict({**tool, **nowhere}), 1)
    with turn_pool(from_dict({"environment": {"tools": [{"function": "calculator"}], "workers": 1}, **nowhere}), 1):
        pass  # which asks for none


def test_the_sandbox_is_the_one_that_the_config_describes() -> None:
    assert Sandbox(NOWHERE).settings is NOWHERE and Sandbox().settings == Settings()
