"""Losses of the peers for peer_formulas.py, of B sequences: packed [T] in the data, and padded [B, L] for the peers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peer_sources import Arrays, Names, defined, statements
from torch import Tensor

TRL, SWIFT = "trainer/grpo_trainer.py", "rlhf_trainers/grpo_trainer.py"


class _Padded:
    """The packed arrays as [B, L], with the log-probs as leaves, and their gradient back.

    The entropy bonus needs a gradient: that of the given entropies in the log-probs counts as 1 on both sides.
    """

    def __init__(self, data: Arrays) -> None:
        mask = np.arange(int(data["padded"]))[None, :] < data["lengths"][:, None]
        self.mask = torch.from_numpy(mask)
        found = {}
        for name in ("logprobs", "old", "rollout", "reference", "entropies"):
            array = np.zeros(mask.shape, np.float32)
            array[mask] = data[name]
            found[name] = torch.from_numpy(array)
        self.logprobs = found["logprobs"].requires_grad_()
        self.old, self.rollout, self.reference = found["old"], found["rollout"], found["reference"]
        self.entropies = found["entropies"] + self.logprobs - self.logprobs.detach()
        self.advantages = torch.from_numpy(data["advantages"])[:, None].expand_as(self.mask)

    def result(self, loss: Tensor) -> Arrays:
        """Return the value of a loss and its gradient in the packed log-probs."""
        loss.backward()
        assert self.logprobs.grad is not None
        return {"value": loss.detach().numpy(), "grad": self.logprobs.grad[self.mask].numpy()}


def trainer_loss(package: str, kind: str, level: str = "token", **settings: Any) -> Callable[[Arrays], Arrays]:
    """The statements of the loss of TRL's or ms-swift's GRPOTrainer, behind those that make its weights and masks.

    `settings`: low, high, delta, tau_pos and tau_neg; correction, with bounds; drift, the limit of the mask of
    sequences; top, the share of tokens by entropy; bonus, the weight of the entropy; beta, of the KL term.
    """
    file, last, masks = {
        "trl": (TRL, "if self._entropy_bonus_enabled", _of_trl),
        "swift": (SWIFT, "if self.loss_type in ['grpo', 'sapo']", _of_swift),
    }[package]

    def run(data: Arrays) -> Arrays:
        padded = _Padded(data)
        args = SimpleNamespace(
            delta=settings.get("delta"),
            **{f"sapo_temperature_{sign}": settings.get(f"tau_{sign}") for sign in ("pos", "neg")},
            use_bias_correction_kl=False,
        )
        own = SimpleNamespace(
            **{"beta": settings.get("beta", 0.0), "_has_teacher": False, "args": args},
            loss_type=kind,
            importance_sampling_level=level,
            epsilon_low=settings.get("low"),
            epsilon_high=settings.get("high"),
            tau_pos=settings.get("tau_pos"),
            tau_neg=settings.get("tau_neg"),
            max_completion_length=int(data["padded"]),
            model=SimpleNamespace(training=False),
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, pad_across_processes=lambda x, **_: x),
        )
        count = padded.mask.sum()
        space: Names = {"torch": torch, "self": own, "per_token_logps": padded.logprobs, "entropy_mask": None}
        space |= {"old_per_token_logps": padded.old, "mask": padded.mask, "completion_mask": padded.mask}
        space |= {"inputs": {"num_items_in_batch": count, "ref_per_token_logps": padded.reference}}
        space |= {"num_items_in_batch": count, "advantages": padded.advantages, "entropies": padded.entropies}
        masks(space, padded, settings)
        exec(statements(package, file, "log_ratio = per_token_logps -", last), space)
        return padded.result(space["loss"])

    return run


def _of_trl(space: Names, padded: _Padded, settings: Names) -> None:
    """Put TRL's weights of the gap, its masks and its bonus."""
    own, corrects = space["self"], "correction" in settings
    own.use_vllm = own.vllm_importance_sampling_correction = corrects
    if corrects:
        own.vllm_importance_sampling_mode = settings["correction"]
        own.vllm_importance_sampling_clip_min, own.vllm_importance_sampling_clip_max = settings["bounds"]
        given = space | {"sampling_per_token_logps": padded.rollout}
        first, last = "per_token_logps_diff = (old", "if self.vllm_importance_sampling_mode in ['sequence_truncate'"
        exec(statements("trl", TRL, first, last), given)
        space["inputs"]["importance_sampling_ratio"] = given["vllm_importance_sampling_ratio"]
    own.off_policy_mask_threshold = limit = settings.get("drift")
    if limit is not None:
        mask_of = defined("trl", TRL, "get_off_policy_mask")
        space["off_policy_mask"] = mask_of(
            padded.advantages[:, :1], padded.logprobs, padded.rollout, padded.mask.float(), limit
        )
    if "top" in settings:
        choose = defined("trl", TRL, "get_high_entropy_mask")
        space["entropy_mask"] = choose(own, padded.entropies.detach(), padded.mask, 1 - settings["top"])
    own.entropy_coef, own.use_adaptive_entropy = settings.get("bonus", 0.0), False
    own._entropy_bonus_enabled, own._metrics = "bonus" in settings, defaultdict(lambda: defaultdict(list))


def _of_swift(space: Names, padded: _Padded, settings: Names) -> None:
    """Put ms-swift's weights of the gap, its masks and its KL term."""
    own, file = space["self"], SWIFT
    own.rollout_importance_sampling_mode = settings.get("correction")
    space["rollout_is_weights"] = None
    if "correction" in settings:
        own.rollout_importance_sampling_threshold = settings["bounds"][1]
        ratios, weigh = (
            defined("swift", file, name)
            for name in ("_compute_sequence_level_ratios", "_apply_rollout_importance_sampling")
        )
        own._compute_sequence_level_ratios = lambda *given: ratios(own, *given)
        space["rollout_is_weights"] = weigh(own, padded.old - padded.rollout, padded.mask)
    own.off_policy_sequence_mask_delta = settings.get("drift")
    keep = defined("swift", file, "_compute_off_policy_sequence_mask")
    own._compute_off_policy_sequence_mask = lambda *given: keep(own, *given)
    space["grpo_batch"] = SimpleNamespace(rollout_per_token_logps=padded.rollout)
    if "top" in settings:
        own.top_entropy_quantile = settings["top"]
        entropies = padded.entropies.detach().masked_fill(~padded.mask, float("nan"))
        given = space | {"entropies": entropies, "entropy_metrics": {}}
        exec(statements("swift", file, "entropy_threshold =", "entropy_mask ="), given)
        space["entropy_mask"] = given["entropy_mask"]
    space |= {"per_token_kl": None, "ref_per_token_logps": padded.reference}
    if "beta" in settings:
        exec(statements("swift", file, "safe_ratio = torch.clamp(ref", "per_token_kl ="), space)


def verl_loss(mean: str, bonus: float = 0.0, **correction: Any) -> Callable[[Arrays], Arrays]:
    """Verl's vanilla loss, without its dual clip, behind its correction of the gap, with its entropy bonus."""

    def run(data: Arrays) -> Arrays:
        from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct
        from verl.workers.config import ActorConfig

        padded = _Padded(data)
        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e6}
        config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **clip)
        config.global_batch_info["global_batch_size"] = len(padded.mask)  # as its trainer gives it
        found, mask, _ = correct(padded.old, padded.rollout, padded.mask.long(), **correction)
        weights = None if found is None else found.batch["rollout_is_weights"]
        function = get_policy_loss_fn("vanilla")
        loss, _ = function(padded.old, padded.logprobs, padded.advantages, mask, mean, config, weights)
        return padded.result(loss - bonus * agg_loss(padded.entropies, mask, mean, **config.global_batch_info))

    return run


def openrlhf_loss(**keys: Any) -> Callable[[Arrays], Arrays]:
    """OpenRLHF's PolicyLoss."""

    def run(data: Arrays) -> Arrays:
        masked_mean = defined("openrlhf", "models/utils.py", "masked_mean")
        names = ("aggregate_loss", "PolicyLoss")
        loss_of = defined("openrlhf", "models/loss.py", *names, given={"masked_mean": masked_mean})(**keys)
        padded = _Padded(data)
        return padded.result(
            loss_of(padded.logprobs, padded.old, padded.advantages, padded.mask.float(), padded.rollout)[0]
        )

    return run


CLIP: Names = {"low": 0.2, "high": 0.28}
RANGE: Names = {"low": 0.02, "high": 0.03}
OPENRLHF: Names = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
OPENRLHF_GSPO: Names = {"clip_eps_low": 0.02, "clip_eps_high": 0.03, "policy_loss_type": "gspo"}
TRUNCATED: Names = {"correction": "token_truncate", "bounds": (None, 1.1)}
MASKED: Names = {"correction": "token_mask", "bounds": (0.9, 1.1)}
# verl bounds pi_engine / pi_old, and the others pi_old / pi_engine.
REJECTION: Names = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": f"{1 / 1.02}_{1 / 0.98}"}
LOSSES: dict[str, Callable[[Arrays], Arrays]] = {
    "TRL grpo": trainer_loss("trl", "grpo", **CLIP),
    "TRL grpo, delta": trainer_loss("trl", "grpo", delta=1.6, **CLIP),
    "TRL grpo, sequence": trainer_loss("trl", "grpo", "sequence", **RANGE),
    "TRL dapo": trainer_loss("trl", "dapo", **CLIP),
    "TRL dr_grpo": trainer_loss("trl", "dr_grpo", **CLIP),
    "TRL cispo": trainer_loss("trl", "cispo", low=None, high=1.4),
    "TRL sapo": trainer_loss("trl", "sapo", tau_pos=1.0, tau_neg=1.05),
    "ms-swift grpo": trainer_loss("swift", "grpo", **CLIP),
    "ms-swift grpo, sequence": trainer_loss("swift", "grpo", "sequence", **RANGE),
    "ms-swift grpo, sequence_token": trainer_loss("swift", "grpo", "sequence_token", **RANGE),
    "ms-swift sapo": trainer_loss("swift", "sapo", tau_pos=1.0, tau_neg=1.05),
    "OpenRLHF ppo": openrlhf_loss(**OPENRLHF),
    "OpenRLHF ppo, dual_clip": openrlhf_loss(dual_clip=1.6, **OPENRLHF),
    "OpenRLHF gspo": openrlhf_loss(**OPENRLHF_GSPO),
    # corrections of the gap
    "TRL dapo, token_truncate": trainer_loss("trl", "dapo", **TRUNCATED, **CLIP),
    "TRL dapo, token_mask": trainer_loss("trl", "dapo", **MASKED, **CLIP),
    "TRL dapo, sequence_mask": trainer_loss("trl", "dapo", correction="sequence_mask", bounds=(0.98, 1.02), **CLIP),
    "TRL grpo, sequence, sequence_truncate": trainer_loss(
        "trl", "grpo", "sequence", correction="sequence_truncate", bounds=(None, 1.01), **RANGE
    ),
    "TRL grpo, token_truncate, beta": trainer_loss("trl", "grpo", beta=0.1, **TRUNCATED, **CLIP),
    "TRL grpo, off_policy_mask": trainer_loss("trl", "grpo", drift=0.02, **CLIP),
    "ms-swift grpo, token_truncate": trainer_loss("swift", "grpo", **TRUNCATED, **CLIP),
    "ms-swift grpo, token_truncate, beta": trainer_loss("swift", "grpo", beta=0.1, **TRUNCATED, **CLIP),
    "ms-swift grpo, token_mask": trainer_loss("swift", "grpo", **MASKED, **CLIP),
    "ms-swift grpo, sequence, sequence_truncate": trainer_loss(
        "swift", "grpo", "sequence", correction="sequence_truncate", bounds=(None, 1.01), **RANGE
    ),
    "ms-swift grpo, sequence_mask": trainer_loss(
        "swift", "grpo", correction="sequence_mask", bounds=(None, 1.02), **CLIP
    ),
    "ms-swift grpo, off_policy_sequence_mask": trainer_loss("swift", "grpo", drift=0.02, **CLIP),
    "verl, token": verl_loss("token-mean", rollout_is="token", rollout_is_threshold=1.1),
    "verl, token, two bounds": verl_loss("token-mean", rollout_is="token", rollout_is_threshold="0.9_1.1"),
    "verl, sequence": verl_loss("token-mean", rollout_is="sequence", rollout_is_threshold=1.1),
    "verl, seq_mean_k1": verl_loss("token-mean", **REJECTION),
    "verl, seq_mean_k1, mean over sequences": verl_loss("seq-mean-token-mean", **REJECTION),
    "OpenRLHF ppo, clip": openrlhf_loss(
        is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.0, 1.1), **OPENRLHF
    ),
    "OpenRLHF ppo, masked": openrlhf_loss(is_correction_level="token", is_correction_threshold=(0.9, 1.1), **OPENRLHF),
    "OpenRLHF ppo, sequences masked": openrlhf_loss(
        is_correction_level="seq", is_correction_threshold=(0.98, 1.02), **OPENRLHF
    ),
    "OpenRLHF gspo, masked": openrlhf_loss(
        is_correction_level="token", is_correction_threshold=(0.9, 1.1), **OPENRLHF_GSPO
    ),
    # entropy
    "TRL grpo, top_entropy_quantile": trainer_loss("trl", "grpo", top=0.2, **CLIP),
    "ms-swift grpo, top_entropy_quantile": trainer_loss("swift", "grpo", top=0.2, **CLIP),
    "TRL grpo, entropy_coef": trainer_loss("trl", "grpo", bonus=0.1, **CLIP),
    "TRL dapo, entropy_coef": trainer_loss("trl", "dapo", bonus=0.1, **CLIP),
    "TRL dapo, top_entropy_quantile, entropy_coef": trainer_loss("trl", "dapo", top=0.2, bonus=0.1, **CLIP),
    "verl token-mean, entropy_coeff": verl_loss("token-mean", bonus=0.1),
    "verl seq-mean-token-mean, entropy_coeff": verl_loss("seq-mean-token-mean", bonus=0.1),
}
