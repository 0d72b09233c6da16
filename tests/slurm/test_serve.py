"""A checkpoint that a Slurm job serves, from submission to scancel (one minute: an export and vLLM's own server).

It would catch a key that is written down or does not reach the job, an address that nobody finds, a listener for the
whole network, and a server that outlives its job.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from gspo_hpc.launch.slurm import commands
from tests.run import harness as runs
from tests.slurm.harness import SlurmRun, processes_of

KEY = "no-file-has-this-key"
SHELL = {"VLLM_API_KEY": KEY, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def ask(address: str, key: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{address}/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}
    except OSError:
        return 0, {}


@pytest.mark.timeout(300)
def test_a_checkpoint_is_served_by_a_job(undisturbed: SlurmRun) -> None:
    run = SlurmRun(undisturbed.config, undisturbed.run_dir, shell=SHELL)
    options = ("--slurm", "slurm.partition=low", "--vllm=--dtype float32 --max-model-len 64 --enforce-eager")
    done = run.command("serve", str(run.run_dir), *options)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    run.job_id = done.stdout.split()[1]
    (folder,) = (run.run_dir / "served" / "jobs").iterdir()
    log = folder / f"{run.job_id}_0_log.out"
    try:
        written = folder / "address.json"
        run.wait_for("the address", written.exists, timeout=120)
        address = json.loads(written.read_text())["address"]
        run.wait_for("the server", lambda: ask(address, KEY, {})[0] >= 400, timeout=120)
        (one,) = json.loads(run.command("status", str(run.run_dir), "--json").stdout)["served"]
        assert one["address"] == address
        assert (one["job_id"], one["state"], one["name"]) == (run.job_id, "running", run.run_dir.name), one
        assert one["address"].startswith("http://127.0.0.1:") and one["node"].startswith("n")
        assert f"served as {run.run_dir.name} at {one['address']}" in run.command("status", str(run.run_dir)).stdout

        rows = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
        row = next(row for row in rows if row["phase"] == "after")
        body: dict[str, object] = {"model": one["name"], "prompt": row["prompt"], "max_tokens": 16, "temperature": 0.0}
        body["add_special_tokens"] = False
        assert ask(one["address"], "another", body)[0] == 401
        status, answer = ask(one["address"], KEY, body)
        assert status == 200 and answer["choices"][0]["text"] == row["completion"], answer  # type: ignore[index]

        shown = run.command("logs", str(run.run_dir), "--served").stdout
        assert f"serving {run.run_dir}/served/{runs.STEPS:06d} as {one['name']} at {one['address']}" in shown
        port = int(one["address"].removesuffix("/v1").rpartition(":")[2])
        listening = [words[3] for words in listeners() if words[3].endswith(f":{port}")]
        assert listening == [f"127.0.0.1:{port}"]
        files = [path for path in (run.run_dir / "served").rglob("*") if path.is_file()]
        assert written in files and [path for path in files if KEY.encode() in path.read_bytes()] == []
        state = json.loads(run.command("status", str(run.run_dir), "--json").stdout)
        assert state["state"] == "done"  # the run itself has no other job
    finally:
        subprocess.run(["scancel", run.job_id], check=True)
    run.wait_until_ended("CANCELLED", timeout=60)
    deadline = time.monotonic() + 60
    while left := [text for _, text in processes_of(folder) if "vllm" in text]:  # what Slurm is still ending
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert json.loads(run.command("status", str(run.run_dir), "--json").stdout)["served"] == []
    assert log.exists() and commands.job(run.job_id) is not None


def listeners() -> list[list[str]]:
    """Return the lines of `ss` about sockets that listen on IPv4."""
    found = subprocess.run(["ss", "-ltnH4"], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in found.splitlines()]
