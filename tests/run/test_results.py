"""What comes out of a run: an export that others load, evaluation, a report, tracking."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.run import harness


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`gspo-hpc` with these arguments."""
    line = [sys.executable, "-m", "gspo_hpc.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=300)


@pytest.fixture(scope="module")
def scores(uninterrupted: Path) -> dict[str, float]:
    """`gspo-hpc eval` of the finished run, with two samples a prompt."""
    done = command("eval", uninterrupted, "eval.samples=2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_eval_of_a_run_is_its_last_evaluation(uninterrupted: Path, scores: dict[str, float]) -> None:
    assert scores["eval/accuracy"] == harness.metrics(uninterrupted)[-1]["eval/accuracy"]
    assert scores["eval/accuracy"] <= 1.0 and scores["eval/avg@2"] <= scores["eval/pass@2"] <= 1.0


def test_export_answers_as_the_run_did(uninterrupted: Path, tmp_path: Path) -> None:
    harness.export(uninterrupted, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = [json.loads(line) for line in (uninterrupted / "samples.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["phase"] == "after"]
    assert len(last) > 4
    for row in last:
        tokens = torch.tensor([tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            answer = model.generate(tokens, max_new_tokens=16, do_sample=False)[0, tokens.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == row["completion"]


def test_engine_and_trainer_agreed_after_every_sync(uninterrupted: Path) -> None:
    records = [record for record in harness.metrics(uninterrupted) if record.get("update") == 0]
    assert len(records) == harness.STEPS // 2
    assert all(0.0 < record["probe_gap_max"] <= 1e-3 for record in records)
    assert all(record["probe_gap_mean"] <= 1e-4 for record in records)
    assert all(np.isfinite(record["gap_max"]) for record in records if not record["empty"])


def test_report_is_one_page(uninterrupted: Path, tmp_path: Path) -> None:
    done = command("report", uninterrupted, "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "") and "<script src" not in page


def test_one_wandb_run_over_all_attempts(uninterrupted: Path) -> None:
    run_id = json.loads((uninterrupted / "run.json").read_text())["run_id"]
    files = list((uninterrupted / "wandb").glob("offline-run-*/*.wandb"))
    assert files and all(run_id in file.name for file in files)


def test_a_full_run_resumes_to_nothing(tiny_config: Path, uninterrupted: Path) -> None:
    before = harness.metrics(uninterrupted)
    done = subprocess.run(
        harness.command(tiny_config, uninterrupted, *harness.OVERRIDES),
        capture_output=True,
        text=True,
        env=harness.environment(),
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert harness.metrics(uninterrupted) == before


def test_a_changed_setting_is_refused_with_the_difference(tiny_config: Path, uninterrupted: Path) -> None:
    done = subprocess.run(
        harness.command(tiny_config, uninterrupted, *harness.OVERRIDES, "optimizer.lr=0.5"),
        capture_output=True,
        text=True,
        env=harness.environment(),
        timeout=60,
    )
    assert done.returncode == 2
    assert "optimizer.lr" in done.stderr and "0.5" in done.stderr and "Traceback" not in done.stderr
