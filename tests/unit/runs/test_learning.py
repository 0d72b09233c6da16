"""The one judgement of what a run learnt, and every place that shows it. Takes seconds.

It would catch a finished run that learnt nothing, or lost what it had learnt, and looks healthy somewhere: on the
console, in status or its JSON, at the head of the report, in a comparison, in a message, or in diagnose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.api.run import Run
from gspo_hpc.cli.main import main
from gspo_hpc.config import loader
from gspo_hpc.diagnose.gather import diagnose
from gspo_hpc.launch import status
from gspo_hpc.launch.notify import notices
from gspo_hpc.report.summary import summary
from gspo_hpc.runs import distillation, learning
from gspo_hpc.runs.directory import RunDir, open_run
from gspo_hpc.runs.reader import read_run
from gspo_hpc.training.telemetry.headlines import closing

Records = list[dict[str, Any]]


def steps(rewards: list[float | None], std: float = 0.3, **more: Any) -> Records:
    """One rollout of one step for each reward."""
    made = {"seconds": 1.0, "reward_std": std, "empty": 0, "skipped": 0, "grad_norm": 0.5} | more
    return [{"step": at + 1, "rollout": at, "reward": reward} | made for at, reward in enumerate(rewards)]


def scored(records: Records, *scores: float, count: int = 200) -> Records:
    """Records with evaluations at equal distances, the first before the first step."""
    every = len(records) // (len(scores) - 1)
    for at, score in enumerate(scores[1:], 1):
        records[at * every - 1] |= intervals(score, count)
    return [{"step": 0} | intervals(scores[0], count), *records]


def intervals(score: float, count: int) -> dict[str, float]:
    """An evaluation as it is recorded; the width is roughly that of a 95 % interval."""
    half = count**-0.5
    return {"eval/accuracy": score, "eval/accuracy_low": score - half, "eval/accuracy_high": score + half}


NOTHING: dict[str, tuple[Records, str]] = {
    "always 0": (steps([0.0] * 4, 0.0, empty=1, grad_norm=0.0), "the reward of every completion was 0"),
    "always 0.7": (steps([0.7] * 4, 0.0, empty=1, grad_norm=0.0), "the reward of every completion was 0.7"),
    "one step": (steps([1.0], 0.0, empty=1, grad_norm=0.0), "the reward of every completion was 1"),
    "equal in each group": (steps([0.1, 0.5, 0.2, 0.6], empty=1, grad_norm=0.0), "no step had a gradient"),
    "rising, but equal in each group": (steps([0.1, 0.2, 0.3, 0.4], empty=1), "no step had a gradient"),
    "all skipped": (steps([0.1, 0.2, 0.3, 0.4], skipped=1, grad_norm=None), "no step had a gradient that is finite"),
    "empty or skipped": (
        [*steps([0.1, 0.2], empty=1), *steps([0.1, 0.2, 0.3, 0.4], skipped=1, grad_norm=None)[2:]],
        "no step had a gradient that is finite",
    ),
    "all clipped": (steps([0.1, 0.2, 0.3, 0.4], grad_norm=0.0), "the gradient of every step was 0"),
    "no reward": (steps([None] * 4, empty=1), "no completion got a reward"),
}
LOST: dict[str, tuple[Records, str]] = {
    "accuracy collapsed": (scored(steps([0.1, 0.2, 0.8, 0.9]), 0.8, 0.3, 0.1), "lost accuracy: 0.800"),
    "accuracy rose and collapsed": (scored(steps([0.1, 0.2, 0.8, 0.9]), 0.1, 0.9, 0.2), "lost accuracy: 0.900"),
    "reward collapsed": (steps([at / 20 for at in range(20)] + [0.1] * 10), "lost reward"),
}
LEARNT: dict[str, Records] = {
    "reward rose": steps([0.1, 0.2, 0.3, 0.4]),
    "accuracy fell by noise": scored(steps([0.1, 0.2, 0.3, 0.4]), 0.50, 0.60, 0.58),
    "accuracy fell, within both intervals": scored(steps([0.1, 0.2, 0.3, 0.4]), 0.50, 0.60, 0.50),
    "some steps were empty": [*steps([0.1, 0.2, 0.3]), *steps([0.1, 0.2, 0.3, 0.9], empty=1)[3:]],
    "accuracy rose": scored(steps([0.4, 0.3, 0.4, 0.4]), 0.2, 0.6, 0.7),
}


@pytest.mark.parametrize(
    ("distances", "grade", "said"),
    [
        ([0.5, 0.4, 0.1], "learnt", "divergence from the teacher 0.5000 -> 0.1000 nats a token"),
        ([0.1, 0.2, 0.3], "doubtful", "may have learnt nothing: the policy came no nearer to its teacher"),
    ],
)
def test_a_run_that_has_a_teacher_alone_is_judged_by_its_distance(
    distances: list[float], grade: str, said: str
) -> None:
    """Its records have no reward: it would be said that no completion got one."""
    records = [
        {"step": at + 1, "rollout": at, "seconds": 1.0, "loss": 0.1, "empty": 0, "grad_norm": 0.5, "reference_kl": one}
        for at, one in enumerate(distances)
    ]
    found = learning.judge(records)
    assert found is not None and found.grade == grade and said in f"{found.numbers}; {found.worry}"


@pytest.mark.parametrize("weight", [0, 1])
def test_every_place_says_what_a_run_distils_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], weight: int
) -> None:
    """Beside rewards, too, which alone were shown."""
    algorithm = {"teacher": "models/big", "kl_beta": 0.1}
    functions = [{"function": "number_match", "weight": weight}]
    records = [
        {key: one for key, one in record.items() if weight or "reward" not in key}
        | {"reference_kl": distance, "loss": 0.1}
        for record, distance in zip(LEARNT["reward rose"], [0.4, 0.3, 0.2, 0.1], strict=True)
    ]
    run = finished(tmp_path / "run", records, algorithm=algorithm, reward={"functions": functions})
    signal = "beside rewards, with the weight 0.1" if weight else "alone"
    course = "divergence from the teacher 0.4000 -> 0.1000 nats a token"
    told = f"from models/big {signal}: {course}"
    assert main(["status", str(run.path)]) == 0
    assert f"  distils {told}\n" in capsys.readouterr().out
    now = status.read(run.path)
    assert (now.teacher, now.divergence, now.distils) == ("models/big", 0.1, told)
    assert main(["diagnose", str(run.path)]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    found = diagnose(run.path).to_json()
    assert (found["teacher"], found["divergence"]) == ("models/big", [0.4, 0.1])
    assert course in list(closing(run.load_config(), run.read_metrics(), "done", run.path))[1][0]
    head = summary(read_run(run.path))
    (fact,) = [one for one in head.facts if one.name == "Divergence from the teacher"]
    assert (fact.before, fact.value) == ("0.4000", "0.1000") and signal.split(",")[0] in fact.note
    assert "taught by models/big" in head.words


@pytest.mark.parametrize(
    ("distances", "words"), [([], ""), ([0.2, 0.4], ": divergence from the teacher 0.3000 nats a token")]
)
def test_a_run_that_has_not_begun_or_has_one_rollout_has_no_course(distances: list[float], words: str) -> None:
    config = loader.from_dict({"algorithm": {"teacher": "big", "kl_beta": 1}, "reward": {"functions": []}})
    records = [{"step": at, "rollout": 0, "reference_kl": one} for at, one in enumerate(distances, 1)]
    found = distillation.of_run(config, records)
    assert found is not None and found.words == f"from big alone{words}"
    assert distillation.of_run(loader.from_dict({"algorithm": {"kl_beta": 1}}), records) is None


@pytest.mark.parametrize(("records", "why"), NOTHING.values(), ids=NOTHING)
def test_a_run_without_a_gradient_learnt_nothing(records: Records, why: str) -> None:
    found = learning.judge(records)
    assert found is not None and found.nothing and found.worry.startswith("learnt nothing: ") and why in found.worry


@pytest.mark.parametrize(("records", "why"), LOST.values(), ids=LOST)
def test_a_run_that_was_better_before_is_not_healthy(records: Records, why: str) -> None:
    found = learning.judge(records)
    assert found is not None and found.grade == "lost" and found.worry.startswith(why)


@pytest.mark.parametrize("records", LEARNT.values(), ids=LEARNT)
def test_a_run_that_learnt_is_healthy(records: Records) -> None:
    found = learning.judge(records)
    assert found is not None and found.grade == "learnt" and found.worry == ""


@pytest.mark.parametrize(
    ("records", "worry"),
    [("", ""), *((name, f"learnt nothing: {NOTHING[name][1]}") for name in ("always 0", "always 0.7"))],
    ids=["healthy", "always 0", "always 0.7"],
)
def test_every_place_shows_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    records: str,
    worry: str,
) -> None:
    run = finished(tmp_path / "run", NOTHING[records][0] if records else LEARNT["reward rose"])
    assert main(["status", str(run.path)]) == 0
    assert (f"run: done, but {worry}\n" in capsys.readouterr().out) is bool(worry)
    assert main(["status", "--json", str(run.path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["learnt"], told["worry"]) == ("done", "nothing" if worry else "learnt", worry)
    assert status.read(run.path).shown == ("done, learnt nothing" if worry else "done")
    head = summary(read_run(run.path))
    expected = ("done, but learnt nothing", "bad", worry) if worry else ("done", "good", "")
    assert (head.state, head.tone, head.worry) == expected
    lines = list(closing(run.load_config(), run.read_metrics(), "done", run.path))
    assert lines[0][0].startswith("done, but learnt nothing: 4 steps" if worry else "done: 4 steps")
    assert [bad for _, bad in lines] == [bool(worry), bool(worry), False, False] and worry in lines[1][0]
    assert (" export " in lines[3][0]) is not bool(worry), "nobody exports a model that learnt nothing"
    seen = Run(run.path)
    assert seen.worry == worry and (worry in repr(seen)) and repr(seen).endswith(f"{worry})" if worry else "of 4)")
    problems = {one.name for one in diagnose(run.path).symptoms if one.severity == "problem"}
    assert bool(problems & {"learnt_nothing", "reward_always_zero"}) is bool(worry)
    sent = messages(run, monkeypatch)
    if worry:
        assert [title for title, _ in sent] == ["run learns nothing", "run is done, but learnt nothing"]
        assert f"It {worry}\n" in sent[1][1]
    else:
        assert [title for title, _ in sent] == ["run is done"] and "nothing" not in sent[0][1]


def finished(folder: Path, records: Records, **sections: Any) -> RunDir:
    """A run whose only attempt is done."""
    settings = {"run": {"dir": str(folder), "name": "run", "max_steps": 4}, "notify": {"urls": ["env:NOTES"]}}
    run, _ = open_run(loader.from_dict(settings | sections))
    with run.lock():
        begun = run.new_attempt(loader.load(run.config))
        for record in records:
            run.append_metrics(record)
        begun.finish("done", 0)
    return run


def messages(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Messages that people get, in their order, when a run ends whose steps were logged in this attempt."""
    sent: list[tuple[str, str]] = []

    class Sender:
        def __init__(self, *_: object) -> None: ...

        def send(self, title: str, text: str) -> None:
            sent.append((title.removeprefix("gspo-hpc: "), text))

        def close(self, timeout: float) -> None: ...

    monkeypatch.setenv("NOTES", "json://127.0.0.1")
    monkeypatch.setattr(notices, "Sender", Sender)
    records = run.metrics.read_text()
    run.metrics.write_text("")
    with notices.Notices(run.load_config(), run) as made:
        run.metrics.write_text(records)
        made.ended("done", "")
        made.over(0)
    return sent
