"""Stored completions graded again, by the package's own pool, and files that are none (25 s).

Catches grades that go to another completion, a failure that counts as right or that nobody hears of, an engine or torch
that is imported for it, a run that is changed, and a traceback where a file is damaged.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.evaluation import stored
from gspo_hpc.runs.directory import RunDir
from tests.unit.evaluation.kept import answer, evaluation, made_run, row

GRADERS = """
import time


def as_text(completion, *, prompt, fields):
    return float(completion == str(fields["answer"]) and str(fields["answer"]) in prompt)


def by_length(completion, *, prompt, fields, response_length, response_tokens):
    return float(response_length == len(response_tokens) == len(completion) == 2)


def best_of_group(completion, *, prompt, fields, group_completions, group_index):
    return float(group_completions[group_index] == completion == max(group_completions, key=int))


def raises(completion, *, prompt, fields):
    if fields["answer"] == 1:
        raise KeyError("no such thing")
    return 1.0


def hangs(completion, *, prompt, fields):
    if fields["answer"] == 2:
        time.sleep(100)
    return 1.0


def runs(completion, *, prompt, fields, sandbox):
    return float(sandbox.settings.output_kb == 7.0)


def always_raises(completion, *, prompt, fields):
    raise OSError("the service is away")


def of_environment(completion, *, prompt, fields, environment_reward):
    return environment_reward


def ends(completion, *, prompt, fields):
    if fields["answer"] == 0:
        import os
        os._exit(3)
    return 1.0
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with an evaluation of four prompts; of the third, number_match had failed."""
    made = made_run(tmp_path / "run")
    rows = [row(n, n == 1, [n < 2, False, n < 3]) for n in range(4)]
    rows[2]["greedy"] |= {"graded": False, "failure": "number_match: raised", "reward_parts": {}}
    stored.write_into(made, 3, rows)
    (tmp_path / "own.py").write_text(GRADERS)
    return made


def graded(run: RunDir, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return what `rescore --json` prints with these words."""
    assert main(["rescore", str(run.path), *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_an_environment_gave_is_kept(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(n, True, [True]) for n in range(4)]
    for n, one in enumerate(rows[:3]):  # of the fourth it failed
        one["greedy"]["reward_parts"] = {"environment": float(n == 1)}
    stored.write_into(run, 4, rows)
    found = graded(run, capsys, own(run, "of_environment"))
    assert (found["new"]["eval/accuracy"], found["new"]["eval/ungraded"]) == (0.25, 0.25)


def test_what_graders_use_may_be_set(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("sandbox.output_kb=7", "judges.max_requests=1")
    assert graded(run, capsys, own(run, "runs"), *settings)["new"]["eval/accuracy"] == 1.0


def own(run: RunDir, name: str) -> str:
    """The setting of a function of GRADERS."""
    return f"reward.functions=[{{function: {run.path.parent}/own.py:{name}}}]"


def content(folder: Path) -> dict[str, str]:
    """The hashes of all files."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_scores_of_the_same_function_are_those_that_were_stored(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run.path)
    found = graded(run, capsys)
    assert found["new"] == {name: value for name, value in found["old"].items() if name != "eval/ungraded"}
    assert found["old"]["eval/accuracy"] == 0.25 and found["old"]["eval/ungraded"] == 0.25
    assert found["old"]["eval/avg@3"] == pytest.approx(5 / 12) and found["old"]["eval/pass@3"] == 0.75
    assert found["old"]["eval/maj@3"] == 0.5, "in two of four prompts, two of three are right"
    assert found["changed"] == {
        "greedy": {"answers": 4, "to_right": 0, "to_wrong": 0},
        "samples": {"answers": 12, "to_right": 0, "to_wrong": 0},
    }
    assert content(run.path) == before


def test_another_function_gives_each_completion_its_own_grade(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    found = graded(run, capsys, own(run, "as_text"))
    assert found["new"]["eval/accuracy"] == 0.25 and found["new"]["eval/avg@3"] == pytest.approx(5 / 12)
    assert "eval/maj@3" not in found["new"] and found["decides"].endswith("own.py:as_text")
    lengths = graded(run, capsys, own(run, "by_length"))  # "-1" is the only one of two characters
    assert lengths["changed"]["greedy"] == {"answers": 4, "to_right": 3, "to_wrong": 1}
    assert lengths["changed"]["samples"] == {"answers": 12, "to_right": 7, "to_wrong": 5}


def test_samples_are_a_group_and_the_greedy_answer_is_another(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare: by itself, every greedy answer is the best one; of the samples, all are where they are alike."""
    found = graded(run, capsys, own(run, "best_of_group"))
    assert found["new"]["eval/accuracy"] == 1.0 and found["new"]["eval/avg@3"] == pytest.approx((2 + 2 + 1 + 3) / 12)


@pytest.mark.parametrize(
    ("name", "failed", "told"),
    [
        ("raises", 1, "raised KeyError: 'no such thing'"),
        ("hangs", 2, "gave no answer within 1 s (reward.timeout)"),
        ("ends", 0, "ended its process (exit code 3)"),
    ],
)
def test_a_function_that_fails_is_counted(
    run: RunDir, capsys: pytest.CaptureFixture[str], name: str, failed: int, told: str
) -> None:
    found = graded(run, capsys, own(run, name), "reward.timeout=1")
    assert (found["new"]["eval/accuracy"], found["new"]["eval/ungraded"]) == (0.75, 0.25)
    assert found["changed"]["greedy"]["to_wrong"] == (failed == 1), "number_match gave a mark to the second alone"
    ((why, count),) = found["failures"].items()
    assert told in why and count == 4
    assert main(["rescore", str(run.path), own(run, name), "reward.timeout=1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"4 completions without a reward: {run.path.parent}/own.py:{name}: {told}" in printed
    assert "ungraded 0.2500 0.2500" in printed


def test_where_the_new_function_fails_for_all_there_is_no_score(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had an accuracy of 0, and every right answer had become wrong."""
    found = graded(run, capsys, own(run, "always_raises"))
    scores = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/avg@3", "eval/avg@3_low", "eval/pass@3")
    assert [found["new"][name] for name in scores] == [None] * len(scores) and found["new"]["eval/ungraded"] == 1.0
    assert found["changed"] == {} and found["old"]["eval/accuracy"] == 0.25
    assert main(["rescore", str(run.path), own(run, "always_raises")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ") not graded response_length" in printed and "became wrong" not in printed
    assert "16 completions without a reward" in printed and "the service is away" in printed


def test_the_page_has_both_scores(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(run.path), own(run, "by_length")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == f"{run.path}/evaluations/000003.jsonl: step 3, 4 prompts with 3 samples"
    assert lines[1] == f"old: number_match new: {run.path.parent}/own.py:by_length"
    assert "accuracy 0.2500 (0.0456 to 0.6994) 0.7500 (0.3006 to 0.9544)" in lines
    assert any(line.startswith("maj@3 0.5000 (") and line.endswith(") not known") for line in lines)
    assert "of 4 greedy answers, 3 became right and 1 became wrong" in lines
    assert "of 12 samples, 7 became right and 5 became wrong" in lines


def test_new_grades_go_into_a_file_of_the_same_kind(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again.jsonl"
    graded(run, capsys, own(run, "by_length"), "--out", str(out))
    assert out.stat().st_mode & 0o777 == 0o600
    assert stored.read(out).scores()["eval/accuracy"] == 0.75
    assert main(["rescore", str(out), "reward.functions=[{function: number_match}]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["new"] == {
        k: v for k, v in stored.read(run.evaluations / "000003.jsonl").scores().items() if k[5:] != "ungraded"
    }
    assert main(["rescore", str(run.path), "--out", str(out)]) == 2
    assert f"--out {out}: exists; give another file" in capsys.readouterr().err
    assert main(["rescore", str(run.path), "--out", str(tmp_path / "nowhere" / "again.jsonl")]) == 2
    assert f"{tmp_path / 'nowhere'}: no such folder" in capsys.readouterr().err


def test_the_evaluation_that_was_written_last_is_taken(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    stored.write_into(run, 3, [row(n, True) for n in range(2)], by_command=True)
    stored.write_into(run, 1, [row(n, True, step=1) for n in range(3)])
    assert graded(run, capsys)["file"] == str(run.evaluations / "000003-eval.jsonl")
    assert graded(run, capsys, "--step", "1")["prompts"] == 3
    stored.write_into(run, 3, [row(n, True) for n in range(7)])
    assert graded(run, capsys)["prompts"] == 7
    inside = run.evaluations / "000001.jsonl"  # graded as its run says
    assert main(["rescore", str(inside), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 3


def test_neither_torch_nor_an_engine_is_imported(run: RunDir, project: Path) -> None:
    code = (
        "import sys\nfrom gspo_hpc.cli.main import main\n"
        f"if __name__ == '__main__':\n    assert main(['rescore', {str(run.path)!r}]) == 0\n"
        f"    assert main(['compare', {str(run.path)!r}, {str(run.path)!r}]) == 2\n"
        "    heavy = {'torch', 'vllm', 'megatron', 'transformers'} & {name.split('.')[0] for name in sys.modules}\n"
        "    assert not heavy, heavy\n    assert 'gspo_hpc.rewards.pool' in sys.modules\n"
    )
    script = run.path.parent / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], cwd=project, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["RUN", "--step", "4"], "RUN has no evaluation of step 4; nearest: 3; it has: 3"),
        (["RUNN"], "RUNN: no such run directory or file of an evaluation; nearest: RUN"),
        (["RUN/evaluations/000003.jsonl", "--step", "3"], "step 3: RUN/evaluations/000003.jsonl is a file"),
        (
            ["RUN", "reward.functions=[{function: number_mtch}]"],
            "there is no such reward function; nearest: number_match",
        ),
        (["RUN", "reward.functions=[]"], "reward.functions is not set: give a reward function"),
        (["RUN", "eval.reward=number_matc"], "must be one of reward.functions; nearest: number_match"),
        (["RUN", "rollout.temperature=1"], "rollout.temperature=1: nothing is generated, so only settings of reward"),
        (["RUN", "reward.timeot=1"], "unknown key reward.timeot; nearest: reward.timeout"),
        (["RUN", "reward.functions=[{function: RUN/gone.py:f}]"], "RUN/gone.py"),
    ],
)
def test_a_mistake_is_refused_in_a_line(
    run: RunDir, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["rescore", *(word.replace("RUN", str(run.path)) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told.replace("RUN", str(run.path)) in line


def test_a_file_without_a_run_needs_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(tmp_path / "kept.jsonl", row(1, True))
    assert main(["rescore", str(tmp_path / "kept.jsonl")]) == 2
    assert "reward.functions is not set: give a reward function, such as" in capsys.readouterr().err


def test_a_run_without_completions_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_run(tmp_path / "run")
    for _ in range(2):
        assert main(["rescore", str(made.path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{made.path} has no stored completions of an evaluation: gspo-hpc eval {made.path} stores" in line
        made.evaluations.mkdir(exist_ok=True)
        (made.evaluations / ".000001.jsonl.1a.tmp").touch()  # of a write that was killed
        (made.evaluations / "notes.jsonl").touch()


WHOLE = row(7, True, [True])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1]", "not a JSON object"),
        ('{"prompt": ', "not a JSON object"),
        (json.dumps({k: v for k, v in WHOLE.items() if k != "prompt"}), "has no `prompt`"),
        (json.dumps(WHOLE | {"fields": []}), "`fields` is [], which is no object"),
        (json.dumps(WHOLE | {"step": "3"}), '`step` is "3", which is no whole number'),
        (json.dumps(WHOLE | {"step": 4}), "is of step 4, but line 1 of step 3"),
        (json.dumps(WHOLE | {"samples": []}), "has 0 samples, but line 1 has 1"),
        (json.dumps(WHOLE | {"samples": ["text"]}), "sample 1 is not an object"),
        (
            json.dumps(WHOLE | {"greedy": answer("7", True) | {"right": 1}}),
            "greedy: `right` is 1, which is no true or false",
        ),
        (json.dumps(WHOLE | {"greedy": answer("7", True) | {"tokens": [1, "2"]}}), "greedy: `tokens` has '2'"),
        (json.dumps(WHOLE | {"greedy": answer("7", True) | {"answer": 7}}), "greedy: `answer` is 7, which is no text"),
    ],
)
def test_a_line_that_is_damaged_is_named(run: RunDir, capsys: pytest.CaptureFixture[str], line: str, told: str) -> None:
    path = run.evaluations / "000009.jsonl"
    path.write_text(f"{json.dumps(WHOLE)}\n{line}\n")
    assert main(["rescore", str(run.path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{path}:2: {told}" in error


@pytest.mark.parametrize(("content", "told"), [(b"", "is empty"), (b'{"step": 1}\n{"st', "ends within a line")])
def test_a_file_that_is_not_whole_is_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str], content: bytes, told: str
) -> None:
    (run.evaluations / "000009.jsonl").write_bytes(content)
    assert main(["rescore", str(run.path)]) == 2
    assert f"{run.evaluations}/000009.jsonl: {told}" in capsys.readouterr().err
