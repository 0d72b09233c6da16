"""The page that compares runs. Takes milliseconds; catches a difference that is left out, a curve of the wrong run,
and text of a user that is taken for markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config import yaml_text
from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Optimizer, Reward, RewardFunction, Rollout
from gspo_hpc.report import compare
from gspo_hpc.report.compare import Compared, differences, write_comparison
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.reader import read_run
from tests.unit.report.test_page import FULL, Page, make_run, record


def made(folder: Path, lr: float, records: Any = FULL, **config: Any) -> RunDir:
    return make_run(folder, records, optimizer=Optimizer(lr=lr), **config)


def test_settings_that_differ_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    better = [one | {"reward": 0.9, "completion_tokens_per_s": 50.0} for one in FULL if one["step"]]
    better = [FULL[0], *better[:-1], better[-1] | {"eval/accuracy": 0.75}]
    runs = [made(tmp_path / "a", 1e-6), made(tmp_path / "b", 2e-6, better), made(tmp_path / "c", 1e-6, FULL[:8])]
    found = list(differences([read_run(run.path) for run in runs]))
    assert found == [Compared("optimizer.lr", ("1e-06", "2e-06", "1e-06"))], found
    assert main(["report", "--compare", *(str(run.path) for run in runs), "--out", str(tmp_path / "x.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.html'}\n"
    html = (tmp_path / "x.html").read_text()
    page = Page(html)  # tags balance
    rows = re.findall(r"<tr><td>([^<]*)</td>((?:<td>[^<]*</td>)+)</tr>", html)
    table = {name: re.findall(r"<td>([^<]*)</td>", cells) for name, cells in rows}
    assert table["steps"] == ["20 of 20", "20 of 20", "7 of 20"]
    assert table["reward, first and last tenth of the rollouts"][1] == "0.9 → 0.9"
    assert table["accuracy on unseen prompts"] == ["0.25", "0.25 → 0.75", "0.25"]
    assert table["completion tokens per second"][1] == "50" and table["optimizer.lr"] == list(found[0].cells)
    assert re.findall(r"<th>([^<]+)</th>", html)[:3] == ["a", "b", "c"], "runs of one name have their folders"
    assert page.texts and str(tmp_path) not in html
    assert not any(name in html for name in ("http://", "https://")) or "www.w3.org" in html


def test_the_ends_of_a_run_are_means_of_a_tenth(tmp_path: Path) -> None:
    """Three rollouts at each end of 30."""
    rewards = [0.1, 0.2, 0.3, *[0.5] * 24, 0.7, 0.8, 0.6]
    records = [record(step, reward=one, rollout=step) for step, one in enumerate(rewards, 1)]
    run = read_run(made(tmp_path / "a", 1e-6, records).path)
    (found,) = [one.cells[0] for one in compare._results([run]) if one.name.startswith("reward, ")]
    assert found == "0.2 → 0.7"


def test_reward_functions_stand_as_in_a_config(tmp_path: Path) -> None:
    """They were the repr of Python, with every default."""
    one, two = (
        Reward(functions=(RewardFunction(function="number_match"),)),
        Reward(
            functions=(
                RewardFunction(function="number_match"),
                RewardFunction(function="length", weight=0.5, args={"target": 20}),
            )
        ),
    )
    runs = [made(tmp_path / "a", 1e-6, reward=one), made(tmp_path / "b", 1e-6, reward=two)]
    (found,) = differences([read_run(run.path) for run in runs])
    assert found.name == "reward.functions"
    assert found.cells[0] == "[{function: number_match}]"
    text = found.cells[1]
    assert text == "[{function: number_match}, {function: length, weight: 0.5, args: {target: 20}}]"
    assert from_dict({"reward": {"functions": yaml_text.read(text)}}).reward == two, "it can be pasted into a config"


def test_an_evaluation_that_was_not_graded_is_no_zero(tmp_path: Path) -> None:
    failed = {"eval/accuracy": None, "eval/ungraded": 1.0, "eval/failure": "judge: no answer <b>"}
    runs = [
        made(tmp_path / name, 1e-6, FULL[:1] + FULL[1:7] + [FULL[7] | own]) for name, own in (("a", {}), ("b", failed))
    ]
    cells = {one.name: one.cells for one in compare._results([read_run(run.path) for run in runs])}
    assert cells["accuracy on unseen prompts"] == ("0.25", "0.25 → not graded: judge: no answer <b>")


def test_settings_that_only_a_later_run_has_differ(tmp_path: Path) -> None:
    """Engines and algorithms have settings of their own, which the first run need not have."""
    own = Rollout(engine={"enforce_eager": True})
    runs = [made(tmp_path / "a", 1e-6), made(tmp_path / "b", 1e-6, rollout=own), made(tmp_path / "c", 1e-6)]
    wanted = Compared("rollout.engine.enforce_eager", ("", "true", ""))
    for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1)):
        cells = tuple(wanted.cells[at] for at in order)
        found = list(differences([read_run(runs[at].path) for at in order]))
        assert found == [Compared(wanted.name, cells)], order


def test_each_curve_is_that_of_its_run(tmp_path: Path) -> None:
    """A run that is shorter ends where it ends, and steps that only another run has are gaps."""
    low = [record(step, reward=0.1) for step in range(1, 6)]
    high = [record(step, reward=0.9) for step in range(3, 13)]
    runs = [read_run(made(tmp_path / name, 1e-6, rows).path) for name, rows in (("low", low), ("high", high))]
    (reward,) = [one for one in compare._figures(runs, ["low", "high"]) if one.key == "reward"]
    assert reward.drawn.readout is not None
    first, second = reward.drawn.readout.series
    assert (first.name, first.color, second.name, second.color) == ("low", "p0", "high", "p4")
    assert [text for text in first.texts if text != "–"] and set(first.texts[:5]) == {"0.1"}
    assert all(place is None for place in first.y[5:]) and all(place is None for place in second.y[:2])
    assert set(second.texts[2:]) == {"0.9"} and len(second.texts) == 12


def test_of_many_runs_the_best_have_curves_and_all_have_results(tmp_path: Path) -> None:
    """A sweep may have more runs than there are colours: they are ordered by accuracy, then by reward."""
    rates = [1e-6 * (one + 1) for one in range(12)]
    runs = []
    for number, rate in enumerate(rates):
        rows = [record(step, reward=0.1 + 0.05 * number) for step in range(1, 12)]
        if number == 4:
            rows[-1] |= {"eval/accuracy": 0.5}
        runs.append(made(tmp_path / f"r{number:02d}", rate, rows))
    html = write_comparison([run.path for run in runs], tmp_path / "x.html").read_text()
    head = re.findall(r"<th>([^<]+)</th>", html)
    order = [4, 11, 10, 9, 8, 7, 6, 5, 3, 2, 1, 0]
    assert [Path(name).name for name in head[: len(order)]] == [f"r{number:02d}" for number in order]
    legend = html.partition("legend")[2].partition("</p>")[0]
    assert [Path(name).name for name in re.findall(r"</i>([^<]*)<", legend)] == [
        f"r{number:02d}" for number in order[:9]
    ]
    assert "the first 9 have curves" in html
    figures = list(compare._figures([read_run(runs[at].path) for at in order], [str(at) for at in order]))
    assert figures and all(len(one.drawn.readout.series) == 9 for one in figures if one.drawn.readout is not None)
    few = write_comparison([run.path for run in runs[:9]], tmp_path / "y.html").read_text()
    assert "have curves" not in few and re.findall(r"<th>([^<]+)</th>", few)[0].endswith("r00"), "in the order given"


def test_runs_of_one_name_are_told_apart_by_the_ends_of_their_paths(tmp_path: Path) -> None:
    """Whole paths, alike but for a word, did not fit into the columns of a phone."""
    folders = [tmp_path / "lr1" / "run", tmp_path / "lr2" / "run", tmp_path / "lr2" / "other"]
    for folder in folders:
        folder.parent.mkdir(exist_ok=True)
    runs = [read_run(made(folder, 1e-6).path) for folder in folders]
    assert compare._names(runs) == ["lr1/run", "lr2/run", "lr2/other"]
    assert len(set(compare._names([runs[0], runs[0]]))) == 2


def test_names_are_text(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x>"
    runs = [made(folder, 1e-6), made(tmp_path / "b", 1e-6)]
    html = write_comparison([run.path for run in runs], tmp_path / "x.html").read_text()
    assert "<img" not in html and "&lt;img src=x&gt;" in html
    assert "None: the configs are the same but for names and places." in html


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(made(tmp_path / "a", 1e-6).path)
    empty = str(made(tmp_path / "empty", 1e-6, []).path)
    for words, told in (
        (["--compare", run], "--compare takes 2 to 64 runs; 1 are given"),
        (["--compare", *[run] * 65], "--compare takes 2 to 64 runs; 65 are given"),
        (["--compare", run, run, "--out", str(tmp_path)], "is a directory"),
        (["--compare", run, run, "--out", str(tmp_path / "no" / "x.html")], "there is no directory"),
        (["--compare", run, str(tmp_path / "none")], "no such run directory"),
        ([run, run], "2 runs are given: --compare writes one page about them"),
    ):
        assert main(["report", *words]) == 2, words
        assert told in capsys.readouterr().err
    assert main(["report", "--compare", run, empty, "--out", str(tmp_path / "x.html")]) == 0
    assert main(["report", "--compare", empty, empty, "--out", str(tmp_path / "y.html")]) == 0
    assert "No optimizer step has been logged yet." in (tmp_path / "y.html").read_text()


def test_a_run_without_a_config_is_compared(tmp_path: Path) -> None:
    other = made(tmp_path / "b", 1e-6)
    for path in other.path.glob("attempts/*/config.yaml"):
        path.unlink()
    html = write_comparison([made(tmp_path / "a", 1e-6).path, other.path], tmp_path / "x.html").read_text()
    assert "Settings that differ" in html
