"""Tell what versions of verl have in place of the defaults of verl 0.9, and where a version does something else."""

from __future__ import annotations

import re

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.verl_layout import ACTOR, OPTIM, ROLLOUT

_MODEL = "actor_rollout_ref.model"
_LEGACY = ("reward_model.", "custom_reward_function.", "sandbox_fusion.")  # sections that reward.* took the place of
# Arguments that 0.2 does not have, whose parser refuses what it does not know.
_SINCE_0_3 = (
    f"{ACTOR}.clip_ratio_c", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.loss_agg_mode",
    f"{ACTOR}.policy_loss", f"{ROLLOUT}.mode", f"{ROLLOUT}.val_kwargs", f"{ROLLOUT}.multi_turn",
    "algorithm.use_kl_in_reward", "algorithm.norm_adv_by_std_in_grpo", "data.filter_overlong_prompts",
)  # fmt: skip


def tell(draft: Draft, trainer: str, updates: int) -> None:
    """Tell all of it; `trainer`: fsdp, megatron or veomni; `updates`: of a rollout."""
    megatron = trainer == "megatron"
    _earlier(draft, megatron)
    _prompts(draft)
    _fixed_length(draft)
    _rewards(draft)
    _gradients(draft, trainer)
    _adapters(draft, megatron)
    if megatron:
        _frozen(draft)
    if not megatron:
        _bound(draft)
    _rate(draft, updates)
    if (draft.text(f"{ROLLOUT}.name") or "vllm") == "vllm":
        draft.differs.append(
            "vLLM never samples tokens that the tokenizer lacks there (since 0.7), nor those that stand for images "
            "(0.9); here it may, as far as config.json's vocab_size goes"
        )
    if not megatron and "adapter.type" not in draft.settings and draft.number(f"{OPTIM}.weight_decay", 0.01):
        draft.differs.append("weight decay: norms and biases decay, too, in verl's FSDP and VeOmni, and not here")
    if updates > draft.settings.get("batch.num_iterations", (1,))[0]:
        sorts = "0.7 in that of their lengths, on each rank"
        if not draft.switch("trainer.balance_batch", True):
            sorts = "0.7 in that of the prompts (trainer.balance_batch=False)"
        draft.differs.append(
            "verl 0.9 cuts a rollout into updates in the order in which its completions were finished, short ones "
            f"first, and {sorts}, so that updates hold parts of groups; here each has whole groups, in the order of "
            "the prompts"
        )


def _earlier(draft: Draft, megatron: bool) -> None:
    """Tell defaults of earlier versions that change what is computed."""
    told = {f"{ACTOR}.entropy_coeff": "0.001 (up to 0.3)"}
    if draft.settings.get("algorithm.dual_clip", (0, ""))[0]:
        told[f"{ACTOR}.clip_ratio_c"] = "none, as algorithm.dual_clip 0 (up to 0.3.0)"
    if not draft.switch(f"{ACTOR}.use_kl_loss"):
        told["algorithm.use_kl_in_reward"] = "true, with a kl_coef of 0.001 unless it is given (up to 0.3.0)"
    told["data.filter_overlong_prompts"] = "true (up to 0.2)"
    if megatron:
        told[f"{OPTIM}.lr_decay_style"] = "linear (0.4.1)"
    if not any(name in draft.values or any(key.startswith(f"{name}.") for key in draft.values) for name in _SINCE_0_3):
        told["the last of all rollouts"] = "left out (up to 0.2.0.post2)"  # the count began at 1 and ended the run
    parts.earlier(draft, "verl 0.9", told)


def _fixed_length(draft: Draft) -> None:
    """Tell by what a sum of tokens is divided."""
    if draft.settings.get("algorithm.aggregation", ("",))[0] != "fixed_length":
        return
    name, longest = f"{ACTOR}.loss_scale_factor", draft.settings["rollout.max_response_length"][0]
    given = draft.number(name)
    draft.credit("algorithm.aggregation", name)
    if given and given != longest:
        draft.drop(name, f"the fixed length here is rollout.max_response_length ({longest})")
        draft.differs.append(
            f"{draft.label(name)}: loss and gradient are {longest / given:g} times as large there, which clip_grad "
            "meets, and Adam does not"
        )
    elif not given:
        draft.differs.append(
            "loss_agg_mode seq-mean-token-sum-norm without loss_scale_factor: verl 0.9 (trainer.use_v1) divides by the "
            "length of the tensor, which may be less than rollout.max_response_length; here, as in 0.8, by the latter"
        )
    draft.differs.append(
        "loss_agg_mode seq-mean-token-sum-norm: up to verl 0.7 the sum of a micro-batch, divided by the length and not "
        "by the number of completions, so that the loss is as many times as large as a micro-batch has of these, which "
        "clip_grad meets; with use_dynamic_bsz micro-batches weigh by their number, too. Here, as since 0.8, it is "
        "divided by both, over the whole update"
    )


def _prompts(draft: Draft) -> None:
    """Tell that truncation means nothing any more."""
    overlong = draft.settings.get("data.overlong", ("error",))[0]
    if overlong == "truncate_left":
        draft.differs.append(
            "data.truncation: verl 0.7 does not read it, and ends the run at a prompt that is too long"
        )
    if overlong == "error":
        draft.differs.append(
            "data.truncation error: verl since 0.8 cuts longer prompts of text from the left all the same; here one "
            "ends the run, and data.overlong: truncate_left cuts them"
        )


def _rewards(draft: Draft) -> None:
    """Tell that settings of rewards may have no effect."""
    old = [name for name in draft.values if name.startswith(_LEGACY) and draft.given(name)]
    if old and "recipe" not in draft.variables.get("entry", ""):
        named = f"{old[0]}: main_ppo of verl 0.9 does not read it"
        if len(old) > 1:
            named = f"{', '.join(old)}: main_ppo of verl 0.9 reads none of them"
        draft.differs.append(f"{named}, and reward.* has taken its place; up to 0.8 it counts")


def _gradients(draft: Draft, trainer: str) -> None:
    """Tell in which precision gradients are summed, where it is another one."""
    if draft.settings.get("model.dtype", ("bfloat16",))[0] == "float32":
        return
    narrow = draft.settings.get("optimizer.grad_reduce_in_fp32", (True,))[0] is False
    bridge = f"{ACTOR}.megatron.vanilla_mbridge"
    if trainer == "megatron" and "optimizer.grad_reduce_in_fp32" in draft.settings:
        return
    if trainer == "megatron" and draft.given(bridge) and not draft.switch(bridge):
        draft.differs.append(
            "Megatron-Bridge (vanilla_mbridge=False) keeps and sums gradients in the model's 16 bits in verl; here "
            "they are in float32 (optimizer.grad_reduce_in_fp32)"
        )
    elif trainer == "megatron":
        draft.differs.append(
            "verl 0.9's default bridge for Megatron keeps and sums gradients in the model's 16 bits "
            "(override_ddp_config.grad_reduce_in_fp32); here they are in float32 (optimizer.grad_reduce_in_fp32), as "
            "with mbridge, the default of 0.7, and with verl's own loading before"
        )
    elif trainer == "fsdp" and (draft.text(f"{ACTOR}.fsdp_config.model_dtype") or "fp32") not in ("fp32", "float32"):
        held = "weights and Adam's moments" if narrow else "gradients, weights and Adam's moments"
        draft.differs.append(f"{held} have the model's 16 bits there, and float32 here")
    elif trainer == "fsdp" and draft.text(f"{ACTOR}.strategy") != "fsdp2" and not narrow:
        draft.differs.append(
            "FSDP 1 of verl 0.9 adds up the micro-batches of an update in the model's 16 bits; here and up to 0.8 the "
            "sum is in float32"
        )


def _adapters(draft: Draft, megatron: bool) -> None:
    """Tell that engines compute with adapters as they are."""
    if "adapter.type" in draft.settings and not draft.switch(f"{_MODEL}.lora.merge"):
        older = "; so do they in verl 0.7 with Megatron" if megatron else ""
        draft.differs.append(
            f"engines of verl{' 0.9' if megatron else ''} compute with adapters beside the weights (without "
            f"lora.merge); here they do so in 16 bits, and get merged weights in float32 (adapter.engine){older}"
        )
    if "adapter.path" in draft.settings and draft.settings.get("algorithm.kl_beta", (0.0,))[0]:
        draft.differs.append(
            "the reference of the divergence is the model without adapters in verl, and here the model with those of "
            "adapter.path"
        )


def _frozen(draft: Draft) -> None:
    """Tell which weights a bridge does not train."""
    path = str(draft.settings.get("model.path", ("",))[0])
    if re.search(r"(?i)qwen3-vl-\d+b-a\d+b", path) and not draft.switch(f"{ACTOR}.megatron.vanilla_mbridge"):
        draft.differs.append(
            f"{path}: verl 0.9's bridge trains the merger of images alone, unless override_transformer_config has "
            "freeze_language_model=False"
        )


def _bound(draft: Draft) -> None:
    """Tell which bound of gradients counts."""
    name = f"{ACTOR}.grad_clip"
    later = draft.number(f"{OPTIM}.clip_grad", 1.0)
    if draft.given(name) and draft.number(name, 1.0) != later:
        text = f"verl up to 0.7 clips there; since 0.8 optim.clip_grad counts alone, {later:g} here"
        draft.assumed.append(f"{draft.label(name)}: {text}")


def _rate(draft: Draft, updates: int) -> None:
    """Tell when the learning rate moves, where that is not constant."""
    moves = {"optimizer.lr_warmup_steps": (0,), "optimizer.lr_decay_style": ("constant",)}
    kept = all(draft.settings.get(key, usual)[0] == usual[0] for key, usual in moves.items())
    if updates > 1 and not (kept and not draft.number(f"{OPTIM}.lr_warmup_steps_ratio", 0.0)):
        draft.differs.append(
            "verl moves the learning rate once a rollout, after its last update, so a warm-up begins with a rollout at "
            "0; here it moves with every update"
        )
