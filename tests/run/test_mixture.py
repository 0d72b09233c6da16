"""A run of a badly made mixture of experts: diagnose names what its model does to it.

It is random, with the tiny model's tokenizer. What its tokens have in common is what its router looks for: all go to
one expert. One completion in some thirty falls into a hole: a token after which it says nothing else, and never ends.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from gspo_hpc.runs.reader import read_run
from tests import metrics_page
from tests.run import harness
from tests.run.harness import Found

GRADER = '''
import random


def noise(completion, *, prompt, fields):
    """Anything, so that every group has something to teach."""
    return random.random()
'''
COMMON, HOLE = 0, 1  # dimensions: what all tokens have, and what only the hole has
LIMIT = 480


@pytest.fixture(scope="module")
def mixture(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    tiny = json.loads((tiny_folder / "model" / "config.json").read_text())
    end, hole = tiny["eos_token_id"], tiny["vocab_size"] - 1
    config = transformers.Qwen3MoeConfig(
        vocab_size=tiny["vocab_size"],
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=1,
        max_position_embeddings=1024,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=end,
    )
    torch.manual_seed(5)
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        for weight in (embeddings, head):
            weight *= 0.1  # beside what follows
        embeddings[:, COMMON] += 1.0
        embeddings[hole, HOLE] += 1.0
        for layer in model.model.layers:
            layer.mlp.gate.weight[0, COMMON] += 1.0
        # The last norm makes COMMON 8 of an ordinary token, and both 5.7 of the hole. Logits of all other tokens: 0.
        head[end, COMMON] += 2.5 / 8  # after an ordinary token 10 % end,
        head[hole, COMMON] -= 1.3 / 8  # and 0.3 % fall into the hole;
        head[hole, HOLE] += 20 / 5.7  # after the hole, all do.
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny_folder / "model").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(tiny_config: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with two completions a rank and update, which differ in length; nothing is learned."""
    folder = tmp_path_factory.mktemp("run")
    run_dir, log = folder / "run", folder / "log"
    (folder / "grader.py").write_text(GRADER)
    overrides = (
        f"model.path={mixture}",
        f"reward.functions=[{{function: '{folder}/grader.py:noise'}}]",
        "run.max_steps=64",
        "optimizer.lr=1e-9",
        "batch.global_batch_size=4",
        "batch.num_generations=2",
        "batch.steps_per_generation=16",
        f"rollout.max_response_length={LIMIT}",
        "checkpoint.interval=100",
        "eval.before=false",
        "eval.after=false",
        "eval.interval=null",
    )
    process = harness.start(harness.command(tiny_config, run_dir, *overrides), log)
    assert harness.finish(process, log) == 0, log.read_text()[-3000:]
    return run_dir


@pytest.fixture(scope="module")
def found(finished: Path) -> Found:
    """The symptoms of the run."""
    return harness.diagnose(finished)[1]


def test_metrics_of_experts_are_explained_on_their_page(finished: Path) -> None:
    keys = {key for record in harness.metrics(finished) for key in record}
    assert "experts/idle" in keys and metrics_page.unexplained(keys) == []


def test_the_share_of_every_expert_is_that_of_the_latest_update(finished: Path) -> None:
    """Files of the run hold it for the report: all tokens of both layers went to the first expert."""
    experts = read_run(finished).experts
    assert experts is not None
    step, layers = experts
    assert step == harness.metrics(finished)[-1]["step"] == 64 and len(layers) == 2
    (tokens,) = {row[0] for row in layers.values()}
    assert tokens > 0 and all(row == [tokens, *[0] * 7] for row in layers.values())


def test_experts_that_nobody_chooses(found: Found) -> None:
    symptom = found["unbalanced_experts"]
    assert symptom["severity"] == "problem" and "moe.aux_loss_coeff=0.001" in symptom["settings"]
    assert "14 experts had none" in symptom["evidence"][1], "seven of eight in each of two layers"


def test_few_answers_that_do_not_end(found: Found) -> None:
    symptom = found["generation_tail"]
    assert symptom["severity"] != "note" and f"rollout.max_response_length={LIMIT // 2}" in symptom["settings"]
    assert f"(limit {LIMIT})" in symptom["evidence"][1]


def test_ranks_with_unequal_work(found: Found) -> None:
    symptom = found["unbalanced_packing"]
    assert symptom["severity"] != "note" and "batch.global_batch_size=8" in symptom["settings"]
    assert "stragglers" not in found, "the rank that computes longer has more to do"
