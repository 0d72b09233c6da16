"""A run that a teacher alone teaches: nothing is graded; killed, refused beside other weights, and resumed.

The teacher has a layout of its own, tensor-parallel over the two ranks that train data-parallel. It costs four starts
of two ranks, three of them with an engine: three minutes beside three busy processes. It would catch a divergence that
is not learnt from, a teacher that a resume reads otherwise, in other groups or that changes, and a place in the loop,
in the pool of reward functions or in the records that needs a reward.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from gspo_hpc.diagnose.gather import diagnose
from gspo_hpc.runs import learning
from tests.run import harness

STEPS = 8
TAUGHT = (
    *harness.OVERRIDES,
    "optimizer.lr=5e-4",
    "optimizer.lr_warmup_steps=0",
    "eval.before=false",
    "eval.after=false",
    "data.eval=null",
    "reward.functions=[]",
    "algorithm.kl_beta=1.0",
    "parallel.teacher_tensor_model_parallel_size=2",
)


def taught(source: Path, folder: Path, seed: int) -> Path:
    """A teacher that carries: the model in a folder, which mostly forgets to, after a few supervised steps."""
    shutil.copytree(source, folder)
    chance = random.Random(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        sums = [(chance.randrange(10, 100), chance.randrange(10, 100)) for _ in range(32)]
        texts = [f"<|user|>What is {a} + {b}?<|assistant|>{a} + {b} = {a + b}<|end|>" for a, b in sums]
        encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        targets = encoded["input_ids"].masked_fill(~encoded["attention_mask"].bool(), -100)
        logits = model(input_ids=encoded["input_ids"]).logits
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()).backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@pytest.mark.timeout(1200)
def test_a_killed_run_equals_the_one_left_alone_and_comes_nearer_to_its_teacher(
    tiny_folder: Path, tiny_config: Path, tmp_path: Path
) -> None:
    teacher = taught(tiny_folder / "model", tmp_path / "teacher", 0)
    overrides, log = (*TAUGHT, f"algorithm.teacher={teacher}"), tmp_path / "log"
    alone = tmp_path / "alone"
    process = harness.start(harness.command(tiny_config, alone, *overrides), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    records = harness.metrics(alone)
    distances = [record["reference_kl"] for record in records]
    assert len(records) == STEPS and sum(distances[-2:]) < 0.9 * sum(distances[:2]), distances  # last and first rollout
    assert all(record["empty"] == 0 < record["grad_norm"] and "reward" not in record for record in records)
    said = log.read_text()
    assert f"taught by {teacher}," in said and "divergence from the teacher" in said and "learnt nothing" not in said

    run_dir = tmp_path / "killed"
    command = harness.command(tiny_config, run_dir, *overrides)
    process = harness.start(command, log)
    harness.wait_for(lambda: harness.last_step(run_dir) == 3, process, log)  # between two updates of a rollout
    harness.kill(process)

    kept, refused = tmp_path / "kept", tmp_path / "refused"
    teacher.rename(kept)
    taught(tiny_folder / "model", teacher, 1)
    assert harness.finish(harness.start(command, refused), refused) == 2, refused.read_text()
    assert "has other weights than those that this run has learned from" in refused.read_text()
    shutil.rmtree(teacher)
    kept.rename(teacher)

    assert harness.finish(harness.start(command, log), log) == 0, log.read_text()[-3000:]
    assert harness.comparable(run_dir) == harness.comparable(alone)
    assert harness.samples(run_dir) == harness.samples(alone)
    one, other = (harness.export(run, tmp_path / f"{run.name}-model") for run in (run_dir, alone))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

    found = learning.judge(harness.metrics(run_dir))
    assert found is not None and found.grade == "learnt" and found.numbers.startswith("divergence from the teacher")
    symptoms = {one.name for one in diagnose(run_dir).symptoms}
    assert not {"learnt_nothing", "reward_always_zero", "reward_saturation", "clipping_never_active"} & symptoms
