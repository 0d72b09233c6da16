"""Which config the trainer gets: copies, other names and functions, held against Python itself (about 3 s)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.importers.convert import Converted, convert

HEAD = "import copy, dataclasses\nfrom dataclasses import replace\nfrom trl import GRPOConfig, GRPOTrainer\n"
MADE = "args = GRPOConfig(num_generations=8, beta=0.04)\n"


@dataclasses.dataclass
class Config:
    """As much of a GRPOConfig as these scripts use."""

    num_generations: int = 8
    beta: float = 0.0


class Trainer:
    """Keep the config that it is given, as the run begins with it."""

    betas: list[float]

    def __init__(self, model: str, args: Config) -> None:
        self.args = args
        self.betas.append(args.beta)


def _ran(script: str) -> float:
    """Return the beta of the trainer that a script makes, as Python runs it."""
    betas: list[float] = []
    names: dict[str, Any] = {
        "GRPOConfig": Config,
        "GRPOTrainer": type("GRPOTrainer", (Trainer,), {"betas": betas}),
        "__name__": "__main__",
    }
    body = script.replace("from trl import GRPOConfig, GRPOTrainer\n", "")
    exec(compile(body, "script", "exec"), names)
    assert len(betas) == 1
    return betas[0]


def _of(body: str, given: str = "args") -> Converted:
    return convert(f"{HEAD}{MADE}{body}\nGRPOTrainer('m/m', args={given})\n", gpus=1)


SOURCES = {
    "args2 = dataclasses.replace(args, beta=0.1)": {"args": 0.04, "args2": 0.1},
    "b = copy.copy(args); b.beta = 0.1": {"args": 0.04, "b": 0.1},
    "b = copy.deepcopy(args); args.beta = 0.1": {"args": 0.1, "b": 0.04},
    "args.beta = 0.1; b = copy.deepcopy(args)": {"args": 0.1, "b": 0.1},
    "old = args; args = replace(args, beta=0.1)": {"args": 0.1, "old": 0.04},
    "replace(args, beta=0.1)": {"args": 0.04},
    "a, b = args, replace(args, beta=0.1); a, b = b, a": {"a": 0.1, "b": 0.04, "args": 0.04},
    "def tune(a):\n    a = replace(a, beta=0.1)\ntune(args)": {"args": 0.04},
    "from dataclasses import replace as r\nfrom copy import copy as c\nb = r(args, beta=0.1); d = c(b)": {
        "b": 0.1,
        "d": 0.1,
    },
    "def replace(a, beta):\n    a.beta = 0.3\n    return a\nb = replace(args, beta=0.1)": {"args": 0.3, "b": 0.3},
    "def tune(a):\n    b = copy.copy(a)\n    b.beta = 0.1\n    return b\nc = tune(args)": {"args": 0.04, "c": 0.1},
    "def tune():\n    global args\n    args = replace(args, beta=0.1)\ntune()": {"args": 0.1},
    "class C:\n  def __init__(self, a):\n    self.a = replace(a, beta=0.1)\nc = C(args)": {"args": 0.04, "c.a": 0.1},
}


@pytest.mark.parametrize(
    ("body", "given", "beta"), [(body, name, beta) for body, names in SOURCES.items() for name, beta in names.items()]
)
def test_what_counts_is_the_object_that_the_trainer_gets(body: str, given: str, beta: float) -> None:
    assert _ran(f"{HEAD}{MADE}{body}\nGRPOTrainer('m/m', args={given})\n") == beta
    found = _of(body, given)
    assert found.open == () and found.config.algorithm.kl_beta == beta
    assert {item.name for item in found.carried} == {"num_generations", "beta", "model_name_or_path"}


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ("if x:\n    args = replace(args, beta=0.1)", "args"),
        ("for n in range(3):\n    args = replace(args, beta=0.1)", "args"),
        ("for n in range(2):\n    b = args\n    args = replace(args, beta=0.1)", "b"),
        ("b = args if x else replace(args, beta=0.1)", "b"),
        ("def tune(a):\n    return replace(a, beta=0.1)\nb = tune(args); c = tune(args); c.beta = 0.3", "b"),
        ("class C:\n    a = args\nclass D:\n    a = replace(args, beta=0.1)", "C.a"),
        ("def other():\n    return replace(args, beta=0.1)\nif x:\n    args = other()", "args"),
    ],
)
def test_a_copy_that_may_be_the_trainers_is_named(body: str, given: str) -> None:
    found = _of(body, given)
    assert "beta=$(0.1)" in found.open or "beta=$(0.3)" in found.open
    assert "beta" not in {item.name for item in found.carried}


@pytest.mark.parametrize(
    ("body", "given", "place"),
    [
        ("", "load()", "line 6: GRPOTrainer(args=load())"),
        ("", "None", "line 6: GRPOTrainer(args=None)"),
        ("if x:\n    args = load()", "args", "line 7: GRPOTrainer(args=args)"),
        ("args = fix.of(other)", "args", "line 6: GRPOTrainer(args=args)"),
        ("all = [replace(args, beta=0.1)]", "all[0]", "line 6: GRPOTrainer(args=all[0])"),
        ("make = lambda: replace(args, beta=0.1)", "make()", "line 6: GRPOTrainer(args=make())"),
        ("b = x or args", "b", "line 6: GRPOTrainer(args=b)"),
    ],
)
def test_a_trainer_that_may_get_another_config_makes_every_argument_uncertain(
    body: str, given: str, place: str
) -> None:
    found = _of(body, given)
    assert place in found.open and "num_generations=8" in found.open
    assert not {"beta", "num_generations"} & {item.name for item in found.carried}


def test_a_trainer_that_gets_no_config_is_told() -> None:
    assert "line 5: GRPOTrainer without args" in convert(f"{HEAD}{MADE}GRPOTrainer('m/m')\n", gpus=1).open
    found = convert(
        f"{HEAD}{MADE}b = replace(args, beta=1.0)\nGRPOTrainer('m/m', args=args)\nGRPOTrainer('m/m', args=b)"
    )
    assert "beta=$(1.0)" in found.open


NAMES = ("args", "b", "c")
LINES = st.one_of(
    st.builds("{} = {}".format, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.builds("{} = copy.copy({})".format, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.builds(
        "{} = replace({}, beta={})".format, st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from("123")
    ),
    st.builds("{}.beta = {}".format, st.sampled_from(NAMES), st.sampled_from("456")),
    st.builds("setattr({}, 'beta', {})".format, st.sampled_from(NAMES), st.sampled_from("789")),
    st.builds("{}, {} = {}, {}".format, *[st.sampled_from(NAMES)] * 4),
    st.builds("{} = made({})".format, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.builds("changed({})".format, st.sampled_from(NAMES)),
    st.builds("swapped()".format),
    st.builds("for n in range(2): {} = replace({}, beta=n)".format, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.builds(
        "for n in range(2):\n    {} = {}\n    {} = copy.copy({})\n    {}.beta = n".format, *[st.sampled_from(NAMES)] * 5
    ),
    st.builds("if len(__name__) > {}: {}.beta = 7".format, st.sampled_from("29"), st.sampled_from(NAMES)),
    st.builds("if len(__name__) > {}: {} = {}".format, st.sampled_from("29"), *[st.sampled_from(NAMES)] * 2),
    st.builds("box.held = {}".format, st.sampled_from(NAMES)),
    st.builds("box.held.beta = {}".format, st.sampled_from("12")),
    st.builds("{} = box.held".format, st.sampled_from(NAMES)),
)
FUNCTIONS = {
    "made": "def made(a):\n    a = replace(a, beta=0.5)\n    return a\n",
    "changed": "def changed(a):\n    a.beta = 0.6\n",
    "swapped": "def swapped():\n    global b, c\n    b, c = c, b\n",
    "box": "class Box: pass\nbox = Box()\nbox.held = args\n",
}


@given(lines=st.lists(LINES, max_size=7), given=st.sampled_from(NAMES))
@settings(max_examples=300, deadline=None)
def test_a_config_that_is_not_the_one_that_python_trains_with_is_told(lines: list[str], given: str) -> None:
    body = "\n".join(lines)
    begin = f"{HEAD}{MADE}b = args\nc = copy.copy(args)\n"
    begin += "".join(text for name, text in FUNCTIONS.items() if name in body)
    script = f"{begin}{body}\nGRPOTrainer('m/m', args={given})\n"
    beta = _ran(script)
    found = convert(script, gpus=1)
    uncertain = any(text.startswith("beta=") for text in found.open)
    assert uncertain or found.config.algorithm.kl_beta == beta, script


@pytest.mark.parametrize(
    "body",
    [
        "".join(f"def f{n}(a):\n    b = a\n    return b\nargs = f{n}(args)\n" for n in range(200)),
        "def f():\n" + "".join(f"    x{n + 1} = x{n}\n" for n in range(999)) + "x0 = args\nargs = x999",
    ],
)
def test_a_config_that_goes_absurdly_far_is_refused_or_followed(body: str) -> None:
    try:
        found = _of(body)
    except ValueError as error:
        assert str(error) == "its GRPOConfig goes through more names and functions than are followed"
    else:
        assert found.open


def test_a_config_may_go_through_many_functions() -> None:
    body = "".join(f"def f{n}(a):\n    a.beta = {n}\n    return a\nargs = f{n}(args)\n" for n in range(20))
    assert _of(body).config.algorithm.kl_beta == 19
