"""Commands that start an engine on a model's folder from somebody else run nothing of what lies in it.

Costs six starts of an engine, three minutes. It would catch a command that unpickles: ours, or one of a library that
ours call. What ranks read, and commands without an engine, is in tests/torch/test_handed_inputs.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.run import harness
from tests.torch.checkpoint.test_handed_over import KINDS, marks
from tests.torch.test_handed_inputs import OF_LIBRARIES

NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
FEW = ("eval.max_prompts=4", "eval.samples=1")
SERVED = "--dtype float32 --max-model-len 64 --enforce-eager --kv-cache-memory-bytes 16000000"


def command(*words: object) -> subprocess.CompletedProcess[str]:
    """A command of gspo-hpc."""
    line = [sys.executable, "-m", "gspo_hpc", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=240)


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """The folder in which a pickle that is read leaves a mark."""
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path, marked: Path) -> Path:
    """A whole model, and pickles under every other name that libraries know."""
    made = Path(shutil.copytree(tiny_folder / "model", tmp_path / "model"))
    names = [name for name in OF_LIBRARIES if name.endswith((".bin", ".pt", ".pth", ".model"))]
    assert len(names) >= 5 and not any((made / name).exists() for name in names)
    for name, make in zip(names, itertools.cycle(KINDS.values()), strict=False):
        (made / name).write_bytes(make(marked / name))
    return made


def served(model: Path, log: Path) -> int | None:
    """Start vLLM's server on a model, and end it once it answers; return the code with which it ended by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "gspo_hpc", "serve", str(model), "--port", str(port), "--vllm", SERVED]
    server = harness.start(words, log, VLLM_CPU_OMP_THREADS_BIND="nobind")
    try:
        with contextlib.suppress(AssertionError):  # of a server that has ended
            harness.wait_for(lambda: "Application startup complete" in log.read_text(), server, log)
        return server.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.timeout(900)
def test_a_pickle_beside_a_model_runs_in_no_command(
    model: Path, marked: Path, tiny_config: Path, tmp_path: Path
) -> None:
    data = yaml.safe_load(tiny_config.read_text())["data"]
    told = [f"data.train={data['train']}", f"data.eval={data['eval']}", "reward.functions=[{function: number_match}]"]
    told += ["cluster.platform=cpu", "model.dtype=float32", "rollout.kv_cache_gb=0.03"]
    told += ["rollout.max_prompt_length=24", "rollout.max_response_length=16"]
    given = (tiny_config, f"model.path={model}")
    for words in (("eval", *given, *FEW), ("eval", model, *told, *FEW), ("try", model, "--prompts", 1, *told)):
        done = command(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert marks(marked) == [], words
    assert served(model, tmp_path / "server.log") is None, (tmp_path / "server.log").read_text()[-3000:]
    assert marks(marked) == []


@pytest.mark.timeout(900)
def test_a_pickle_beside_the_model_of_a_run_does_not_run_where_it_is_served(
    uninterrupted: Path, model: Path, marked: Path, tmp_path: Path
) -> None:
    """Its checkpoint is exported first, which reads the folder of the model that its config names."""
    run = Path(shutil.copytree(uninterrupted, tmp_path / "run", ignore=shutil.ignore_patterns("served")))
    for path in (run / "config.yaml", *run.glob("attempts/*/config.yaml")):
        raw = yaml.safe_load(path.read_text())
        raw["model"]["path"] = str(model)
        path.write_text(yaml.safe_dump(raw))
    assert served(run, tmp_path / "server.log") is None, (tmp_path / "server.log").read_text()[-3000:]
    assert (run / "served").is_dir() and marks(marked) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NEEDED)
def test_a_pickle_in_place_of_what_a_model_needs_is_refused(
    name: str, model: Path, marked: Path, tiny_config: Path, tmp_path: Path
) -> None:
    commands = (("eval", tiny_config, *FEW), ("try", tiny_config, "--prompts", 1), ("submit", tiny_config, "--dry-run"))
    for words, (kind, make) in zip(commands, itertools.cycle(KINDS.items()), strict=False):
        (model / name).write_bytes(make(marked / kind))
        done = command(*words, f"model.path={model}")
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr + done.stdout, (words, done.stderr)
        assert name in done.stderr and len(done.stderr.splitlines()) <= 2, (words, done.stderr)
        assert marks(marked) == []
    if name == "model.safetensors":  # the file of weights, which vLLM reads by itself
        assert served(model, tmp_path / "server.log") not in (None, 0)
        assert marks(marked) == []
