"""The report page is complete for runs in any state, escapes whatever a model wrote, and shows the data unchanged."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_hpc.cli.main import main
from gspo_hpc.config.schema import Config, Data, Model, Reward, RewardFunction, Rollout, Run
from gspo_hpc.evaluation import stored
from gspo_hpc.launch import status
from gspo_hpc.planning import exactness
from gspo_hpc.report import details, render
from gspo_hpc.report.charts import ReadOut
from gspo_hpc.report.curves import figures, readouts
from gspo_hpc.report.page import write_report
from gspo_hpc.report.scales import number
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.runs.reader import AttemptView, read_run
from gspo_hpc.system.files import write_json

LAST = 20  # step of the stored evaluation
VOID = {"meta", "br", "input"}
ALLOWED_TAGS = set(
    "html head meta title style body main header div h1 h2 h3 h4 span p dl dt dd figure figcaption output svg g line "
    "path polygon circle text title i b small article br details summary table thead tbody tr th td "
    "footer script section ul li pre a input label".split()
)


class Page(HTMLParser):
    """A strict parser: tags balance. It keeps tags, attributes, text by class, and what scripts and styles hold."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[list[str], str]] = []
        self.raw: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append((tag, attributes.get("class") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1][0] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] in ("script", "style"):
            self.raw.append((self.open[-1][0], data))
        elif data.strip():
            self.texts.append(([kind for _, kind in self.open], data))

    @property
    def text(self) -> str:
        return " ".join(text for _, text in self.texts)

    def within(self, kind: str) -> list[str]:
        return [text for kinds, text in self.texts if any(kind in name.split() for name in kinds)]

    @property
    def data(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.raw[-2][1])
        return read


def record(step: int, **changes: Any) -> dict[str, Any]:
    wave = math.sin(step)
    values: dict[str, Any] = {
        "step": step,
        "rollout": (step - 1) // 2,
        "update": (step - 1) % 2,
        "reward": 0.4 + 0.01 * step + 0.05 * wave,
        "response_length": 14 + wave,
        "entropy": 0.6,
        "grad_norm": 1.5 + wave,
        "clip_fraction": 0.1,
        "logprob_gap_max": 1e-5,
        "logprob_gap_mean": 1e-6,
        "probe_logprob_gap_max": 2e-5,
        "zero_variance_groups": 2,
        "completion_tokens": 800,
        "completion_tokens_per_s": 107.0,
        "seconds": 10.0 if step % 2 else 5.0,
        "seconds/generate": 6.0 if step % 2 else 0.0,
        "seconds/update": 3.0,
        "tokens": 800 * step,
        "attempt": 1 if step <= 10 else 2,
        "time": 1795252320.0 + 10 * step,
    }
    return values | changes


def sample(phase: str, completion: str, **changes: Any) -> dict[str, Any]:
    prompt = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    row = {"step": 0, "phase": phase, "prompt": prompt, "completion": completion, "reward": 1.0, "answer": {"sum": 7}}
    return row | changes


def make_run(
    path: Path, records: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]] = (), **config: Any
) -> RunDir:
    """Return a run directory, written by the code that writes those of real runs."""
    path.mkdir(mode=0o700)
    run = RunDir(path)
    whole = Config(run=Run(name="a-run", max_steps=20), model=Model(path="models/tiny", dtype="float32"), **config)
    write_json(run.info, {"run_id": "abc123", "created": "2026-11-21T09:12:00+00:00", "versions": {"torch": "2.13"}})
    write_json(run.plan, {"quantities": {"world_size": 1, "global_batch_size": 64}, "warnings": ["clipping is inert"]})
    run.new_attempt(whole)
    run.new_attempt(whole).finish("done", 0, "all steps")
    for one in records:
        run.append_metrics(one)
    run.append_samples(samples)
    return run


def answered(row: int, *, right: bool = False, failure: str | None = None, text: str = "it is 7") -> dict[str, Any]:
    """A line of a stored evaluation, as `eval` writes it, with two samples of which one is right."""

    def answer(said: str, is_right: bool) -> dict[str, Any]:
        return {
            "text": said,
            "tokens": [1, 2],
            "sampled": 2,
            "finish_reason": "stop",
            "reward": float(is_right),
            "reward_parts": {} if failure else {"number_match": float(is_right)},
            "outcomes": {},
            "failure": failure,
            "graded": failure is None,
            "right": is_right,
        }

    return {
        "step": 20,
        "decides": "number_match",
        "row": row,
        "prompt": f"What is {row} + 5?",
        "fields": {"answer": row + 5},
        "greedy": answer(text, right),
        "samples": [answer("12", True), answer("13", False)],
    }


def report(run: RunDir) -> Page:
    return Page(write_report(run.path).read_text("utf-8"))


def read_outs(run: RunDir) -> dict[str, ReadOut]:
    return readouts(figures(read_run(run.path)))


FULL = [{"step": 0, "eval/accuracy": 0.25, "attempt": 1}, *(record(step) for step in range(1, 21))]


def test_a_whole_run(tmp_path: Path) -> None:
    records = [*FULL[:-1], FULL[-1] | {"eval/accuracy": 0.75}]
    samples = [
        sample("before", "it is 8", reward=0.0),
        sample("after", "7", step=20),
        sample(
            "before", "no", prompt="<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n", reward=0.5
        ),
    ]
    run = make_run(tmp_path / "run", records, samples)
    path = write_report(run.path)
    assert path == run.path / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in run.path.iterdir() if one.name.endswith(".tmp")] == []
    page = Page(path.read_text("utf-8"))
    titles = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    assert titles.count("Reward") == titles.count("Where the time goes") == 2  # drawn for wide and narrow screens
    assert list(dict.fromkeys(titles)) == [
        "Reward",
        "Response length",
        "Entropy",
        "Gradient norm",
        "Clip fraction",
        "Engine against trainer",
        "Completion tokens per second",
        "Groups without a signal",
        "Where the time goes",
    ]
    facts = " ".join(page.within("facts"))
    assert "0.250 →" in facts and "0.750" in facts and "+0.500" in facts
    assert re.search(r"Steps\s+20\s+of 20", facts)
    assert "107" in facts  # 1600 tokens in 10 + 5 seconds
    assert page.within("state") == ["done"]
    assert page.within("asked")[0].strip() == "What is 3 + 4?"
    assert "assistant" in " ".join(page.within("frame"))  # what all prompts have in common stands once
    sides = [attributes["class"] for tag, attributes in page.tags if "side" in (attributes.get("class") or "").split()]
    assert sides == ["side bad", "side good", "side mid", "side"]
    words = " ".join(page.within("pairs"))
    assert words.index("it is 8") < words.index("After, step 20") < words.index("not evaluated")
    for word in (
        "global_batch_size",
        "clipping is inert",
        "killed",
        "all steps",
        "run abc123",
        "torch 2.13",
        "Exactness",
    ):
        assert word in page.text, word
    assert page.text.count(exactness.assess(run.load_config()).grade) == 2, "in the head, and with its reasons"


def test_the_page_stands_alone_and_admits_no_other_script(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "run", FULL))
    for tag, attributes in page.tags:
        assert tag in ALLOWED_TAGS
        assert not {"src", "href", "srcset", "action", "onload", "onclick"} & set(attributes)
    style = next(text for kind, text in page.raw if kind == "style")
    assert "url(" not in style and "@import" not in style and re.search(r"prefers-color-scheme:\s*dark", style)
    policy = next(one["content"] for tag, one in page.tags if one.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.raw[-1][1].encode()).digest()).decode()
    assert policy is not None and f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "http" not in re.sub(
        r"http://www\.w3\.org/2000/svg|http-equiv", "", write_report(tmp_path / "run").read_text()
    )


HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</div></article></main><h1>owned</h1>",
    "<|<b>|><|im_start|>",
    "&lt;script&gt;&#60;",
    "\ud800\udc00\ud800 half \udfff",
    "\x00\x1b[31m\x7f\x9b",
    "\u202eevil\u202c \u2066x",
    "]]><!--<style>*{display:none}</style>-->",
    "</style><style>*{display:none}",
    "{{ 7*7 }}{% include 'page.html.j2' %}{# gone #}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_was_written_stays_text(text: str, tmp_path: Path) -> None:
    samples = [
        sample("before", text, prompt=text, answer={text: text}),
        sample("after", text, prompt=text, answer=[text]),
        sample("train", text, prompt=text + "x", answer=text),
        sample(text, text),
    ]
    run = make_run(tmp_path / "run", [*FULL, record(21, **{f"reward/{text}": 1.0})], samples)
    plan = {"quantities": {text: text}, "layout": {text: 1}, "passes": {text: {"needed": True}}, "notes": [text]}
    (run.path / "plan.json").write_text(json.dumps(plan))
    (run.path / "run.json").write_text(json.dumps({"run_id": text, "created": text, "versions": {text: text}}))
    attempt = json.loads((run.path / "attempts/0002/attempt.json").read_text())
    (run.path / "attempts/0002/attempt.json").write_text(
        json.dumps(attempt | {"reason": text, "detail": text, "host": text, "slurm_job_id": text, "started": text})
    )
    page = report(run)
    assert [kind for kind, _ in page.raw] == ["style", "script", "script"]
    assert {tag for tag, _ in page.tags} <= ALLOWED_TAGS
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", page.text)
    if text.isprintable():
        assert text in page.text  # shown as it is: neither swallowed nor evaluated
        assert text in "".join(page.within("side")) and text in "".join(page.within("asked"))
    boxes = [one for _, one in page.tags if one.get("class") == "text" and "dir" in one]
    assert boxes and all(one["dir"] == "auto" for one in boxes)  # with unicode-bidi: isolate, from the style sheet


def test_a_huge_completion_is_cut(tmp_path: Path) -> None:
    samples = [sample("before", "a" * 1_000_000, answer={"sum": "9" * 100_000}), sample("after", "b" * 2000)]
    page_path = write_report(make_run(tmp_path / "run", FULL, samples).path)
    page = Page(page_path.read_text("utf-8"))
    assert page_path.stat().st_size < 200_000
    assert "998,000 more characters" in page.text and page.text.count("more characters") == 1
    assert "b" * 2000 in page.text


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    rollout = Rollout(engine={"hf_token": "S3CRET", "max_num_seqs": 8})
    run = make_run(tmp_path / "run", FULL, [sample("before", "x", answer={"api_key": "S3CRET"})], rollout=rollout)
    html = write_report(run.path).read_text()
    assert "S3CRET" not in html and "max_num_seqs" in html


@pytest.mark.parametrize("count", [0, 1, 2, 13])
def test_short_runs(count: int, tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "run", FULL[: count + 1]))
    assert ("No optimizer step" in page.text) == (count == 0)
    assert sum(tag == "figure" for tag, _ in page.tags) == (9 if count else 0)


def test_values_that_are_none(tmp_path: Path) -> None:
    odd = [None, float("nan"), float("inf"), "text", True, 10**400, -1e308, [1], {"a": 1}]
    keys = [key for key in record(1) if key not in ("step", "attempt")]
    lines = [json.dumps(record(step)) for step in (1, 2)]
    lines += [json.dumps(record(3 + index) | dict.fromkeys(keys, value)) for index, value in enumerate(odd)]
    lines.append(json.dumps({"step": 30, "loss": None}))
    run = make_run(tmp_path / "run", [])
    run.metrics.write_text("\n".join(lines) + "\n")
    html = write_report(run.path).read_text()
    Page(html)
    for word in ("nan", "inf", "NaN", "Infinity"):
        assert not re.search(rf"[\s\"',:>]{word}[\s\"',<]", html), word


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL[:6])
    with open(run.metrics, "ab") as file:
        file.write(b'[1]\n"x"\n{"step": "7"}\n{"step": -1}\n{"step": true}\n{}\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
        file.write(json.dumps(record(3, reward=0.99)).encode() + b"\n")  # done again: the later one counts
        file.write(json.dumps(record(6)).encode()[:40])
    read = read_run(run.path)
    assert [one["step"] for one in read.records] == [0, 1, 2, 3, 4, 5]
    assert read.records[3]["reward"] == 0.99
    report(run)


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "run.json", "metrics.jsonl", "samples.jsonl", "attempts"])
@pytest.mark.parametrize("how", ["missing", "garbage", "empty", "directory"])
def test_any_file_may_be_missing_or_broken(name: str, how: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL, [sample("before", "x")])
    path = run.path / name
    targets = sorted(path.glob("*/*.*")) if name == "attempts" else [path]
    for target in targets:
        target.unlink(missing_ok=True)
        if how == "directory":
            target.mkdir()
        elif how != "missing":
            target.write_bytes(b"\x00{]\xff: [" if how == "garbage" else b"")
    report(run)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such run directory"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not a run directory"):
        write_report(tmp_path)
    run = make_run(tmp_path / "run", FULL)
    with pytest.raises(ValueError, match="is a directory"):
        write_report(run.path, tmp_path)
    with pytest.raises(ValueError, match="no directory"):
        write_report(run.path, tmp_path / "no" / "page.html")
    assert write_report(run.path, tmp_path / "page.html") == tmp_path / "page.html"
    assert not (run.path / "report.html").exists()


def test_a_running_attempt_and_the_time_of_a_killed_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL)
    first = json.loads((run.path / "attempts/0001/attempt.json").read_text())
    write_json(run.path / "attempts/0001/attempt.json", first | {"started": "2026-11-21T09:12:00+00:00"})
    killed = read_run(run.path).attempts[0]
    assert (killed.reason, killed.steps) == ("killed", (0, 10))
    assert killed.ended == record(10)["time"]  # the last sign of life
    attempt = run.new_attempt(Config(run=Run(name="again", max_steps=40)))
    with run.lock() as lock:
        lock.describe(attempt.number)
        assert read_run(run.path).state == "running"
        assert report(run).within("state") == ["running"]
    assert read_run(run.path).state == "killed"
    assert (read_run(run.path).name, read_run(run.path).max_steps) == ("again", 40)


def test_attempts_lie_on_one_axis_of_time() -> None:
    """From the first start to the last end, which need not be that of the last attempt."""
    times = [(1000.0, 1060.0), (1030.0, 1200.0), (1100.0, None)]
    attempts = [AttemptView(n, started, ended, "done", "", "", None) for n, (started, ended) in enumerate(times, 1)]
    rows = details.attempts(SimpleNamespace(attempts=attempts))  # type: ignore[arg-type]
    assert [(row.left, row.width) for row in rows] == [(0.0, 0.3), (0.15, 0.85), (0.5, 0.0)]


def test_the_curves_are_the_records(tmp_path: Path) -> None:
    records = [FULL[0], *(record(step) for step in range(1, 41))]
    records[5]["grad_norm"] = None
    run = make_run(tmp_path / "run", records)
    data = read_outs(run)
    length = data["length"]
    assert length.steps == [str(step) for step in range(1, 41)]
    assert length.series[0].texts == [number(one["response_length"]) for one in records[1:]]
    assert [index for index, at in enumerate(data["grad"].series[0].y) if at is None] == [4]
    reward = data["reward"]
    assert reward.steps[0] == "0" and reward.series[0].y[0] is None  # the evaluation before the first step
    assert reward.series[2].name == "accuracy" and reward.series[2].texts[0] == "0.25"
    phases = data["phases"]
    assert [series.name for series in phases.series] == ["generate", "update", "other", "all"]
    assert phases.series[2].texts[:2] == ["1", "2"]  # 10 s - 9 s, 5 s - 3 s
    assert phases.series[3].texts[:2] == ["10", "5"]
    assert report(run).data == {key: asdict(one) for key, one in data.items()}  # what the script of the page reads


def test_the_wait_for_rewards_is_not_counted_twice(tmp_path: Path) -> None:
    """The seconds of generate include it, so a step of 10 s would be drawn as one of 13."""
    records = [record(step, **{"seconds/generate": 6.0, "seconds/reward_wait": 4.0}) for step in (1, 3, 5)]
    phases = read_outs(make_run(tmp_path / "run", records))["phases"]
    assert {series.name: series.texts[0] for series in phases.series} == {
        **{"generate": "2", "waiting for rewards": "4", "update": "3"},
        **{"other": "1", "all": "10"},
    }


def test_a_reward_that_is_no_share_does_not_share_the_axis_of_accuracy(tmp_path: Path) -> None:
    records = [FULL[0], *(record(step, reward=-5.0 + step) for step in range(1, 21))]
    data = read_outs(make_run(tmp_path / "run", records))
    assert "accuracy" not in [series.name for series in data["reward"].series]
    assert data["accuracy"].series[0].texts == ["0.25"]


def test_the_report_imports_nothing_heavy() -> None:
    code = (
        "import sys, gspo_hpc.report.page\n"
        "bad = {'torch', 'wandb', 'rich', 'vllm', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_samples_of_a_data_set_with_its_own_system_prompt_are_told_apart(tmp_path: Path) -> None:
    """A single prompt has nothing to be compared with, so all of it is shown."""
    page = report(make_run(tmp_path / "run", FULL, [sample("after", "7")], data=Data(train="x.jsonl")))
    assert "".join(page.within("asked")).startswith("<|im_start|>user\nWhat is 3 + 4?")
    assert page.within("frame") == []


def test_a_missing_template_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", FULL)
    shutil.copytree(render.TEMPLATES, tmp_path / "templates")
    (tmp_path / "templates" / "curves.html.j2").unlink()
    monkeypatch.setattr(render, "TEMPLATES", tmp_path / "templates")
    render._environment.cache_clear()
    try:
        with pytest.raises(FileNotFoundError, match=r"templates/curves\.html\.j2 is missing: .* install it again"):
            write_report(run.path)
    finally:
        render._environment.cache_clear()
    assert not (run.path / "report.html").exists()


def test_only_the_report_imports_jinja2() -> None:
    """Jinja2 would delay the start of every other command."""
    code = (
        "import sys, gspo_hpc.cli.main, gspo_hpc.runs.reader, gspo_hpc.diagnose.gather\n"
        "assert not {'jinja2', 'markupsafe'} & set(sys.modules)\n"
        "import gspo_hpc.report.page\n"
        "assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_findings_come_first_and_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What diagnose says is at the top of the page, with its evidence; a log line is text and never markup."""
    failing = [one | {"failures": 64, "reward": 0.0, "reward_std": 0.0} for one in FULL if one["step"]]
    run = make_run(tmp_path / "run", failing)
    run.attempt(2).log_path(0).write_text("Traceback (most recent call last):\n  x\nValueError: <img src=x> & more\n")
    run.attempt(2).finish("failed", 1, "rank 0 ended with exit code 1: ValueError: <img src=x> & more")
    main(["diagnose", str(run.path), "--json"])
    symptoms = json.loads(capsys.readouterr().out)["symptoms"]
    assert {"reward_always_zero", "unknown_failure"} <= {one["name"] for one in symptoms}
    assert main(["report", str(run.path)]) == 0
    html = (run.path / "report.html").read_text()
    assert html.index("What needs a look") < html.index("<figure")
    text = " ".join(text for _, text in Page(html).texts)
    for one in symptoms:
        assert one["name"].replace("_", " ") in text and one["cause"] in text, one
        assert all(" ".join(line.split()) in " ".join(text.split()) for line in one["evidence"]), one
    own = [one for one in symptoms if one["settings"]]
    assert any(one["new_run"] for one in own) and any(set(one["settings"]) - {*one["new_run"]} for one in own)
    main(["diagnose", str(run.path)])
    printed = " ".join(capsys.readouterr().out.split())
    for one in own:
        on_resume = " or ".join(name for name in one["settings"] if name not in one["new_run"])
        for names, when in ((on_resume, "may change when this run is resumed"), (one["new_run"], "only for a new run")):
            line = names if isinstance(names, str) else " or ".join(names)
            assert not line or (f"set {line} ({when})" in text and f"set {line} ({when})" in printed), (line, when)
    assert "<img" not in html and "&lt;img src=x&gt; &amp; more" in html
    healthy = write_report(make_run(tmp_path / "other", FULL).path).read_text()
    assert "What needs a look" not in healthy


def test_a_watched_report_is_written_until_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the run goes on a browser loads the page again; the last page does not ask for it."""
    run = make_run(tmp_path / "run", FULL)
    pages: list[str] = []
    states = iter(["running", "running", "done"])
    real = status.read

    def read(path: Path) -> status.Status:
        return replace(real(path), state=next(states))

    monkeypatch.setattr(status, "read", read)
    monkeypatch.setattr(time, "sleep", lambda seconds: pages.append((run.path / "report.html").read_text()))
    assert main(["report", str(run.path), "--watch", "--every", "7"]) == 0
    assert len(pages) == 2 and all('http-equiv="refresh" content="7"' in page for page in pages)
    assert "refresh" not in (run.path / "report.html").read_text()
    assert capsys.readouterr().out == f"{run.path / 'report.html'}\n"
    assert main(["report", str(run.path), "--watch", "--every", "0"]) == 2
    capsys.readouterr()
    assert main(["report", str(run.path), "--watch", "--compare", str(run.path)]) == 2
    assert "leave out --watch" in capsys.readouterr().err


def test_what_failed_is_told_with_its_cause_and_the_end_of_the_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL)
    assert ">What failed<" not in write_report(run.path).read_text(), "nothing failed in a run that is done"
    lines = "".join(f"line {number}\n" for number in range(99))
    trace = 'Traceback (most recent call last):\n  File "x.py", line 3\nValueError: no <b>answer</b>\n'
    run.attempt(2).log_path(0).write_text(lines + trace + "RuntimeWarning: later\n")
    run.attempt(2).finish("failed", 1, "rank 0 ended with exit code 1")
    html = write_report(run.path).read_text()
    text = Page(html).text
    assert "Attempt 2 failed after step 20" in text and "rank 0 ended with exit code 1" in text
    assert Page(html).within("log") == [trace.rstrip()]
    assert f"attempts/0002/rank-0.log; all of it: gspo-hpc logs {run.path} --attempt 2" in text
    assert html.index(">What failed<") < html.index("<figure") and "<b>answer" not in html


def test_what_was_refused_is_told_without_a_traceback_and_as_what_it_is(tmp_path: Path) -> None:
    """An evaluation before the first step is no step, and a run that was refused in a rollout had started."""
    run = make_run(tmp_path / "run", FULL)
    run.attempt(2).log_path(0).write_text('Traceback (most recent call last):\n  File "x.py"\nValueError: no answer\n')
    run.attempt(2).finish("refused", 2, "every reward failed: no answer")
    page = report(run)
    assert "Attempt 2 was refused after step 20" in page.text and "every reward failed: no answer" in page.text
    assert "refused to start" not in page.text and page.within("log") == [] and "x.py" not in page.text
    run.metrics.write_text('{"step": 0, "eval/accuracy": 0.5, "attempt": 2}\n')
    assert "Attempt 2 was refused before its first step" in report(run).text


def test_a_run_that_is_refused_in_its_first_rollout_had_started(tmp_path: Path) -> None:
    """It has the evaluation before the first step, which is step 0."""
    for at, (last, when) in enumerate([(1, "before its first step"), (4, "after step 3")]):
        records = [one | {"attempt": 2} for one in FULL[:last]]
        run = make_run(tmp_path / str(at), records)
        run.attempt(2).finish("refused", 2, "a rollout takes 16 prompts and the data has 1")
        assert f"Attempt 2 was refused {when}" in report(run).text


def test_a_failure_without_a_traceback_shows_the_end_of_the_console(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL)
    (run.path / "attempts/0002/attempt.json").unlink()  # killed before it could say anything
    run.attempt(2).console.write_text("".join(f"row {number}\n" for number in range(99)) + "x" * 5000)
    page = report(run)
    assert "Attempt 2 was killed after step 20" in page.text
    (log,) = page.within("log")
    assert log.splitlines()[0] == "row 76" and log.endswith("\u2026") and len(log.splitlines()[-1]) == 400
    assert "attempts/0002/console.log" in page.text
    run.attempt(2).console.unlink()
    assert "attempts/0002/console.log" not in report(run).text


def test_prompts_whose_reward_changed_come_first(tmp_path: Path) -> None:
    rewards = {
        "same": (1.0, 1.0),
        "worse": (1.0, 0.0),
        "alone": (0.0, None),
        "better": (0.0, 0.5),
        "also same": (0.0, 0.0),
    }
    rows = [sample("before", "x", prompt=name, reward=before) for name, (before, _) in rewards.items()]
    rows += [sample("during", "z", prompt=name, reward=0.25, step=4) for name in rewards]
    rows = [row for row in rows if (row["phase"], row["prompt"]) != ("during", "alone")]
    rows += [
        sample("after", "y", prompt=name, reward=after, step=20)
        for name, (_, after) in rewards.items()
        if after is not None
    ]
    page = report(make_run(tmp_path / "run", FULL, rows))
    assert [text.strip() for text in page.within("asked") if text.strip() in rewards] == [
        *("worse", "better"),
        *("same", "alone", "also same"),
    ]
    assert page.within("change") == ["reward fell", "reward rose"]
    assert "Of 4 compared prompts the reward of 1 rose and that of 1 fell." in page.text


def test_many_prompts_leave_room_for_those_that_changed(tmp_path: Path) -> None:
    rows = [sample(phase, "x", prompt=f"prompt {n}") for n in range(40) for phase in ("before", "after")]
    rows.append(sample("before", "x", prompt="late", reward=0.0))
    rows.append(sample("after", "x", prompt="late"))
    page = report(make_run(tmp_path / "run", FULL, rows))
    assert page.within("asked")[0].strip() == "late"
    assert "the reward of 1 rose and that of 0 fell; 33 more are in samples.jsonl." in page.text


def test_every_reward_function_learning_rate_divergence_and_truncation_has_a_curve(tmp_path: Path) -> None:
    reward = Reward(functions=(RewardFunction(function="mine.py:exact", weight=2.0), RewardFunction(function="length")))
    more = {"lr": 1e-6, "approx_kl": 2e-4, "truncated_fraction": 0.25, "reward/exact": 0.5, "reward/length": -0.1}
    run = make_run(tmp_path / "run", [record(step, **more) for step in range(1, 21)], reward=reward)
    data = read_outs(run)
    assert data["lr"].series[0].texts[0] == "1e\u22126" and data["truncated"].series[0].texts[0] == "0.25"
    assert [one.name for one in data["kl"].series] == ["old policy"]
    titles = {one.key: (one.title, one.note) for one in figures(read_run(run.path))}
    assert titles["reward-0"] == ("Reward: exact", "mean, before its weight of 2")
    assert titles["reward-1"] == ("Reward: length", "mean, before its weight of 1")
    assert data["reward-1"].series[0].texts[0] == "\u22120.1"
    with_reference = make_run(tmp_path / "kl", [record(step, **more, reference_kl=0.5) for step in (1, 2)])
    assert [one.name for one in read_outs(with_reference)["kl"].series] == ["old policy", "reference"]
    whole = [record(step) | {"reward/exact": record(step)["reward"]} for step in range(1, 21)]
    assert not any(re.fullmatch(r"reward-\d+", key) for key in read_outs(make_run(tmp_path / "one", whole)))


# Answers of an evaluation ---------------------------------------------------------------------------------------------


def shown_answers(page: Page) -> list[tuple[str, str]]:
    """Kind and prompt of each answer on the page."""
    kinds = [str(attributes["class"]).split()[1] for tag, attributes in page.tags if is_answer(attributes)]
    prompts = [text for where, text in page.texts if "answers" in where and "asked" in where and "answer" not in where]
    assert len(kinds) == len(prompts)
    return list(zip(kinds, prompts, strict=True))


def is_answer(attributes: Mapping[str, str | None]) -> bool:
    return str(attributes.get("class")).startswith("answered ")


def test_answers_of_the_newest_evaluation_can_be_read_by_kind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL)
    stored.write_into(run, 10, [answered(9, right=True) | {"step": 10}])
    rows = [
        answered(1, right=True),
        answered(2, text="<script>alert(1)</script>"),
        answered(3, failure="OSError: " + "the service is away, " * 20),
    ]
    stored.write_into(run, LAST, [*rows, *(answered(row, right=True) for row in range(10, 35))], by_command=True)
    html = write_report(run.path).read_text("utf-8")
    page = Page(html)
    answers = shown_answers(page)
    assert [kind for kind, _ in answers] == ["failed", "wrong", *["right"] * 20], "the first of each kind"
    assert answers[0][1] == "What is 3 + 5?" and answers[1][1] == "What is 2 + 5?"
    assert "26 right" in html and "1 not graded" in html and f"evaluations/{LAST:06d}-eval.jsonl has all" in html
    assert "1 of 2 samples are right" in html and "<script>alert" not in html
    assert "OSError: the service is away" in html and "the service is away, " * 20 not in html
    choices = [attributes["id"] for tag, attributes in page.tags if tag == "input"]
    assert choices == ["answers-all", "answers-failed", "answers-wrong", "answers-right"]
    labels = [attributes["for"] for tag, attributes in page.tags if tag == "label"]
    assert labels == choices


@pytest.mark.parametrize("text", ["", "{", '{"step": 20}\n', '{"step": NaN}\n'])
def test_a_page_goes_without_an_evaluation_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL)
    run.evaluations.mkdir()
    (run.evaluations / f"{LAST:06d}.jsonl").write_text(text)
    assert not any(is_answer(attributes) for _, attributes in report(run).tags)
    (run.evaluations / f"{LAST:06d}.jsonl").unlink()
    assert not any(tag == "input" for tag, _ in report(run).tags)
    stored.write_into(run, LAST, [answered(1, right=True)])
    page = report(run)
    assert [kind for kind, _ in shown_answers(page)] == ["right"]
    assert not any(tag == "input" for tag, _ in page.tags), "there is nothing to choose from"


def test_evaluation_sets_have_a_curve_each_and_answers_in_turn(tmp_path: Path) -> None:
    sets = {"sums": 0.25, "words": 0.75}
    records = [one | {f"eval/{name}/accuracy": value for name, value in sets.items()} for one in FULL]
    run = make_run(tmp_path / "run", [one | {"eval/accuracy": 0.5} for one in records])
    rows = [answered(row, right=True) | {"set": "sums"} for row in range(30)]
    stored.write_into(run, LAST, [*rows, *(answered(row, right=True) | {"set": "words"} for row in range(30, 35))])
    html = write_report(run.path).read_text("utf-8")
    assert "Accuracy by set" in html and html.index("Accuracy by set") < html.index("Response length")
    answers = [prompt for _, prompt in shown_answers(Page(html))]
    assert answers[:4] == [f"What is {row} + 5?" for row in (0, 30, 1, 31)] and len(answers) == 20
    assert sum(f"What is {row} + 5?" in answers for row in range(30, 35)) == 5
    assert "sums; 1 of 2 samples are right" in html and "words; 1 of 2 samples are right" in html
    # One kind, but two sets to choose from; each answer has the class by which its set hides the others.
    page = Page(html)
    assert [found["id"] for tag, found in page.tags if tag == "input"] == ["sets-all", "sets-1", "sets-2"]
    assert "#sets-2:checked ~ .pairs > :not(.set-2) { display: none; }" in html
    of_sets = [str(found["class"]).split()[2] for _, found in page.tags if is_answer(found)]
    assert of_sets[:4] == ["set-1", "set-2"] * 2 and of_sets.count("set-2") == 5
    plain = write_report(make_run(tmp_path / "plain", FULL).path).read_text("utf-8")
    assert "Accuracy by set" not in plain
