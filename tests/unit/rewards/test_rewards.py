"""Graders by themselves, the check of a config, and the pool with graders that do everything wrong."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config import schema
from gspo_hpc.config.schema import Reward
from gspo_hpc.rewards import builtin
from gspo_hpc.rewards.pool import RewardPool
from gspo_hpc.rewards.registry import check, part_names
from gspo_hpc.rewards.results import RewardResult

GRADERS = """
import os, re, signal, sys, time
from dataclasses import dataclass
from fractions import Fraction
import numpy  # here, not in the call: its time limit is short
from neighbour import ANSWER

@dataclass
class Held:
    value: float = ANSWER

def misbehave(completion, *, prompt, fields):
    print("POLLUTION out", flush=True)
    print("POLLUTION err", file=sys.stderr, flush=True)
    os.system("echo POLLUTION child")
    how = fields["how"]
    if how == "fine": return Held().value
    if how == "raise": raise KeyError("line one\\nline two " + "x" * 5000)
    if how == "mute":
        class Mute(Exception):
            def __str__(self): raise RuntimeError
        raise Mute
    if how == "sys.exit": sys.exit(0)
    if how == "hang": time.sleep(1000)
    if how == "regex": re.match(r"(a+)+$", "a" * 60 + "b")  # in C code, deaf to Python's signal handlers
    if how == "os._exit": os._exit(3)
    if how == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "nan": return float("nan")
    if how == "inf": return float("-inf")
    if how == "huge": return 10 ** 400
    if how == "none": return None
    if how == "text": return "1.0"
    if how == "list": return [1.0]
    if how == "complex": return 1j
    if how == "unpicklable": return lambda: 1.0
    if how == "bool": return True
    if how == "fraction": return Fraction(1, 4)
    if how == "float32": return numpy.float32(0.5)
    if how == "int64": return numpy.int64(3)
    if how == "bool_": return numpy.bool_(True)
    if how == "array0": return numpy.array(2.5)
    return numpy.ones(2)

def told(completion, *, prompt, fields, response_length, bonus=0.0):
    return response_length + bonus + 100 * (prompt == "the prompt")

def pid_after(completion, *, prompt, fields):
    with open(fields["file"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(fields["seconds"] if os.path.getsize(fields["file"]) < 12 else 0)
    return 1.0

def needs_more(completion, *, prompt, fields, key, other=1): return 1.0
def no_fields(completion, prompt): return 1.0
def nothing(): return 1.0
def open_ended(completion, **rest): return 1.0
"""


@pytest.fixture
def graders(tmp_path: Path) -> str:
    (tmp_path / "neighbour.py").write_text("ANSWER = 0.75\n")
    (tmp_path / "graders.py").write_text(GRADERS)
    return str(tmp_path / "graders.py")


def RewardFunction(function: str, weight: float = 1.0, args: Any = None) -> schema.RewardFunction:  # noqa: N802
    """One term as a caller hands it over that has not loaded it from a config: nothing is validated."""
    return schema.RewardFunction.model_construct(function=function, weight=weight, args=args or {})


def reward(*terms: RewardFunction | str, **keys: Any) -> Reward:
    made = tuple(RewardFunction(term) if isinstance(term, str) else term for term in terms)
    return Reward.model_construct(**{"functions": made, "timeout": 5.0, **keys})


def drain(pool: RewardPool, seconds: float = 60.0) -> dict[Any, RewardResult]:
    """All results; fails on a duplicate and after `seconds`."""
    got: dict[Any, RewardResult] = {}
    deadline = time.monotonic() + seconds
    while pool.pending:
        assert time.monotonic() < deadline, f"{pool.pending} results are missing"
        for key, result in pool.poll(timeout=1.0):
            assert key not in got
            got[key] = result
    assert pool.poll(timeout=0.0) == []
    return got


# ---- the graders


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("The answer is 12.", ["12"]),
        ("7 + 5 = 12", ["7", "5", "12"]),
        ("7-5=2", ["7", "5", "2"]),
        ("it is -5, or \u22125, or +5", ["-5", "-5", "5"]),
        ("(3)-4 x-2 =-2", ["3", "4", "2", "-2"]),
        ("-$1,234.50 and $1,234,567", ["-1234.50", "1234567"]),
        ("1,2,3 and 1,2345 and 1234,567", ["1", "2", "3", "1", "2345", "1234", "567"]),
        ("0.5 .5 -.25 ...12", ["0.5", "0.5", "-0.25", "12"]),
        ("x2 a_3 abc12 H2O", []),
        ("\\boxed{-42}", ["-42"]),
        ("\u7b54\u6848\u662f12\u3002", ["12"]),
        ("1e3 and 2.5E-3 and 3em", ["1000", "0.0025", "3"]),
        ("1e99999999999999999999 then 4", ["4"]),
        ("none", []),
        ("", []),
    ],
)
def test_numbers_in_a_text(text: str, numbers: list[str]) -> None:
    assert builtin.numbers_in(text) == [Decimal(number) for number in numbers]


@pytest.mark.parametrize(
    ("completion", "answer", "position", "value"),
    [
        ("so 7 + 5 is 12.", 12, "last", 1.0),
        ("12, not 13", 12, "last", 0.0),
        ("12, not 13", 12, "first", 1.0),
        ("11, 12, 13", 12, "any", 1.0),
        ("11, 12, 13", 14, "any", 0.0),
        ("12.0", "12", "last", 1.0),
        ("0.1", 0.1, "last", 1.0),
        ("0.10000000000000001", 0.1, "last", 0.0),
        ("5", -5, "last", 0.0),
        ("\u22125", -5, "last", 1.0),
        ("72", "48 + 24 = 72\n#### 72", "last", 1.0),
        ("1000", "1,000", "last", 1.0),
        ("", 12, "last", 0.0),
        ("twelve", 12, "any", 0.0),
    ],
)
def test_number_match(completion: str, answer: Any, position: Any, value: float) -> None:
    given = builtin.number_match(completion, prompt="", fields={"answer": answer}, position=position)
    assert given == value and type(given) is float  # the type of a reward, also where it is right or wrong


@pytest.mark.parametrize("answer", ["twelve", None, True, [12], math.nan])
def test_number_match_refuses_an_answer_without_a_number(answer: Any) -> None:
    with pytest.raises(ValueError, match="field 'answer' is"):
        builtin.number_match("12", prompt="", fields={"answer": answer})


def test_a_missing_answer_field_names_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="no field 'answer'; it has: result, x"):
        builtin.exact_match("12", prompt="", fields={"x": 1, "result": 12})


def test_exact_match() -> None:
    fields = {"answer": "Yes ", "other": 12}
    assert builtin.exact_match(" Yes\n", prompt="", fields=fields) == 1.0
    assert builtin.exact_match("yes", prompt="", fields=fields) == 0.0
    assert builtin.exact_match("yes", prompt="", fields=fields, ignore_case=True) == 1.0
    assert builtin.exact_match("Yes.", prompt="", fields=fields, ignore_case=True) == 0.0
    assert builtin.exact_match("12", prompt="", fields=fields, answer="other") == 1.0


# ---- the check of a config


def test_what_can_grade_is_let_through(graders: str) -> None:
    check(
        reward(
            "number_match",
            RewardFunction("regex", args={"pattern": "a+", "mode": "search"}),
            RewardFunction("length", weight=0, args={"target": 0, "limit": 9}),
            RewardFunction(f"{graders}:told", args={"bonus": 1}),
            RewardFunction(f"{graders}:needs_more", args={"key": "k"}),
        )
    )


LENGTH = {"target": 10, "limit": 20}


@pytest.mark.parametrize(
    ("term", "why"),
    [
        (RewardFunction("number_mach"), "number_mach: there is no such reward function; nearest: number_match"),
        (RewardFunction("zzz"), "known: code, environment, exact_match, judge, language_consistency, length"),
        (RewardFunction("number_match", args={"anwser": "a"}), "unknown argument 'anwser'; nearest: answer"),
        (
            RewardFunction("number_match", args={"fields": {}}),
            "unknown argument 'fields'; known: answer, position, rel_tol",
        ),
        (RewardFunction("number_match", args={"position": "middle"}), "'last' or 'first' or 'any'"),
        (RewardFunction("exact_match", args={"ignore_case": "no"}), "it must be true or false"),
        (
            RewardFunction("length", args={**LENGTH, "target": True}),
            "argument target is True: it must be a whole number",
        ),
        (RewardFunction("length", args={"target": 1}), "missing a required .*argument: 'limit'"),
        (
            RewardFunction("length", args={"target": 30, "limit": 20}),
            "minimum 0, target 30 and limit 20 do not fit: 0 <= minimum <= target < limit must hold",
        ),
        (RewardFunction("regex"), "missing a required .*argument: 'pattern'"),
        (RewardFunction("regex", args={"pattern": "(a"}), "is not a valid regular expression"),
        (RewardFunction("number_match", weight=math.nan), "weight nan is not a finite number"),
        (RewardFunction("missing.py:grade"), "missing.py is not there"),
        (RewardFunction("graders.py"), "must be given as path/to/file.py:function"),
        (RewardFunction("graders:grade"), "must be given as path/to/file.py:function"),
        (RewardFunction("FILE:misbehav"), "no function 'misbehav' at its top level; nearest: misbehave"),
        (RewardFunction("FILE:needs_more"), "missing a required .*argument: 'key'"),
        (RewardFunction("FILE:needs_more", args={"key": 1, "othr": 2}), "'othr'; nearest: other"),
        (RewardFunction("FILE:no_fields"), "got an unexpected keyword argument 'fields'"),
        (RewardFunction("FILE:open_ended", args={"anything": 1, "fields": {}}), "unknown argument 'fields'"),
        (RewardFunction("FILE:nothing"), "too many positional arguments"),
        (RewardFunction("FILE:nothing", args={"key": 1}), "unknown argument 'key'; known: none"),
    ],
)
def test_each_mistake_is_named_before_anything_starts(graders: str, term: RewardFunction, why: str) -> None:
    term = RewardFunction(term.function.replace("FILE", graders), term.weight, term.args)
    with pytest.raises(ValueError, match=why):
        check(reward(term))


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def grade(:\n")
    with pytest.raises(ValueError, match="zzz") as caught:
        check(reward("zzz", f"{tmp_path}/broken.py:grade", "regex", workers=0, timeout=0.0))
    text = str(caught.value)
    for part in ("broken.py is not Python", "in line 1", "'pattern'", "reward.workers is 0", "reward.timeout is 0.0"):
        assert part in text
    with pytest.raises(
        ValueError, match="give at least one of code, environment, exact_match, judge, language_consistency"
    ):
        check(reward())


def test_a_check_never_runs_the_users_file(tmp_path: Path) -> None:
    path = tmp_path / "g.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef grade(completion, **rest): return 1.0\n")
    check(reward(f"{path}:grade"))
    assert not (tmp_path / "ran").exists()


def test_part_names_tell_two_uses_of_one_grader_apart() -> None:
    assert part_names(reward("regex", "length", "regex", "regex")) == ("regex", "length", "regex#2", "regex#3")


# ---- the pool


def test_a_weighted_sum_of_all_graders(graders: str) -> None:
    terms = (
        RewardFunction("number_match", weight=2.0),
        RewardFunction("length", weight=0.5, args={"target": 0, "limit": 10}),
        RewardFunction(f"{graders}:told", weight=0.01, args={"bonus": 0.5}),
        RewardFunction("length", weight=1.0, args={"target": 4, "limit": 6}),
    )
    with RewardPool(reward(*terms)) as pool:
        for key in range(30):
            pool.submit(("slot", key), f"so {key % 3}", 5, "the prompt", {"answer": 1})
        assert pool.pending == 30
        got = drain(pool)
    assert len(got) == 30
    for (_, key), result in got.items():
        right = float(key % 3 == 1)
        parts = {"number_match": right, "length": -0.5, f"{graders}:told": 105.5, "length#2": -0.5}
        assert result == RewardResult(pytest.approx(2 * right - 0.25 + 1.055 - 0.5), parts, None)
    assert not pool.failures


def test_a_source_is_graded_by_its_own_functions_and_weights(graders: str) -> None:
    terms = (RewardFunction("number_match"), RewardFunction("length", args={"target": 0, "limit": 10}))
    own = schema.Source(name="sums", files="a.jsonl", rewards={"length": 0.5})
    both = schema.Source(name="both", files="a.jsonl", rewards={"length": 2.0, "number_match": 3.0})
    with RewardPool(reward(*terms), sources=(own, both, schema.Source(name="all", files="b.jsonl"))) as pool:
        for name in ("sums", "both", "all", "other"):
            pool.submit(name, "so 1", 5, "the prompt", {"answer": 1, "data_source": name})
        got = drain(pool)
    assert got["sums"] == RewardResult(-0.25, {"length": -0.5}, None) and [*got["sums"].seconds] == ["length"]
    parts = {"number_match": 1.0, "length": -0.5}
    assert got["both"] == RewardResult(2.0, parts, None)
    assert got["all"] == got["other"] == RewardResult(0.5, parts, None)


def test_each_value_is_clipped_before_its_weight(graders: str) -> None:
    def term(weight: float, *range_: float) -> schema.RewardFunction:
        told = schema.RewardFunction(function=f"{graders}:told", weight=weight, clip_range=range_ or None)
        check(reward(told))
        return told

    with RewardPool(reward(term(1.0, 2, 5), term(-2.0, -1, 3.5), term(0.5))) as pool:
        for tokens in (0, 4, 9):
            pool.submit(tokens, "", tokens, "", {})
        got = drain(pool)
    name = f"{graders}:told"
    for tokens, parts in {0: (2.0, 0.0, 0.0), 4: (4.0, 3.5, 4.0), 9: (5.0, 3.5, 9.0)}.items():
        assert got[tokens].parts == dict(zip((name, f"{name}#2", f"{name}#3"), parts, strict=True))
        assert got[tokens].value == pytest.approx(parts[0] - 2 * parts[1] + 0.5 * parts[2])


@pytest.mark.parametrize("range_", [(1.0, 1.0), (1.0, 0.0)])
def test_a_range_without_room_is_refused(range_: tuple[float, float]) -> None:
    term = schema.RewardFunction(function="exact_match", clip_range=range_)
    with pytest.raises(ValueError, match=r"clip_range is \[1, [01]\]: low must be below high"):
        check(reward(term))


@pytest.fixture
def misbehaving(graders: str) -> Iterator[tuple[RewardPool, str]]:
    name = f"{graders}:misbehave"
    with RewardPool(reward("exact_match", name, timeout=2.0)) as pool:
        yield pool, name


FAILURES = {
    "raise": "raised KeyError: 'line one",
    "mute": "raised Mute",
    "sys.exit": "raised SystemExit",
    "hang": "gave no answer within 2 s",
    "regex": "gave no answer within 2 s",
    "os._exit": "ended its process (exit code 3)",
    "segfault": "ended its process (signal SIGSEGV)",
    "kill": "ended its process (signal SIGKILL)",
    "nan": "returned nan: a finite number",
    "inf": "returned -inf: a finite number",
    "huge": "returned inf: a finite number",
    "none": "returned NoneType, not a number",
    "text": "returned str, not a number",
    "list": "returned list, not a number",
    "complex": "returned complex, not a number",
    "unpicklable": "returned function, not a number",
    "array": "returned ndarray, not a number",
}
VALUES = {"fine": 0.75, "bool": 1.0, "fraction": 0.25, "float32": 0.5, "int64": 3.0, "bool_": 1.0, "array0": 2.5}


def test_whatever_a_grader_does_costs_that_sample_only(
    misbehaving: tuple[RewardPool, str], capfd: pytest.CaptureFixture[str]
) -> None:
    pool, name = misbehaving
    kinds = [kind for pair in zip(FAILURES, [*VALUES] * 3, strict=False) for kind in pair]
    assert set(kinds) == {*FAILURES, *VALUES}
    for key, kind in enumerate(kinds):
        pool.submit(key, "yes", 1, "", {"how": kind, "answer": "yes"})
    got = drain(pool)
    assert sorted(got) == list(range(len(kinds)))
    for key, kind in enumerate(kinds):
        result = got[key]
        if kind in VALUES:
            assert result == RewardResult(1.0 + VALUES[kind], {"exact_match": 1.0, name: VALUES[kind]}, None), kind
        else:
            assert (result.value, result.parts) == (0.0, {"exact_match": 1.0}), kind
            assert result.failure is not None, kind
            assert result.failure.startswith(f"{name}: {FAILURES[kind]}"), (kind, result.failure)
            assert len(result.failure) < 600, kind
            assert "\n" not in result.failure, kind
    assert pool.failures == {name: len(FAILURES)}
    pool.submit("after", "yes", 1, "", {"how": "fine", "answer": "yes"})
    assert drain(pool)["after"].value == 1.75
    printed = capfd.readouterr()
    assert "POLLUTION" not in printed.out + printed.err


def test_a_crash_is_never_blamed_on_the_call_before_it(graders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that answers one call, takes the next and dies: slow news of the answer must not cost the first."""
    from pebble.pool.process import PoolManager

    prompt_news = PoolManager.process_next_message

    def late_news(manager: PoolManager, timeout: float) -> None:
        time.sleep(0.15)
        prompt_news(manager, timeout)

    monkeypatch.setattr(PoolManager, "process_next_message", late_news)
    name = f"{graders}:misbehave"
    with RewardPool(reward(name, workers=1, timeout=5.0)) as pool:
        for key in range(4):
            pool.submit(key, "", 0, "", {"how": "kill" if key % 2 else "fine"})
        got = drain(pool)
    for key, result in got.items():
        if key % 2:
            assert "process" in str(result.failure), (key, result)  # so late, pebble may not know the signal
        else:
            assert result == RewardResult(0.75, {name: 0.75}, None), (key, result)


def test_a_weighted_sum_beyond_any_reward_is_a_failure(graders: str) -> None:
    with RewardPool(reward(RewardFunction("exact_match", weight=1e31), workers=1)) as pool:
        pool.submit(0, "a", 1, "", {"answer": "a"})
        result = drain(pool)[0]
    assert result.value == 0.0
    assert result.failure is not None
    assert "the weighted sum 1e+31" in result.failure


def test_worker_processes_stay_light(tmp_path: Path) -> None:
    (tmp_path / "g.py").write_text(
        "import sys\n"
        "def light(completion, *, prompt, fields):\n"
        "    return float(not {'torch', 'transformers', 'vllm', 'numpy'} & set(sys.modules))\n"
    )
    with RewardPool(reward(f"{tmp_path / 'g.py'}:light", workers=1)) as pool:
        pool.submit(0, "", 0, "", {})
        assert drain(pool)[0].value == 1.0


def workers_of(pool: RewardPool) -> list[int]:
    return [pid for worker in pool._workers for pid in worker.pool._pool_manager.worker_manager.workers]


def test_idle_workers_that_are_killed_lose_nothing(graders: str) -> None:
    with RewardPool(reward("exact_match")) as pool:
        for worker in workers_of(pool):
            os.kill(worker, signal.SIGKILL)
        time.sleep(0.3)  # pebble notices, and gives its pool up
        for key in range(50):
            pool.submit(key, str(key), 1, "", {"answer": "7"})
        got = drain(pool)
    assert {key: result.value for key, result in got.items()} == {key: float(key == 7) for key in range(50)}
    assert not pool.failures


@pytest.mark.parametrize(
    ("number", "starts"),
    [
        *((number, 2) for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL)),
        *((number, 1) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)),
    ],
)
def test_signals_that_are_meant_for_the_trainer_cost_no_sample(
    graders: str, tmp_path: Path, number: int, starts: int
) -> None:
    """Slurm signals every process of a step: a grader lives through the warnings, and is run again if ended."""
    seen = tmp_path / "pids"
    with RewardPool(reward(f"{graders}:pid_after", workers=1, timeout=20.0)) as pool:
        pool.submit(0, "", 0, "", {"file": str(seen), "seconds": 0.6})
        while not (seen.exists() and seen.read_text().endswith("\n")):
            time.sleep(0.02)
        os.kill(int(seen.read_text()), number)
        result = drain(pool)[0]
    assert result == RewardResult(1.0, {f"{graders}:pid_after": 1.0}, None)
    assert len(seen.read_text().split()) == starts


def test_leaving_ends_a_hanging_grader_at_once(graders: str, tmp_path: Path) -> None:
    seen = tmp_path / "pids"
    with RewardPool(reward(f"{graders}:pid_after", workers=1, timeout=600.0)) as pool:
        for key in range(500):  # more than fit into the pipe
            pool.submit(key, "x" * 10_000, 0, "", {"file": str(seen), "seconds": 600})
        while not (seen.exists() and seen.read_text().endswith("\n")):
            time.sleep(0.02)
        began = time.monotonic()
    assert time.monotonic() - began < 5.0
    assert not is_alive(int(seen.read_text().split()[0]))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_graders_do_not_outlive_a_trainer_that_is_killed(tmp_path: Path) -> None:
    """One waits for work, one is busy in C code with its time limit still to come."""
    script = tmp_path / "trainer.py"
    script.write_text(
        "import os, signal, time\n"
        "from gspo_hpc.config.schema import Reward, RewardFunction\n"
        "from gspo_hpc.rewards.pool import RewardPool\n"
        "if __name__ == '__main__':\n"
        "    term = RewardFunction(function='regex', args={'pattern': '(a+)+b'})\n"
        "    pool = RewardPool(Reward(functions=(term,), workers=2, timeout=1.0))\n"
        "    print(*[pid for w in pool._workers for pid in w.pool._pool_manager.worker_manager.workers], flush=True)\n"
        "    pool.submit(0, 'a' * 60, 0, '', {})\n"
        "    time.sleep(0.4)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open(tmp_path / "out", "w+") as out:  # not a pipe: its end would come with that of the last child
        done = subprocess.run([sys.executable, str(script)], stdout=out, env=env, timeout=60, check=False)
        workers = [int(pid) for pid in (tmp_path / "out").read_text().split()]
    assert done.returncode == -signal.SIGKILL
    assert len(workers) == 2
    assert any(is_alive(pid) for pid in workers)  # the busy one: there is something to end
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "graders live on without their trainer"
        time.sleep(0.05)


def test_a_pool_that_gives_no_sign_of_life_is_replaced(graders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardPool(reward("exact_match", workers=1, timeout=0.5)) as pool:
        monkeypatch.setattr("gspo_hpc.rewards.pool.LOAD_SECONDS", 2.5)
        os.kill(workers_of(pool)[0], signal.SIGSTOP)
        for key in range(5):
            pool.submit(key, "a", 1, "", {"answer": "a"})
        got = drain(pool)
        assert {key: result.value for key, result in got.items()} == dict.fromkeys(range(5), 1.0)
        assert pool.restarts >= 1  # a busy machine may start a process more slowly than it is given here
        assert not pool.failures


def test_graders_that_cannot_be_started_again_fail_every_sample_but_never_the_run(tmp_path: Path) -> None:
    (tmp_path / "g.py").write_text(
        "import os\nif os.path.exists(__file__ + '.broken'): os._exit(1)\ndef grade(completion, **rest): return 1.0\n"
    )
    name = f"{tmp_path / 'g.py'}:grade"
    with RewardPool(reward("exact_match", name, workers=1)) as pool:
        (tmp_path / "g.py.broken").touch()
        os.kill(workers_of(pool)[0], signal.SIGKILL)
        pool.submit(0, "a", 1, "", {"answer": "a"})
        result = drain(pool)[0]
        assert "ended its process without an answer, 4 times" in str(result.failure)
        assert pool.failures == {"exact_match": 1, name: 1}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("raise OSError('no licence')", "cannot be loaded: OSError: no licence"),
        ("import a_module_nobody_has", "cannot be loaded: ModuleNotFoundError"),
        ("import sys; sys.exit(1)", "cannot be loaded: SystemExit: 1"),
        ("import os; os._exit(1)", "the process ended while it loaded the file of a reward function"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_before_the_run(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "g.py").write_text(f"{content}\ndef grade(completion, **rest): return 1.0\n")
    with pytest.raises(ValueError, match=why):
        RewardPool(reward(f"{tmp_path / 'g.py'}:grade", workers=1))


def test_poll_waits_no_longer_than_told_and_returns_at_once_when_nothing_is_pending(graders: str) -> None:
    with RewardPool(reward(f"{graders}:misbehave", workers=1, timeout=1.5)) as pool:
        began = time.monotonic()
        assert pool.poll(timeout=None) == []
        assert time.monotonic() - began < 0.2
        pool.submit("slow", "", 0, "", {"how": "hang"})
        assert pool.poll(timeout=0.0) == []
        assert pool.poll(timeout=0.3) == []
        assert 0.3 <= time.monotonic() - began < 1.4
        [(key, result)] = pool.poll(timeout=None)
        assert key == "slow"
        assert result.failure is not None
