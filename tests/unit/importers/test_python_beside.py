"""Classes of arguments that a Python file imports from files beside it (seconds)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert

CONFIG = """from dataclasses import dataclass, field
from trl import GRPOConfig

BETA = 0.02

@dataclass
class Base(GRPOConfig):
    learning_rate: float = field(default=3e-6)

@dataclass
class Mine(Base):
    beta: float = BETA
    num_generations: int = field(default=4, metadata={"help": "of a prompt"})

@dataclass
class Ours:
    longest: int = 77

def beta(): ...
"""
MADE = """from trl import GRPOTrainer
from {module} import Mine
args = Mine(output_dir="x", epsilon=0.3, per_device_train_batch_size=4)
GRPOTrainer(model="m/m", args=args, reward_funcs=[len], train_dataset=ds).train()
"""
PARSED = """from {module} import Mine, Ours
from trl import GRPOTrainer, TrlParser
ours, args = TrlParser((Ours, Mine)).parse_args_and_config()
args.max_completion_length = ours.longest
GRPOTrainer(model="m/m", args=args, reward_funcs=[len], train_dataset=ds).train()
"""


def _of(folder: Path, text: str, name: str = "train.py", script: str = "") -> Converted:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    if script:
        return convert(script, name="run.sh", folder=folder, gpus=1)
    return convert(text, name=Path(name).name, folder=(folder / name).parent, gpus=1)


def _read(found: Converted) -> tuple[float, float, int]:
    assert found.config is not None
    return found.config.optimizer.lr, found.config.algorithm.kl_beta, found.config.batch.num_generations


@pytest.mark.parametrize(
    ("module", "file", "name"),
    [
        ("mine", "mine.py", "train.py"),
        (".mine", "mine.py", "train.py"),
        ("src.mine", "src/mine.py", "train.py"),
        ("mine", "mine/__init__.py", "train.py"),
        ("..mine", "src/mine.py", "src/grpo/train.py"),
        ("src.mine", "src/mine.py", "src/grpo/train.py"),  # from the root of the repository
    ],
)
def test_a_class_of_arguments_in_a_file_beside_is_read(tmp_path: Path, module: str, file: str, name: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(CONFIG)
    (tmp_path / "pyproject.toml").write_text("")
    found = _of(tmp_path, MADE.format(module=module), name)
    assert _read(found) == (3e-6, 0.02, 4) and not found.open
    assert any(f"of {Path(file).name}, Mine is read, too" in line for line in found.assumed)


def test_classes_that_a_parser_is_given_are_read_beside_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CONFIG)
    script = "python train.py --longest 99 --per_device_train_batch_size 4 --max_steps 5"
    found = _of(tmp_path, PARSED.format(module="mine"), script=script)
    assert _read(found) == (3e-6, 0.02, 4) and found.config.rollout.max_response_length == 99
    found = _of(tmp_path, PARSED.format(module="mine"), script=script.replace("--longest 99", "--beta 0.5"))
    assert _read(found) == (3e-6, 0.5, 4) and found.config.rollout.max_response_length == 77


def test_a_class_that_has_the_name_of_trls_is_read(tmp_path: Path) -> None:
    text = "import trl\nfrom dataclasses import dataclass\n@dataclass\nclass GRPOConfig(trl.GRPOConfig):\n"
    (tmp_path / "mine.py").write_text(f"{text}    beta: float = 0.02\n    learning_rate: float = 3e-6\n")
    found = _of(tmp_path, MADE.replace("Mine", "GRPOConfig").format(module="mine"))
    assert _read(found) == (3e-6, 0.02, 8) and not found.open


def test_a_class_is_not_read_where_its_names_mean_something_else_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CONFIG)
    for line in ("BETA = 0.5", "def field(default): ...", "from other import dataclass", "class Base: ..."):
        with pytest.raises(ValueError, match="GRPOConfig"):
            _of(tmp_path, f"{line}\n{MADE.format(module='mine')}")
    assert _read(_of(tmp_path, f"from dataclasses import field\n{MADE.format(module='mine')}")) == (3e-6, 0.02, 4)


def test_a_class_of_a_file_that_imports_its_base_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from base import Mine as Other\nfrom base import Mine\n")
    (tmp_path / "base.py").write_text(CONFIG)
    assert _read(_of(tmp_path, MADE.format(module="mine"))) == (3e-6, 0.02, 4)  # handed on
    head = "from dataclasses import dataclass\nfrom base import Mine\n"
    (tmp_path / "mine.py").write_text(f"{head}@dataclass\nclass More(Mine):\n    beta: float = 0.3\n")
    assert _read(_of(tmp_path, MADE.format(module="mine").replace("Mine", "More"))) == (3e-6, 0.3, 4)


def test_a_class_that_changes_its_arguments_itself_is_doubted_as_one_of_the_file(tmp_path: Path) -> None:
    text = "    def __post_init__(self):\n        self.beta = 1\n"
    (tmp_path / "mine.py").write_text(
        CONFIG.replace("class Ours", f"class Last(Mine):\n{text}\n@dataclass\nclass Ours")
    )
    found = _of(tmp_path, MADE.format(module="mine").replace("Mine", "Last"))
    assert any("line 2: Last.__post_init__" in line for line in found.assumed)


def test_a_class_that_is_not_at_hand_is_named(tmp_path: Path) -> None:
    why = "Mine is a class of pkg.mine, which is not at hand: put pkg/mine.py beside the file"
    text = MADE.replace("Mine", "MyConfig").format(module="pkg.mine")
    with pytest.raises(ValueError, match=why.replace("Mine", "MyConfig", 1)):
        _of(tmp_path, text)
    text = PARSED.replace("Mine", "MyConfig").replace("Ours", "OurArguments").format(module="pkg.mine")
    found = _of(tmp_path, text, script="python train.py --beta 0.5 --longest 99 --per_device_train_batch_size 8")
    assert f"train.py: {why.replace('Mine', 'MyConfig', 1)}" in found.assumed
    assert any(line.startswith("beta=0.5") for line in found.open)
    text = text.replace("import MyConfig, OurArguments", "import OurArguments").replace("MyConfig", "GRPOConfig")
    text = f"from trl import GRPOConfig\n{text}"
    found = _of(tmp_path, text, script="python train.py --beta 0.5 --longest 99 --per_device_train_batch_size 8")
    assert found.config.algorithm.kl_beta == 0.5
    assert f"train.py: {why.replace('Mine', 'OurArguments', 1)}" in found.assumed


def test_a_file_that_python_cannot_parse_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class (")
    with pytest.raises(ValueError, match="GRPOConfig"):
        _of(tmp_path, MADE.format(module="mine"))
