"""Trainers that a Python file imports from files beside it are read as those that it defines itself.

Takes three seconds. It would catch a run whose loss is one of its own, in a file that lies beside it, and that
becomes a plain run of GRPO.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert

RUN = """from trl import GRPOConfig, GRPOTrainer
{imports}
args = GRPOConfig(num_generations=4, learning_rate=1e-6)
{name}(model='m/m', args=args, reward_funcs=f).train()
"""
LOSS = "    def compute_loss(self, model, inputs):\n        return 0\n"
LOGS = "    def log(self, logs):\n        pass\n"
THEIRS = "from transformers import Trainer\nclass OwnTrainer(Trainer):\n"
OWN = "from trl import GRPOTrainer\nclass Own(GRPOTrainer):\n"


def of(folder: Path, imports: str, name: str, **files: str) -> Converted:
    for path, text in files.items():
        file = folder / f"{path.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return convert(RUN.format(imports=imports, name=name), folder=folder, name="run_it.py", gpus=1)


@pytest.mark.parametrize(
    ("imports", "name", "files", "where"),
    [
        ("from own import Own", "Own", {"own": OWN + LOSS}, "own.py, line 3: Own"),
        ("from own import Own as Mine", "Mine", {"own": OWN + LOSS}, "own.py, line 3: Own"),
        ("from src.own import Own", "Own", {"src.own": OWN + LOSS}, "own.py, line 3: Own"),
        ("from src import Own", "Own", {"src.__init__": "from .own import Own\n", "src.own": OWN + LOSS},
         "own.py, line 3: Own"),
        ("from own import OwnTrainerV14", "OwnTrainerV14", {"own": OWN.replace("Own", "OwnTrainerV14") + LOSS},
         "own.py, line 3: OwnTrainerV14"),
        ("from own import Next", "Next", {"own": f"{OWN}{LOSS}class Next(Own):\n{LOGS}"}, "own.py, line 3: Own"),
        ("from two import Next", "Next", {"own": OWN + LOSS, "two": f"from own import Own\nclass Next(Own):\n{LOGS}"},
         "own.py, line 3: Own"),
        ("from own import Own\nclass Next(Own):\n" + LOGS, "Next", {"own": OWN + LOSS}, "own.py, line 3: Own"),
        ("from own import Own\nclass Next(Own):\n" + LOSS, "Next", {"own": OWN + LOGS}, "line 4: Next"),
        ("from own import OwnTrainer", "OwnTrainer", {"own": THEIRS + LOSS},
         "own.py, line 3: OwnTrainer"),
    ],
)  # fmt: skip
def test_a_loss_in_a_file_beside_is_refused_as_in_the_same_file(
    tmp_path: Path, imports: str, name: str, files: dict[str, str], where: str
) -> None:
    with pytest.raises(ValueError) as refused:
        of(tmp_path, imports, name, **files)
    assert (
        str(refused.value) == f"{where} overrides compute_loss of TRL's trainer: what it trains has no counterpart here"
    )


def test_a_class_that_a_condition_chooses_is_read(tmp_path: Path) -> None:
    text = "from own import Own\nchosen = Own if v else GRPOTrainer"
    with pytest.raises(ValueError, match=r"^own\.py, line 3: Own overrides compute_loss"):
        of(tmp_path, text, "chosen", own=OWN + LOSS)
    found = of(tmp_path, text, "chosen", own=OWN + LOGS)
    assert found.config.optimizer.lr == 1e-6 and "own.py, class Own: log" in {item.given for item in found.left}


def test_a_script_that_starts_the_file_is_refused_with_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN + LOSS)
    (tmp_path / "run_it.py").write_text(RUN.format(imports="from own import Own", name="Own"))
    with pytest.raises(ValueError, match=r"^run_it\.py: own\.py, line 3: Own overrides compute_loss"):
        convert("python run_it.py\n", folder=tmp_path, name="run.sh")


def test_what_else_it_changes_is_told(tmp_path: Path) -> None:
    found = of(tmp_path, "from own import Own", "Own", own=OWN + LOGS)
    assert found.config.optimizer.lr == 1e-6 and not found.open
    left = {item.given: item.why for item in found.left}
    assert left["own.py, class Own: log"] == "a trainer of the file's own: what these methods do is not carried over"
    assert any("of own.py, Own is read, too" in line for line in found.assumed)


@pytest.mark.parametrize("name", ["OwnTrainer", "OwnTrainerV14", "OwnTrainer2"])
def test_one_that_is_not_at_hand_is_told(tmp_path: Path, name: str) -> None:
    found = of(tmp_path, f"from own import {name}", name)
    assert any(
        f"trains with {name}, which is not TRL's: what that changes is not known" in one for one in found.assumed
    )
    assert found.config.optimizer.lr == 1e-6


def test_a_function_or_a_class_of_another_kind_is_none(tmp_path: Path) -> None:
    files = {"own": "class Own(dict):\n" + LOSS + "def make(**given):\n    pass\n"}
    found = of(tmp_path, "from own import Own, make\nOwn()\nmake()\n", "GRPOTrainer", **files)
    assert found.config.optimizer.lr == 1e-6 and not found.open
