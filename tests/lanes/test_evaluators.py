"""lm-eval and Inspect against `gspo-hpc serve`, as on docs/evaluation.md: `bash tools/lanes.sh evaluators` runs this.

One minute, a vLLM server on the tiny model. It would catch a command of the page that one of them no longer takes, an
answer that they read otherwise than the server gave it, and a key or a limit that does not get there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests import blocks, pages

pytestmark = pytest.mark.skipif("GSPO_HPC_LANE_EVALUATORS" not in os.environ, reason="bash tools/lanes.sh evaluators")

SECTION = (pages.PROJECT / "docs" / "evaluation.md").read_text("utf-8").split("\n## Other evaluation tools\n")[1]
KEY = "a-key-of-mine"
PROMPTS = 64
ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
# Behind the commands of the page: the server stays for questions of this test until its input ends.
WAIT = "\necho COMMANDS-DONE\nread -r\n"


def asked(address: str, prompt: str, key: str = KEY) -> str:
    """Return the greedy answer of the server."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def furnish(folder: Path, tiny: Path) -> None:
    """Put what the page's commands find there into a folder."""
    (folder / ".cache").mkdir()
    (folder / ".cache" / "tiny").symlink_to(tiny)
    (folder / "evaluators").symlink_to(os.environ["GSPO_HPC_LANE_EVALUATORS"])
    for name, text in re.findall(r"(?ms)^```\w+\n# (sums\.\w+)\n(.*?)^```$", SECTION):
        (folder / name).write_text(text)
    assert {path.name for path in folder.iterdir()} == {".cache", "evaluators", "sums.py", "sums.yaml"}


@pytest.mark.timeout(600)
def test_both_count_what_the_server_answers(tiny_folder: Path, tmp_path: Path) -> None:
    furnish(tmp_path, tiny_folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (block,) = [one for one in blocks.blocks(SECTION) if one.reason == "Takes minutes"]
    environment = os.environ | ENGINE | {"HF_HOME": str(tmp_path / "hf"), "INSPECT_LOG_DIR": str(tmp_path / "logs")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = ""  # the tools have packages of their own
    launcher = tmp_path / "bin" / "gspo-hpc"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nPYTHONPATH={pages.PROJECT} exec {sys.executable} -m gspo_hpc "$@"\n')
    launcher.chmod(0o755)
    environment["PATH"] = os.pathsep.join([str(launcher.parent), environment["PATH"]])
    text = block.text.replace("8001", str(port)) + WAIT
    process = subprocess.Popen(
        ["bash", "-e", "-c", text],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "COMMANDS-DONE" in line:
                break
        printed = "".join(lines)
        assert "COMMANDS-DONE" in printed, printed[-4000:]
        rows = [json.loads(line) for line in (tiny_folder / "data" / "eval.jsonl").read_text().splitlines()][:PROMPTS]
        address = f"http://127.0.0.1:{port}/v1"
        answers = [re.search(r"(\d+)\s*$", asked(address, row["prompt"])) for row in rows]
        right = sum(
            found is not None and found[1] == str(row["answer"]) for found, row in zip(answers, rows, strict=True)
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            asked(address, "What is 1 + 1?", key="another")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert 0 < right < PROMPTS
    (of_lm_eval,) = re.findall(r"\|exact_match\|.\s*\|\s*([\d.]+)\|", printed)
    (of_inspect,) = re.findall(r"(?m)^accuracy\s+([\d.]+)\s*$", printed)
    assert float(of_lm_eval) == pytest.approx(right / PROMPTS, abs=1e-4), printed[-4000:]
    assert float(of_inspect) == pytest.approx(right / PROMPTS, abs=1e-3), printed[-4000:]
