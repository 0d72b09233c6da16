"""What comes out of a run: an export that others load, evaluation, a report, tracking."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests import metrics_page
from tests.run import harness
from tests.torch.checkpoint.test_handed_over import KINDS_OF_FILES, kind


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`gspo-hpc` with these arguments."""
    line = [sys.executable, "-m", "gspo_hpc", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=300)


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`tools/convert_checkpoint.py` with these arguments."""
    tool = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
    line = [sys.executable, str(tool), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=300)


@pytest.fixture(scope="module")
def scores(uninterrupted: Path) -> dict[str, float]:
    """`gspo-hpc eval` of the finished run, with two samples a prompt."""
    done = command("eval", uninterrupted, "eval.samples=2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_run_writes_no_kind_of_file_that_no_pickle_is_planted_in(uninterrupted: Path) -> None:
    """tests/torch/checkpoint/test_handed_over.py plants one in each kind of file that it knows."""
    names = [str(path.relative_to(uninterrupted)) for path in uninterrupted.rglob("*") if path.is_file()]
    of_observers_and_commands = ("observed.jsonl", "eval.log", "export.log", "try.log", "report", "served")
    new = {kind(name) for name in names if not name.startswith(of_observers_and_commands)} - KINDS_OF_FILES
    assert not new, f"say in test_handed_over.py what a run has now: {sorted(new)}"


def test_eval_of_a_run_is_its_last_evaluation(uninterrupted: Path, scores: dict[str, float]) -> None:
    assert scores["eval/accuracy"] == harness.metrics(uninterrupted)[-1]["eval/accuracy"]
    assert 0.0 <= scores["eval/accuracy_low"] <= scores["eval/accuracy"] <= scores["eval/accuracy_high"] <= 1.0
    assert scores["eval/accuracy_low"] < scores["eval/accuracy_high"]
    assert scores["eval/accuracy"] <= 1.0 and scores["eval/avg@2"] <= scores["eval/pass@2"] <= 1.0
    # Where one of two is right, the other one ties with it, or has no answer.
    assert 0.0 < scores["eval/avg@2"] <= scores["eval/maj@2"] <= scores["eval/pass@2"]
    for name in ("avg@2", "pass@2", "maj@2"):
        assert scores[f"eval/{name}_low"] <= scores[f"eval/{name}"] <= scores[f"eval/{name}_high"]


def test_completions_are_graded_again_and_compared_without_an_engine(
    uninterrupted: Path, scores: dict[str, float], tmp_path: Path
) -> None:
    """Five commands, 15 s. Catches completions that are not kept, or with other grades than the scores came of."""
    folder = uninterrupted / "evaluations"
    first, last = folder / "000000.jsonl", folder / f"{harness.STEPS:06d}.jsonl"
    records = {record["step"]: record for record in harness.metrics(uninterrupted)}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for file, expected in (
        (first, records[0]),
        (last, records[harness.STEPS]),
        (folder / f"{last.stem}-eval.jsonl", scores),
    ):
        assert file.stat().st_mode & 0o777 == 0o600
        done = command("rescore", file, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["old"] == found["new"] == {key: expected[key] for key in expected if key in found["old"]}
        assert {key for key in expected if key.startswith("eval/")} == found["old"].keys()
        assert found["changed"]["greedy"]["to_right"] == found["changed"]["greedy"]["to_wrong"] == 0
    (tmp_path / "own.py").write_text(REWARDS)
    done = command("rescore", uninterrupted, f"reward.functions=[{{function: {tmp_path}/own.py:broken}}]", "--json")
    failed = json.loads(done.stdout)
    assert failed["new"]["eval/accuracy"] is failed["new"]["eval/avg@2"] is None, "not measured, and so no zero"
    assert failed["new"]["eval/ungraded"] == 1.0
    done = command("compare", first, last, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    change = records[harness.STEPS]["eval/accuracy"] - records[0]["eval/accuracy"]
    assert told["accuracy"]["difference"] == pytest.approx(change)
    assert told["mcnemar"]["only_second"] - told["mcnemar"]["only_first"] == pytest.approx(change * told["prompts"])
    assert told["accuracy"]["low"] <= change <= told["accuracy"]["high"]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


REWARDS = """
import time


def slow(completion, *, prompt, fields):
    time.sleep(0.2)
    return 2.0


def broken(completion, *, prompt, fields):
    return fields["nothing of that name"]
"""


def test_try_samples_the_prompts_that_training_began_with(uninterrupted: Path, tmp_path: Path) -> None:
    """One engine start, 15 s. Catches other prompts, weights or sampling, and times and failures that are lost."""
    (tmp_path / "own.py").write_text(REWARDS)
    functions = f"[{{function: number_match}}, {{function: {tmp_path}/own.py:slow, weight: 0.5}}]"
    done = command("try", uninterrupted, "--prompts", 3, "--json", f"reward.functions={functions}")
    assert done.returncode == 0, done.stdout + done.stderr
    prompts = json.loads(done.stdout)["prompts"]
    rows = [json.loads(line) for line in (uninterrupted / "samples.jsonl").read_text().splitlines()]
    first = [row["prompt"] for row in rows if row["step"] == 0 and row["phase"] == "train"]
    assert [prompt["prompt"] for prompt in prompts] == first[:3]
    assert [len(prompt["completions"]) for prompt in prompts] == [4, 4, 4]
    assert len({one["text"] for prompt in prompts for one in prompt["completions"]}) > 3, "it is sampled, not greedy"
    for prompt in prompts:
        for one in prompt["completions"]:
            right = str(prompt["fields"]["answer"]) == one["text"].split("=")[-1].strip()
            assert one["reward"] == pytest.approx(float(right) + 1.0)
            assert 0.2 <= one["seconds"][f"{tmp_path}/own.py:slow"] < 5.0
            assert one["seconds"]["number_match"] < 0.2


def test_try_says_what_a_reward_function_fails_with(tiny_config: Path, tmp_path: Path) -> None:
    """One engine start, 15 s."""
    (tmp_path / "own.py").write_text(REWARDS)
    own = f"reward.functions=[{{function: {tmp_path}/own.py:broken}}]"
    done = command("try", tiny_config, "--prompts", 1, "--samples", 2, own)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("prompt 1 of 1: row ") and lines[1].startswith("    <|user|>What is ")
    failed = [line for line in lines if "no reward: " in line and "KeyError: 'nothing of that name'" in line]
    assert len(failed) == 2 and "2 have no reward" in lines


def test_a_served_checkpoint_answers_as_the_run_did(uninterrupted: Path, tmp_path: Path) -> None:
    """An export and vLLM's own server, 40 s. Catches weights of another checkpoint, and a server that does not end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    options = "--dtype float32 --max-model-len 64 --enforce-eager"
    words = [sys.executable, "-m", "gspo_hpc", "serve", str(uninterrupted), "--port", str(port), "--vllm", options]
    settings = harness.environment() | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as output:
        server = subprocess.Popen(words, stdout=output, stderr=output, env=settings, start_new_session=True)
    rows = [json.loads(line) for line in (uninterrupted / "samples.jsonl").read_text().splitlines()]
    try:
        harness.wait_for(lambda: _answers(port, "/health"), server, log)
        for row in [row for row in rows if row["phase"] == "after"][:4]:
            body = {"model": "run", "prompt": row["prompt"], "max_tokens": 16, "temperature": 0.0}
            body["add_special_tokens"] = False
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["choices"][0]["text"] == row["completion"]
        server.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert f"serving {uninterrupted}/served/{harness.STEPS:06d} as run at http://127.0.0.1:{port}/v1" in log.read_text()


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


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


def test_the_converter_writes_what_export_writes(uninterrupted: Path, tmp_path: Path) -> None:
    exported = harness.export(uninterrupted, tmp_path / "exported")
    checkpoint = uninterrupted / "checkpoints" / f"{harness.STEPS:06d}"
    done = convert(
        "to-hf", "--checkpoint", checkpoint, "--model", tmp_path / "exported", "--out", tmp_path / "converted"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "exported/model.safetensors").read_bytes() == (
        tmp_path / "converted/model.safetensors"
    ).read_bytes()
    assert exported


def test_the_converter_refuses_in_a_line(uninterrupted: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    for arguments, said in (
        (("to-hf", "--checkpoint", tmp_path, "--model", model, "--out", tmp_path / "a"), "COMMITTED is missing"),
        (("from-hf", "--model", model, "--out", tmp_path), "exists: give another folder"),
        (("from-hf", "--model", model, "--out", tmp_path / "b"), "has no config.json"),
    ):
        done = convert(*arguments)
        assert done.returncode == 2 and done.stdout == ""
        assert said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(tmp_path.iterdir())


def test_engine_and_trainer_agreed_after_every_sync(uninterrupted: Path) -> None:
    records = [record for record in harness.metrics(uninterrupted) if record.get("update") == 0]
    assert len(records) == harness.STEPS // 2
    assert all(0.0 < record["probe_logprob_gap_max"] <= 1e-3 for record in records)
    assert all(record["probe_logprob_gap_mean"] <= 1e-4 for record in records)
    assert all(np.isfinite(record["logprob_gap_max"]) for record in records if not record["empty"])


def test_a_step_that_was_traced(uninterrupted: Path) -> None:
    """A trace of each rank, which has the phases in it, and a table of them."""
    folder = uninterrupted / "attempts" / "0001" / "traces"
    ranks = (0, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"step-000003-rank-{rank}.json.gz" for rank in ranks),
        "step-000003.txt",
    ]
    assert folder.stat().st_mode & 0o777 == 0o700
    for rank in ranks:
        path = folder / f"step-000003-rank-{rank}.json.gz"
        assert path.stat().st_mode & 0o777 == 0o600
        names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"sync", "generate", "old_logprobs", "update", "aten::mm"} <= names
    table = (folder / "step-000003.txt").read_text().splitlines()
    assert [line.split()[0] for line in table[1:]] == ["sync", "generate", "old_logprobs", "update", "save"]
    assert table[0].split() == ["step", "3", "seconds", "computing", "communicating", "waiting", "peak", "GiB"]
    for line in table[1:]:
        seconds, computing, communicating, waiting, peak = map(float, line.split()[1:])
        assert computing + communicating + waiting <= seconds + 0.01 and peak > 0.1


def test_every_step_tells_communication_from_computation(uninterrupted: Path) -> None:
    records = [record for record in harness.metrics(uninterrupted) if record["step"] and not record["empty"]]
    assert records
    for record in records:
        assert record["communication_over_computation"] > 0.0 and record["update_tflops"] > 0.0
        assert 0.0 < record["seconds/communication"] < record["seconds"] and record["seconds/waiting"] >= 0.0


def test_every_metric_is_explained_on_its_page(uninterrupted: Path) -> None:
    found = {key for record in harness.metrics(uninterrupted) for key in record}
    assert len(found) > 60 and metrics_page.unexplained(found) == []


def test_the_debug_switch_reaches_every_rank(uninterrupted: Path) -> None:
    for rank in (0, 1):
        log = (uninterrupted / "attempts" / "0001" / f"rank-{rank}.log").read_text(errors="replace")
        assert "debug level is set to DETAIL" in log


def test_report_is_one_page(uninterrupted: Path, tmp_path: Path) -> None:
    done = command("report", uninterrupted, "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "") and "<script src" not in page
    for step in range(1, harness.STEPS + 1):  # of which each is recorded
        assert f'href="report_steps/step-{step:06d}.html"' in page
        assert (tmp_path / "report_steps" / f"step-{step:06d}.html").read_text().count('<div class="tokens"') == 3 * 8


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
