"""Pages of recorded steps: they stand alone, link to each other, escape what a model wrote, and cost little to watch.

It takes a few seconds. The tests would catch a page that names another host or admits another script, markup in a
token, a link to a page that is not there, a page that is written again for nothing or not written again when it must
be, and sums of a sample that are not those of its tokens.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.report.page import write_report
from gspo_hpc.report.recorded import ClipRange, clip_range, group_view, ratio_text, sequence_ratio
from gspo_hpc.report.steps import StepPages
from gspo_hpc.runs import sample_record
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.sample_record import End, RecordedGroup, RecordedStep
from tests.unit.report.test_page import ALLOWED_TAGS, FULL, HOSTILE, Page, make_run
from tests.unit.runs.test_sample_record import group, sample

STEP_TAGS = ALLOWED_TAGS | {"nav", "a", "noscript"}


def with_record(path: Path, *members: Sequence[RecordedGroup | End], rank: int = 0) -> RunDir:
    run = RunDir(path) if path.exists() else make_run(path, FULL)
    for rows in members:
        sample_record.append(sample_record.path_of(run.record, rank), sample_record.packed(rows))
    return run


def step_pages(run: RunDir) -> list[Path]:
    return sorted((run.path / "report_steps").iterdir())


def test_a_run_without_a_record_has_no_pages_of_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL)
    assert ">Recorded steps<" not in write_report(run.path).read_text()
    assert not (run.path / "report_steps").exists()


def test_the_report_links_to_the_steps_and_they_link_back(tmp_path: Path) -> None:
    run = with_record(tmp_path / "run", [group(1, 0)], [group(5, 0), group(5, 1)], [group(10, 0)])
    report = write_report(run.path)
    page = Page(report.read_text("utf-8"))
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == [f"report_steps/step-{step:06d}.html" for step in (10, 5, 1)], "the newest comes first"
    paths = step_pages(run)
    assert [path.name for path in paths] == ["step-000001.html", "step-000005.html", "step-000010.html"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    for path in paths:
        for tag, attributes in Page(path.read_text("utf-8")).tags:
            target = attributes.get("href") or ""
            if tag == "a" and not target.startswith("#"):
                assert (path.parent / target).resolve() in {report.resolve(), *paths}, target
            elif tag == "a":
                assert any(one.get("id") == target[1:] for _, one in Page(path.read_text("utf-8")).tags), target
    middle = Page(paths[1].read_text("utf-8"))
    assert [a.get("rel") for tag, a in middle.tags if tag == "a" and "rel" in a] == ["prev", "next"]


def test_another_name_of_the_page_has_its_own_folder(tmp_path: Path) -> None:
    run = with_record(tmp_path / "run", [group(1, 0)])
    path = write_report(run.path, tmp_path / "mine.html")
    assert 'href="mine_steps/step-000001.html"' in path.read_text()
    assert 'href="../mine.html"' in (tmp_path / "mine_steps" / "step-000001.html").read_text()
    assert not (run.path / "report_steps").exists()


def test_many_steps_are_behind_a_click(tmp_path: Path) -> None:
    run = with_record(tmp_path / "run", *([group(step, 0)] for step in range(1, 31)))
    page = Page(write_report(run.path).read_text("utf-8"))
    assert "10 earlier steps" in page.text
    assert sum(tag == "a" for tag, _ in page.tags) == 30 == len(step_pages(run))


def test_where_a_record_ended_is_said(tmp_path: Path) -> None:
    run = with_record(tmp_path / "run", [group(1, 0)], [End(5, 0.5)])
    text = Page(write_report(run.path).read_text("utf-8")).text
    assert "The record is full (tracking.record_mb 0.5): nothing is recorded from step 5 on." in text
    with_record(run.path, [group(10, 0)])  # a resumed run allowed more
    assert "nothing is recorded" not in Page(write_report(run.path).read_text("utf-8")).text


def test_a_page_stands_alone_and_admits_no_other_script(tmp_path: Path) -> None:
    run = with_record(tmp_path / "run", [group(1, 0)])
    write_report(run.path)
    html = step_pages(run)[0].read_text("utf-8")
    page = Page(html)
    assert {tag for tag, _ in page.tags} <= STEP_TAGS
    assert not any({"src", "srcset", "action", "onload", "onclick"} & set(attributes) for _, attributes in page.tags)
    policy = next(one["content"] for tag, one in page.tags if one.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.raw[-1][1].encode()).digest()).decode()
    assert policy is not None and f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "http" not in html.replace("http-equiv", "")
    script = page.raw[-1][1]
    assert not re.search(r"\b(fetch|XMLHttpRequest|innerHTML|eval|import|document\.write)\b", script)


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_was_written_stays_text(text: str, tmp_path: Path) -> None:
    one = sample(0, text=text, token_texts=[text, text], failure=text, reward_parts={text: 1.0, "other": 0.5})
    hostile = group(1, 0, prompt=text, fields={text: text, "api_key": "S3CRET"}, samples=[one])
    run = with_record(tmp_path / "run", [hostile])
    write_report(run.path)
    html = step_pages(run)[0].read_text("utf-8")
    page = Page(html)
    assert "S3CRET" not in html
    assert [kind for kind, _ in page.raw] == ["style", "script"] and {tag for tag, _ in page.tags} <= STEP_TAGS
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", page.text)
    if text.isprintable():
        assert text in page.text and text in "".join(page.within("inside"))
        assert unpacked(page)["text"] == [text, text]


def unpacked(page: Page) -> dict[str, Any]:
    packed = next(one["data-tokens"] for tag, one in page.tags if "data-tokens" in one)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return found


def test_a_page_has_the_tokens_as_they_are_recorded(tmp_path: Path) -> None:
    one = sample(0, logprobs=[-0.1, None], ratios=[1.0, None])
    run = with_record(tmp_path / "run", [group(1, 0, samples=[one])])
    write_report(run.path)
    assert unpacked(Page(step_pages(run)[0].read_text("utf-8"))) == {
        **{"id": [5, 6], "text": ["12", " \u4f60\n"], "engine": [-0.1, -1.25], "old": None},
        **{"new": [-0.1, None], "reference": None, "ratio": [1.0, None]},
    }


def test_a_watched_run_writes_only_pages_that_changed(tmp_path: Path) -> None:
    run = with_record(tmp_path / "run", [group(1, 0)], [group(5, 0)])

    def written() -> dict[str, int]:
        write_report(run.path, refresh=30)
        return {path.name: path.stat().st_ino for path in step_pages(run)}  # a page is replaced, never changed

    first = written()
    assert written() == first
    with_record(run.path, [group(10, 0)])
    second = written()
    assert second["step-000001.html"] == first["step-000001.html"]
    assert second["step-000005.html"] != first["step-000005.html"], "it links to the next step now"
    with_record(run.path, [group(5, 3)], rank=1)  # of another rank, whose file came later
    third = written()
    assert third["step-000001.html"] == first["step-000001.html"]
    assert third["step-000005.html"] != second["step-000005.html"]


def test_a_record_that_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watched run has its report written every half minute, and a record may have gigabytes."""
    run, pages, reads = with_record(tmp_path / "run", [group(1, 0)]), StepPages(), list[Path]()
    real = sample_record.steps

    def read(folder: Path) -> Iterator[RecordedStep]:
        reads.append(folder)
        return real(folder)

    monkeypatch.setattr(sample_record, "steps", read)
    htmls = [write_report(run.path, steps=pages).read_text().partition("<footer>")[0] for _ in range(3)]
    assert len(reads) == 1 and len(set(htmls)) == 1 and "step-000001.html" in htmls[0]
    with_record(run.path, [group(5, 0)])
    assert "step-000005.html" in write_report(run.path, steps=pages).read_text() and len(reads) == 2


def test_pages_of_steps_that_are_gone_go_too(tmp_path: Path) -> None:
    run = with_record(tmp_path / "run", [group(1, 0)], [group(5, 0)])
    write_report(run.path)
    other = run.path / "report_steps" / "notes.txt"
    other.write_text("mine")
    sample_record.cut(run.record, 1)  # the run resumed
    write_report(run.path)
    assert [path.name for path in step_pages(run)] == ["notes.txt", "step-000001.html"]


@pytest.mark.parametrize("how", ["garbage", "empty", "directory"])
def test_a_damaged_record_leaves_the_report(how: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL)
    run.record.mkdir()
    path = sample_record.path_of(run.record, 0)
    if how == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"\x00{]\xff: [" if how == "garbage" else b"")
    assert ">Recorded steps<" not in write_report(run.path).read_text()


CLIP = ClipRange(1 - 3e-4, 1 + 4e-4, True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.0005, 1.0, True), (1.0003, 1.0, False), (0.9996, 1.0, False), (0.9996, -1.0, True), (1.0005, -1.0, False)],
)
def test_a_clipped_sample_is_called_so(ratio: float, advantage: float, clipped: bool) -> None:
    """Where the advantage pushes on beyond the range, the policy term has no gradient; on the other side it has."""
    one = sample(0, ratios=[ratio, ratio], advantage=advantage)
    (view,) = group_view(group(1, 0, samples=[one]), CLIP).samples
    assert ("clipped" in view.cells[-1]) == clipped == ("clipped" in view.words)


def test_sums_of_a_sample_are_those_of_its_tokens() -> None:
    one = sample(
        0,
        old_logprobs=[-0.25, -1.0],
        ratios=[2.0, 0.125],
        advantage=-0.5,
        reward_parts={"a": 1.0, "b": -0.25},
        excluded=True,
        truncated=True,
        failure="it hung",
    )
    assert sequence_ratio(one) == pytest.approx(math.sqrt(0.25))
    view = group_view(group(1, 0, samples=[one]), ClipRange(0.5, 1.5, False))
    assert view.columns[:5] == ("Reward", "a", "b", "Advantage", "Tokens")
    (only,) = view.samples
    cells = dict(zip(view.columns, only.cells, strict=True))
    assert (cells["a"], cells["b"], cells["Advantage"], cells["Tokens"]) == ("1", "\u22120.25", "\u22120.5", "2")
    assert (cells["Sequence ratio"], cells["Token ratios"]) == ("0.50000", "0.12500 to 2.00000")
    assert cells["Engine against trainer"] == "0.25"  # |-1.0 - -1.25|, of the old policy and not of the updated one
    assert cells[""] == "truncated, excluded, failed: it hung"
    facts = dict(only.facts)
    assert facts["Tokens outside the clip range"] == "2 of 2" and facts["Weights of step"] == "4"
    assert facts["Mean log-prob, old policy"] == "\u22120.6250"
    assert facts["Mean difference of engine and trainer"] == "0.2"


@pytest.mark.parametrize("ratios", [None, [None, 1.0], [0.0, 1.0]])
def test_a_sequence_without_a_ratio(ratios: Any) -> None:
    (view,) = group_view(group(1, 0, samples=[replace(sample(0), ratios=ratios)]), CLIP).samples
    assert "clipped" not in view.words and view.cells[3] == "\u2013"


def test_ratios_have_the_digits_of_the_clip_range() -> None:
    assert [ratio_text(one) for one in (1.0003, 2.0**-20, 4000.0, None)] == [
        "1.00030",
        "9.5e\u22127",
        "4,000",
        "\u2013",
    ]


@pytest.mark.parametrize(
    ("config", "one"),
    [
        ({}, True),
        ({"algorithm": {"correction": "bypass"}}, False),
        ({"rollout": {"mode": "server", "max_staleness": 1}}, False),
        ({"rollout": {"unfinished": "continue"}}, False),
    ],
)
def test_a_page_says_whose_log_probs_ratios_are_to(config: dict[str, Any], one: bool, tmp_path: Path) -> None:
    whole = from_dict(config)
    made = make_run(tmp_path / "run", FULL, algorithm=whole.algorithm, rollout=whole.rollout)
    run = with_record(made.path, [group(1, 0)])
    write_report(run.path)
    (page,) = step_pages(run)
    assert ("all ratios are 1" in page.read_text()) == one and ("log-probs of the engine" in page.read_text()) != one


@pytest.mark.parametrize(("name", "by_sequence"), [("gspo", True), ("gspo_token", True), ("grpo", False)])
def test_the_range_is_that_of_the_algorithm(name: str, by_sequence: bool) -> None:
    found = clip_range(from_dict({"algorithm": {"name": name, "clip_low": 0.25, "clip_high": 0.5}}))
    assert found == ClipRange(0.75, 1.5, by_sequence) and clip_range(None) is None
