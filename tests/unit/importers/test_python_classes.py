"""Classes derived from GRPOConfig: the defaults that count are those that Python's dataclasses give the one in use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.importers.convert import Converted, convert

HEAD = (
    "from dataclasses import dataclass, field\nfrom typing import ClassVar\nfrom trl import GRPOConfig, GRPOTrainer\n"
)
TRAINED = "GRPOTrainer(model='m/m', args=args)\n"
OTHER = "@dataclass\nclass Other(GRPOConfig):\n    beta: float = 0.7\n    epsilon: float = 0.6\n"


@dataclasses.dataclass
class Config:
    """As much of a GRPOConfig as these scripts use."""

    num_generations: int = 8
    beta: float = 0.0
    epsilon: float = 0.2


def _ran(script: str) -> Any:
    names: dict[str, Any] = {"GRPOConfig": Config, "GRPOTrainer": lambda model, args: None, "__name__": "__main__"}
    exec(compile(script.replace("from trl import GRPOConfig, GRPOTrainer\n", ""), "script", "exec"), names)
    return names["args"]


def _of(classes: str, made: str = "Mine(num_generations=8)") -> Converted:
    return convert(f"{HEAD}{OTHER}{classes}args = {made}\n{TRAINED}", gpus=1)


MINE = "@dataclass\nclass Mine(GRPOConfig):\n    beta: float = 0.3\n"


@pytest.mark.parametrize(
    ("classes", "made"),
    [
        ("", "GRPOConfig()"),
        (MINE, "GRPOConfig()"),
        (MINE, "Mine()"),
        (MINE, "Mine(beta=0.1)"),
        (f"{MINE}@dataclass\nclass B(Mine):\n    beta: float = 0.4\n", "Mine()"),
        (f"{MINE}@dataclass\nclass B(Mine):\n    epsilon: float = 0.4\n", "B()"),
        (f"{MINE}class B(Mine):\n    beta: float = 0.4\n", "B()"),
        (f"{MINE}class B(Mine, Other): ...\n", "B()"),
        (f"{MINE}@dataclass\nclass B(Mine, Other): ...\n", "B()"),
        (f"{MINE}@dataclass\nclass B(Other, Mine): ...\n", "B()"),
        ("class Mine(GRPOConfig):\n    beta: float = 0.3\n", "Mine()"),
        ("@dataclass\nclass Mine(GRPOConfig):\n    beta = 0.3\n", "Mine()"),
        ("@dataclass\nclass Mine(GRPOConfig):\n    beta: float\n    beta = 0.3\n", "Mine()"),
        ("@dataclass\nclass Mine(GRPOConfig):\n    beta: ClassVar[float] = 0.3\n", "Mine()"),
        ("@dataclass(kw_only=True)\nclass Mine(GRPOConfig):\n    beta: float = field(default=0.3)\n", "Mine()"),
        ("@dataclass\nclass Mine(GRPOConfig):\n    beta: float = field(default_factory=lambda: 0.3)\n", "Mine()"),
        ("@dataclass\nclass X:\n    beta: float = 0.3\n@dataclass\nclass Mine(X, GRPOConfig): ...\n", "Mine()"),
        (
            "@dataclass\nclass X:\n    beta: float = 0.3\n@dataclass\nclass Mine(GRPOConfig, X): ...\n",
            "Mine()",
        ),
        ("class X:\n    beta: float = 0.3\n@dataclass\nclass Mine(X, GRPOConfig): ...\n", "Mine()"),
    ],
)
def test_the_defaults_are_those_that_python_gives_the_class_in_use(classes: str, made: str) -> None:
    made = made.replace("(", "(num_generations=8, ")
    ran = _ran(f"{HEAD}{OTHER}{classes}args = {made}\n{TRAINED}")
    found = _of(classes, made)
    assert found.open == ()
    assert (found.config.algorithm.kl_beta, found.config.algorithm.clip_low) == (ran.beta, ran.epsilon)


@pytest.mark.parametrize(
    "classes",
    [
        "@dataclass\nclass Mine(GRPOConfig):\n    if x: beta: float = 0.3\n    else: beta: float = 0.4\n",
        "@dataclass\nclass Mine(GRPOConfig):\n    beta: float = 0.3\n    beta = 0.4 if x else 0.5\n",
        "@dataclass\nclass Mine(GRPOConfig):\n    beta: float = f()\n",
        "@dataclass\nclass Mine(GRPOConfig):\n    beta: float = field(default_factory=f)\n",
        "class X(GRPOConfig):\n    beta = 0.3\n@dataclass\nclass Mine(X):\n    beta: float\n",
        "from mine import X\n@dataclass\nclass Mine(X, GRPOConfig): ...\n",
        "@made\nclass Mine(GRPOConfig): ...\n",
        "from pydantic.dataclasses import dataclass\n@dataclass\nclass Mine(GRPOConfig): ...\n",
        "@dataclass(init=False)\nclass Mine(GRPOConfig):\n    beta: float = 0.3\n",
        "class Mine(GRPOConfig, metaclass=M): ...\n",
        "if x:\n    class Mine(GRPOConfig): ...\nelse:\n    class Mine(GRPOConfig):\n        def __init__(self): ...\n",
        "class Mine(GRPOConfig):\n    beta = property(f)\n",
        "class X(GRPOConfig):\n    def __post_init__(self): ...\nclass Mine(X): ...\n",
    ],
)
def test_a_default_that_is_not_certain_is_open(classes: str) -> None:
    found = _of(classes)
    assert found.open and "beta" not in {item.name for item in found.carried}


def test_what_a_class_that_is_not_used_does_is_of_no_concern() -> None:
    other = "class Worse(GRPOConfig):\n    beta: float = f()\n    def __post_init__(self): ...\n"
    own = "@dataclass\nclass Mine(GRPOConfig):\n    @property\n    def world(self): return 1\n"
    assert _of(other + own).open == ()


def test_a_parser_gives_the_defaults_of_the_class_that_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "t.py"

    def of(classes: str) -> Converted:
        file.write_text(f"{HEAD.strip()}, TrlParser\n{OTHER}{MINE}(args,) = TrlParser({classes}).parse()\n")
        return convert("python t.py --num_generations 8 --max_steps 4", folder=tmp_path, gpus=1)

    assert of("(GRPOConfig,)").config.algorithm.kl_beta == 0 and of("(Mine,)").config.algorithm.kl_beta == 0.3
    assert of("dataclass_types=[Other]").config.algorithm.clip_low == 0.6
    assert of("(Mine if x else Other,)").open and of("types()").open
    assert of("types := (S, Mine)").config.algorithm.kl_beta == 0.3


PARSER = "p = TrlParser((GRPOConfig,))\n"
SET = "p.set_defaults(beta=0.3)\n"


def _preset(body: str, tmp_path: Path) -> Converted:
    (tmp_path / "t.py").write_text(f"from trl import GRPOConfig, TrlParser\n{body}")
    return convert("python t.py --num_generations 8 --max_steps 4", folder=tmp_path, gpus=1)


PARSE = "(args,) = p.parse_args_and_config()\n"


@pytest.mark.parametrize(
    "body",
    [
        f"{PARSER}{SET}{PARSE}",
        f"{PARSER}p.set_defaults(beta=0.1, epsilon=0.2)\n{SET}{PARSE}",
        f"{PARSER}KW = {{'beta': 0.3}}\np.set_defaults(**KW)\n{PARSE}",
        f"def main():\n    {PARSER}    {SET}    {PARSE}main()\n",
        f"{PARSER}def tune():\n    {SET}tune()\n{PARSE}",
        f"{PARSER}{SET}TrlParser((S,)).set_defaults(beta=1)\n{PARSE}",
        f"import argparse\nq = argparse.ArgumentParser()\nif x: q.set_defaults(beta=1)\n{PARSER}{SET}{PARSE}",
    ],
)
def test_defaults_that_a_parser_surely_has_count(body: str, tmp_path: Path) -> None:
    found = _preset(body, tmp_path)
    assert found.config.algorithm.kl_beta == 0.3 and found.open == ()


@pytest.mark.parametrize(
    "body",
    [
        f"{PARSER}if x: {SET}{PARSE}",
        f"{PARSER}{SET}if x: p.set_defaults(beta=0.1)\n{PARSE}",
        f"{PARSER}for n in range(x): {SET}{PARSE}",
        f"{PARSER}{PARSE}{SET}",
        f"{PARSER}def tune():\n    {SET}{PARSE}",
        f"{PARSER}def tune():\n    {SET}if x: tune()\n{PARSE}",
        f"{PARSER}q = p\nq.set_defaults(beta=0.3)\n{PARSE}",
        f"{PARSER}p = other(p)\n{SET}{PARSE}",
        f"{PARSER}p.set_defaults(beta=load())\n{PARSE}",
        f"{PARSER}[p.set_defaults(beta=0.3) for _ in x]\n{PARSE}",
    ],
)
def test_defaults_that_a_parser_may_not_have_are_open(body: str, tmp_path: Path) -> None:
    assert any(text.startswith("beta=$(") for text in _preset(body, tmp_path).open)
