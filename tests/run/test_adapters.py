"""A run of LoRA adapters, killed and resumed, and what becomes of it outside.

It costs six starts of a rank, five of them with an engine, an evaluation, a start of vLLM, and four exports: four
minutes beside three busy processes. It would catch adapters that are not in a checkpoint or not in the engines, a
resume on another base or of a run that began with other adapters, an evaluation of the base alone, and an export that
transformers or peft understand in another way.

The base is frozen if a run that has it from the beginning and one that reads it again from the disk end alike, bit for
bit. One ends as the other also because of the divergence from the base, which every update measures.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.run import harness

STEPS = 4
ADAPTED = (
    *harness.OVERRIDES,
    harness.ONE_RANK,
    f"run.max_steps={STEPS}",
    "optimizer.lr=2e-3",
    "optimizer.lr_warmup_steps=0",
    "optimizer.lr_decay_style=linear",
    "optimizer.min_lr=4e-4",
    "eval.before=false",
    "algorithm.kl_beta=0.01",
    "adapter.type=lora",
    "adapter.rank=4",
    "adapter.targets=[q_proj,v_proj,o_proj,up_proj,down_proj]",
)


def exported(run_dir: Path, out: Path, *more: str) -> Path:
    """The folder that `gspo-hpc export` writes."""
    line = [sys.executable, "-m", "gspo_hpc", "export", str(run_dir), "--out", str(out), *more]
    done = subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def base(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of this file's own."""
    return Path(shutil.copytree(tiny_folder / "model", tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture(scope="module")
def finished(tiny_config: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was left alone."""
    folder = tmp_path_factory.mktemp("adapted")
    log = folder / "log"
    process = harness.start(harness.command(tiny_config, folder / "run", *ADAPTED, f"model.path={base}"), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    return folder / "run"


@pytest.fixture(scope="module")
def alone(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's adapters by themselves."""
    return exported(finished, tmp_path_factory.mktemp("alone") / "adapters", "--adapter")


@pytest.fixture(scope="module")
def merged(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's model: its base with the adapters."""
    return exported(finished, tmp_path_factory.mktemp("merged") / "model")


@pytest.mark.timeout(900)
def test_a_killed_run_equals_the_one_left_alone(
    tiny_config: Path, base: Path, finished: Path, merged: Path, tmp_path: Path
) -> None:
    """Its learning rate goes on to decay where it was: a schedule that begins anew is another run."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = harness.command(tiny_config, run_dir, *ADAPTED, f"model.path={base}")
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) == 3, process, log)  # between two updates of a rollout
    harness.kill(process)
    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    assert "from step" in log.read_text().rpartition("attempt 2,")[2][:40], "it resumed from no checkpoint"
    assert harness.comparable(run_dir) == harness.comparable(finished)
    assert harness.samples(run_dir) == harness.samples(finished)
    rates = {record["step"]: record["lr"] for record in harness.metrics(run_dir) if "lr" in record}
    assert len(rates) > STEPS // 2 and max(rates) == STEPS
    assert rates == pytest.approx({step: 2e-3 - (step - 1) / STEPS * 1.6e-3 for step in rates})
    one, other = (
        load_file(folder / "model.safetensors") for folder in (exported(run_dir, tmp_path / "exported"), merged)
    )
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_engines_sampled_with_the_adapters(finished: Path) -> None:
    """Engines and trainer agree to what fp32 rounds, and the policy leaves its base."""
    records = harness.metrics(finished)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["logprob_gap_mean"] < 1e-5 for record in records), records
    assert records[0]["reference_kl"] == 0 < records[-1]["reference_kl"], "the base is where they begin"


def test_a_checkpoint_holds_no_base(finished: Path, base: Path) -> None:
    shards = finished / "checkpoints" / f"{STEPS:06d}" / "megatron"
    taken, whole = (sum(path.stat().st_size for path in folder.iterdir()) for folder in (shards, base))
    names = json.loads((shards / "index.json").read_text())["tensors"]
    assert taken < whole / 2 and all(".lora_" in name for name in names), sorted(names)


def test_exports_are_what_transformers_and_peft_load(base: Path, alone: Path, merged: Path) -> None:
    """Layers without an adapter are those of the base, bit for bit."""
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name.split(".")[-2] for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {"q_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    adapted = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), alone)
    plain = transformers.AutoModelForCausalLM.from_pretrained(merged)
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        ours, theirs = plain(tokens).logits, adapted(tokens).logits
        assert (ours - theirs).abs().max() < 1e-4
        with adapted.disable_adapter():
            assert (ours - adapted(tokens).logits).abs().max() > 1e-2


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

base, folder, out = sys.argv[1:]
llm = LLM(base, dtype="float32", enable_lora=True, max_lora_rank=8, enforce_eager=True, max_model_len=64, seed=0,
          kv_cache_memory_bytes=1 << 27, block_size=32, distributed_executor_backend="uni")
tokens = list(range(3, 23))
found = []
for adapters in (LoRARequest("exported", 1, folder), None):
    (one,) = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=0),
                          lora_request=adapters)
    found.append([entry[token].logprob for token, entry in zip(tokens[1:], one.prompt_logprobs[1:])])
open(out, "w").write(json.dumps(found))
"""


@pytest.mark.timeout(600)
def test_vllm_loads_exported_adapters(base: Path, alone: Path, merged: Path, tmp_path: Path) -> None:
    """Load them as anybody would: the log-probs are those of the merged export, and differ from the base's."""
    out = tmp_path / "logprobs.json"
    variables = harness.environment() | {
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": ""},
        **{"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    line = [sys.executable, "-c", VLLM, str(base), str(alone), str(out)]
    done = subprocess.run(line, capture_output=True, text=True, env=variables, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    adapted, plain = (np.array(one) for one in json.loads(out.read_text()))
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(tokens).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    assert np.abs(adapted - expected).max() < 1e-4 < 1e-2 < np.abs(plain - expected).max()


@pytest.mark.timeout(600)
def test_eval_of_a_run_is_its_last_evaluation(finished: Path) -> None:
    """The run's engine had got the adapters merged by a sync; here a folder is exported for the engine."""
    line = [sys.executable, "-m", "gspo_hpc", "eval", str(finished), "--json", "eval.samples=2"]
    done = subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [record for record in harness.metrics(finished) if "eval/accuracy" in record]
    assert json.loads(done.stdout)["eval/accuracy"] == records[-1]["eval/accuracy"] > 0


@pytest.mark.timeout(900)
def test_a_run_that_begins_with_adapters_resumes_from_the_same_alone(
    tiny_config: Path, base: Path, alone: Path, tmp_path: Path
) -> None:
    """These are its reference too: the divergence begins at 0, with adapters that have moved from the base."""
    first = Path(shutil.copytree(alone, tmp_path / "first"))
    begun = (*ADAPTED, f"model.path={base}", f"adapter.path={first}")
    log, one, other = tmp_path / "log", tmp_path / "one", tmp_path / "other"
    assert harness.finish(harness.start(harness.command(tiny_config, one, *begun), log), log) == 0, log.read_text()
    records = harness.metrics(one)
    assert records[0]["reference_kl"] == 0 < records[-1]["reference_kl"]
    assert all(record["logprob_gap_mean"] < 1e-5 for record in records), records

    command = harness.command(tiny_config, other, *begun)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(other) == 3, process, log)
    harness.kill(process)
    file, kept = first / "adapter_model.safetensors", tmp_path / "kept"
    shutil.copy(file, kept)
    matrices = load_file(file)
    matrices[next(iter(matrices))][0, 0] += 0.01
    save_file(matrices, file, {"format": "pt"})
    refused = tmp_path / "refused"
    assert harness.finish(harness.start(command, refused), refused) == 2, refused.read_text()
    assert "has other adapters than those that this run began with" in refused.read_text()
    shutil.copy(kept, file)
    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    assert "from step" in log.read_text().rpartition(", attempt ")[2][:40], "it resumed from no checkpoint"
    assert harness.comparable(other) == harness.comparable(one)
    assert harness.samples(other) == harness.samples(one)


def converted(*arguments: object) -> Path:
    """Return the folder that `tools/convert_checkpoint.py` writes."""
    tool = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
    line = [sys.executable, str(tool), *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(str(arguments[arguments.index("--out") + 1]))


@pytest.mark.timeout(600)
def test_the_converter_writes_what_export_writes_and_reads_it_again(
    finished: Path, base: Path, alone: Path, merged: Path, tmp_path: Path
) -> None:
    """Adapters, from the run's checkpoint and from one that was made of a folder of peft; and merged from the first."""
    checkpoint = finished / "checkpoints" / f"{STEPS:06d}"
    again = converted("from-hf", "--model", base, "--adapter", alone, "--dtype", "float32", "--out", tmp_path / "made")
    for number, one in enumerate((checkpoint, again)):
        given = ("to-hf", "--checkpoint", one, "--model", base, "--out")
        folder = converted(*given, tmp_path / f"alone-{number}", "--adapter")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (folder / name).read_bytes() == (alone / name).read_bytes(), name
    whole = converted("to-hf", "--checkpoint", checkpoint, "--model", base, "--out", tmp_path / "whole")
    assert (whole / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()


def test_pages_name_the_adapters(finished: Path) -> None:
    """The console of the run, too."""
    words = "LoRA of rank 4 on q_proj, v_proj, o_proj, up_proj, down_proj"
    assert f"gspo trains {words}" in " ".join((finished.parent / "log").read_text().split())
    for command in ("status", "diagnose", "report"):
        line = [sys.executable, "-m", "gspo_hpc", command, str(finished)]
        done = subprocess.run(line, capture_output=True, text=True, env=harness.environment(), timeout=120)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        shown = (finished / "report.html").read_text() if command == "report" else done.stdout
        assert words in " ".join(shown.split()), command
