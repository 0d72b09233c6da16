"""Secrets of a script: they do not come into the YAML, nor among what is printed (under 1 s)."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import convert
from gspo_hpc.system.redact import HIDDEN, names_secret, without_secrets

SWIFT = "NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model m --dataset d.jsonl --reward_funcs a --num_generations 4"
TRL = "accelerate launch --num_processes 4 grpo.py --num_generations 4 --per_device_train_batch_size 4"
VERL = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=512 "
VERL += "actor_rollout_ref.rollout.n=8"
SECRET = "Zk9vQx71plMw"


@pytest.mark.parametrize(
    ("run", "more"),
    [
        (SWIFT, f"--swanlab_token {SECRET}"),
        (SWIFT, f"--swanlab_lark_secret {SECRET}"),
        (SWIFT, f"--swanlab_lark_webhook_url https://open.feishu.cn/hook/{SECRET}"),
        (SWIFT, f"--hub_token={SECRET}"),
        (SWIFT, f"--smtp_password {SECRET}"),
        (SWIFT, f"--my_api_key {SECRET}"),
        (SWIFT, f"--report_url https://me:{SECRET}@host/x"),
        (SWIFT, f'--vllm_engine_kwargs \'{{"hf_token": "{SECRET}"}}\''),
        (SWIFT, f"--run_note hf_{SECRET}{SECRET}"),
        (TRL, f"--hub_token {SECRET}"),
        (f"hf jobs run --flavor a100 --token {SECRET} image {TRL}", ""),
        (f"sky exec c --secret HF_TOKEN={SECRET} {SWIFT}", ""),
        (VERL, f"+trainer.wandb_api_key={SECRET}"),
        (VERL, f"+reward.service={{api_key:{SECRET}}}"),
    ],
)
def test_a_secret_is_neither_written_nor_printed(run: str, more: str) -> None:
    found = convert(f"{run} {more}")
    lines = [found.text, *found.assumed, *found.differs, *found.dropped, *found.open]
    lines += [item.given for part in (found.carried, found.left, found.strange) for item in part]
    assert not any(SECRET in line for line in lines) and HIDDEN in found.text


def test_a_variable_is_no_secret_and_stays() -> None:
    assert "$HF_TOKEN" in convert(f"{SWIFT} --hub_token $HF_TOKEN").text


@pytest.mark.parametrize(
    "name", ["pad_token", "eos_token", "max_tokens", "prompt_key", "image_token", "stop_token", "reward_fn_key", "key"]
)
def test_names_of_tokens_of_a_text_and_of_fields_are_no_secrets(name: str) -> None:
    assert not names_secret(name)
    assert without_secrets(f"--{name} abcdefgh, {name}=abcdefgh") == f"--{name} abcdefgh, {name}=abcdefgh"
