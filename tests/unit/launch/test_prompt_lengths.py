"""Prompts that ranks would refuse as tokens are refused before ranks or nodes are asked for, with the same words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config
from gspo_hpc.doctor import inputs
from gspo_hpc.launch import local, prompt_lengths
from gspo_hpc.launch.slurm import submit
from tests.folders import model_folder

WHOLE = {
    "run": {"max_steps": 2},
    "model": {"path": "model"},
    "cluster": {"platform": "cpu"},
    "batch": {"num_generations": 4, "global_batch_size": 16, "micro_batch_size": 1},
    "data": {"train": "rows.jsonl"},
    "rollout": {"max_prompt_length": 32, "max_response_length": 32},
    "reward": {"functions": [{"function": "number_match"}]},
}
SHORT, LONG = "1 + 1 = ", "1 + 1 = " * 5
ROWS = [SHORT] * 18 + [LONG, SHORT + LONG]
REFUSAL = (
    "2 of 20 prompts are longer than rollout.max_prompt_length (32), first rows.jsonl:19 with 40 tokens, at most 48 "
    "(rows.jsonl:20)\nset rollout.max_prompt_length=48, or data.overlong to drop or truncate_left"
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    model_folder(tmp_path / "model")
    write(*ROWS)
    Path("run.yaml").write_text(json.dumps(WHOLE))
    return tmp_path


def write(*prompts: str, name: str = "rows.jsonl") -> None:
    Path(name).write_text("".join(json.dumps({"prompt": one, "answer": "2"}) + "\n" for one in prompts))


def config(*words: str) -> Config:
    return loader.load("run.yaml", words)


def train(config: Config) -> None:
    start = "import pathlib, sys; pathlib.Path('started').touch(); sys.exit(2)"
    local.train(config, worker=[sys.executable, "-c", start])


def diagnosed(config: Config) -> dict[str, Any]:
    return {one.check: one for one in inputs.findings(config)}


WAYS: dict[str, Callable[[Config], Any]] = {
    "train": train,
    "train --dry-run": local.dry_run,
    "submit": lambda config: submit.checked(config, set()),
    "submit --dry-run": submit.dry_run,
}


@pytest.mark.parametrize("way", WAYS)
def test_prompts_that_are_too_long_are_refused_before_ranks_or_nodes(way: str, project: Path) -> None:
    with pytest.raises(ValueError, match="longer than") as refused:
        WAYS[way](config())
    assert str(refused.value) == REFUSAL and not Path("started").exists() and not Path("runs").exists()


def test_the_page_of_doctor_has_the_longest_prompt(project: Path) -> None:
    found = diagnosed(config())["prompts as tokens"]
    assert found.state == "fail" and found.finding == REFUSAL.replace("\n", "; ")
    found = diagnosed(config("rollout.max_prompt_length=64"))["prompts as tokens"]
    assert (found.state, found.finding) == ("ok", "the longest of 20 has 48 (rollout.max_prompt_length=64)")


def test_what_can_be_used_starts(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["data.overlong=drop"], ["data.overlong=truncate_left"], ["rollout.max_prompt_length=48"]):
        submit.checked(config(*words), set())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("short", "told"), [(0, "leaves none"), (3, "leaves 3, but a rollout takes 4 different")])
def test_too_few_prompts_that_are_left_are_refused(short: int, told: str, project: Path) -> None:
    write(*[SHORT] * short, *[LONG] * 9)
    with pytest.raises(ValueError, match=told):
        submit.checked(config("data.overlong=drop"), set())


def test_unseen_prompts_are_looked_at(project: Path) -> None:
    write(SHORT, LONG, name="eval.jsonl")
    write(*[SHORT] * 9)
    with pytest.raises(ValueError, match=r"1 of 2 prompts are longer .*eval.jsonl:2"):
        submit.checked(config("data.eval=eval.jsonl"), set())


def test_a_template_that_refuses_a_prompt_is_told(project: Path) -> None:
    text = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[-1].content }}"
    )
    Path("model/chat_template.jinja").write_text(text)
    with pytest.raises(ValueError, match="20 of 20 prompts cannot be built\n.*the chat template refuses .* no system"):
        submit.checked(config("data.system_prompt=Answer."), set())


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda: Path("model/tokenizer.json").write_text('{"model": {}}'), "model: "),
        (lambda: Path("model/tokenizer.json").rename("model/vocab.json"), "model has no tokenizer.json"),
        (lambda: Path("model/chat_template.jinja").write_text("{{ unknown(1) }}"), "the chat template cannot be"),
        (lambda: sys.modules.update(tokenizers=None), "the library tokenizers is not installed here"),  # type: ignore[dict-item]
    ],
)
def test_what_was_not_checked_is_said_once(
    spoil: Callable[[], Any], told: str, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    import tokenizers

    monkeypatch.setitem(sys.modules, "tokenizers", tokenizers)  # so that it is put back
    spoil()
    assert main(["submit", "run.yaml", "--dry-run", "--array", "optimizer.lr=1e-6,2e-6"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("not checked")]
    assert len(said) == 1 and said[0].startswith(f"not checked: prompts as tokens: {told}"), said
    assert diagnosed(config())["prompts as tokens"].state == "skip"


def test_of_much_text_the_longest_is_looked_at(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lengths, "MOST_CHARACTERS", 100)
    with pytest.raises(ValueError, match=r"2 of 3 prompts are longer .*\n.*\n\(of 20 prompts, the longest 3 were"):
        submit.checked(config(), set())
    found = prompt_lengths.look(config("rollout.max_prompt_length=48"))
    assert (found.prompts, found.longest) == (3, 48) and "all but 3 prompts of rows.jsonl" in str(found.unchecked)
    assert prompt_lengths.look(config("data.overlong=drop")).prompts == 12  # of 8 characters each


def test_torch_is_not_imported(project: Path) -> None:
    code = (
        "import sys; from gspo_hpc.config import loader; from gspo_hpc.launch import prompt_lengths\n"
        "prompt_lengths.look(loader.load('run.yaml', ['data.overlong=drop']))\n"
        "print('tokenizers' in sys.modules, {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["True", "set()\n"]
