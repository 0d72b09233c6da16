"""Tell whether arguments of TRL are those of GRPO, or of another of its trainers, which all share most of them.

What each trainer has is that of TRL 0.9 to 1.16. An argument that only another trainer has decides against GRPO; one of
those with which completions are sampled and compared decides for it; names of files and runs decide where these do not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_hpc.importers.report import AHEAD
from gspo_hpc.importers.texts.syntax import Tree, called

CONVERTED = "convert reads GRPO alone"
_ASK = "--from trl takes it for a run of GRPO"


@dataclass(frozen=True)
class _Trainer:
    """Signs of another trainer of TRL."""

    config: str  # the class of its arguments
    why: str  # what it does that has no counterpart here
    own: frozenset[str] = frozenset()  # arguments that GRPOConfig has in no version
    words: str = ""  # pattern of its name, as names of files and runs have it
    samples: bool | frozenset[str] = False  # which of the arguments that show GRPO it has, too: all, none, or these
    losses: frozenset[str] = frozenset()  # its values of loss_type
    also: frozenset[str] = frozenset()  # arguments that it shares with GRPO and not with all others


def _set(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


# Arguments of GRPOConfig and its scripts that other online trainers have, too, and no supervised or preference trainer.
_GROUPS = _set(
    "num_generations num_generations_eval num_iterations steps_per_generation generation_batch_size epsilon",
    "epsilon_high mask_truncated_completions reward_funcs reward_weights",
)
# Those that RLOO does not have.
_GRPO = _set(
    "scale_rewards importance_sampling_level delta top_entropy_quantile off_policy_mask_threshold",
    "sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
    "use_bias_correction_kl multi_objective_aggregation cast_lm_head_to_fp32 entropy_coef use_adaptive_entropy",
    "vllm_device vllm_dtype vllm_max_model_len vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
    "cosine_max_len cosine_max_value_correct cosine_min_value_correct cosine_max_value_wrong cosine_min_value_wrong",
    "repetition_n_grams repetition_max_penalty soft_punish_cache reward_model_name_or_path",
)
_LOSSES = _set("grpo bnpo dr_grpo dapo cispo sapo luspo vespo")

_PAIRED = _set("beta max_prompt_length max_completion_length")
_PREFERENCES = "max_length dataset_num_proc truncation_mode padding_value label_pad_token_id is_encoder_decoder"
_REFERENCE = "precompute_ref_log_probs precompute_ref_batch_size generate_during_eval ref_model_init_kwargs"
_OLD_PPO = " ".join((
    "total_episodes num_ppo_epochs num_mini_batches kl_coef cliprange cliprange_value vf_coef lam whiten_rewards",
    "response_length stop_token stop_token_id non_eos_penalty penalty_reward_value sft_model_path reward_model_path",
    "num_sample_generations local_rollout_forward_batch_size missing_eos_penalty exp_name",
))  # fmt: skip
_DISTILLS = "teacher_model_name_or_path teacher_model_init_kwargs teacher_model_revision lmbda seq_kd"
_BY_PAIRS = "it learns from pairs of answers and samples none"
_BY_RATINGS = "it learns from rated answers and samples none"
_BY_TEACHER = "it follows a teacher by its whole distribution; algorithm.teacher here does so by sampled tokens"
_ASYNC = "asynchronous GRPO"

TRAINERS = {
    "SFT": _Trainer(
        "SFTConfig",
        "it is supervised",
        _set("max_seq_length packing packing_strategy eval_packing completion_only_loss assistant_only_loss",
             "dataset_text_field dataset_kwargs dataset_batch_size chars_per_token num_of_sequences eos_token",
             "chat_template_path activation_offloading use_liger max_length dataset_num_proc truncation_mode pad_token",
             "padding_free"),
        "sft|pretrain|pretraining|cpt|midtrain|midtraining",
        losses=_set("nll dft chunked_nll"),
    ),
    "DPO": _Trainer(
        "DPOConfig",
        _BY_PAIRS,
        _set("label_smoothing rpo_alpha ld_alpha f_divergence_type f_alpha_divergence_coef discopop_tau use_weighting",
             "reference_free force_use_ref_model loss_weights use_logits_to_keep use_num_logits_to_keep",
             "max_target_length model_adapter_name ref_adapter_name base_model_attribute_name pad_token padding_free",
             _REFERENCE, _PREFERENCES),
        "dpo|apo|ipo",
        losses=_set("sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired aot_pair discopop",
                    "apo_zero apo_down sigmoid_norm"),
        also=_PAIRED,
    ),
    "KTO": _Trainer(
        "KTOConfig",
        _BY_RATINGS,
        _set("desirable_weight undesirable_weight", _REFERENCE, _PREFERENCES),
        "kto",
        losses=_set("kto apo_zero_unpaired"),
        also=_PAIRED,
    ),
    "BCO": _Trainer(
        "BCOConfig",
        _BY_RATINGS,
        _set("prompt_sample_size min_density_ratio max_density_ratio precompute_ref_log_probs", _PREFERENCES),
        "bco",
        also=_PAIRED,
    ),
    "CPO": _Trainer(
        "CPOConfig",
        _BY_PAIRS,
        _set("cpo_alpha simpo_gamma label_smoothing generate_during_eval", _PREFERENCES),
        "cpo|simpo",
        losses=_set("simpo alphapo"),
        also=_PAIRED,
    ),
    "ORPO": _Trainer("ORPOConfig", _BY_PAIRS, _set("generate_during_eval", _PREFERENCES), "orpo", also=_PAIRED),
    "TPO": _Trainer(
        "TPOConfig",
        _BY_PAIRS,
        _set("tpo_alpha tpo_l_gamma label_smoothing max_length dataset_num_proc truncation_mode"),
        "tpo",
    ),
    "reward": _Trainer(
        "RewardConfig",
        "it trains a reward model",
        _set("center_rewards_coefficient chat_template_path eos_token activation_offloading max_length",
             "dataset_num_proc pad_token"),
        "reward|rm",
    ),
    "PRM": _Trainer(
        "PRMConfig",
        "it trains a reward model",
        _set("step_separator train_on_last_step_only max_length dataset_num_proc"),
        "prm",
    ),
    "RLOO": _Trainer(
        "RLOOConfig",
        "its advantages compare a completion with the mean of the others, and its KL term is part of the reward",
        _set("rloo_k normalize_advantage normalize_advantages normalize_reward reward_clip_range token_level_kl",
             _OLD_PPO),
        "rloo",
        _GROUPS,
    ),
    "PPO": _Trainer(
        "PPOConfig",
        "it trains a critic, too",
        _set("adap_kl_ctrl init_kl_coef ppo_epochs mini_batch_size backward_batch_size use_score_scaling",
             "use_score_norm score_clip kl_estimator", _OLD_PPO),
        "ppo",
    ),
    "online DPO": _Trainer(
        "OnlineDPOConfig, XPOConfig and NashMDConfig",
        "it compares pairs of answers",
        _set("judge max_new_tokens reward_model_path missing_eos_penalty max_length dataset_num_proc"),
        "online dpo|dpo online|xpo|nash|nash md",
        _set("reward_weights"),
        _set("sigmoid ipo"),
    ),
    "GKD": _Trainer("GKDConfig", _BY_TEACHER, _set("max_new_tokens", _DISTILLS), "gkd"),
    "GOLD": _Trainer(
        "GOLDConfig",
        _BY_TEACHER,
        _set("student_model_revision teacher_tokenizer_name_or_path use_uld_loss use_extended_uld uld_use_hybrid_loss",
             "uld_crossentropy_weight uld_distillation_weight uld_student_temperature uld_teacher_temperature",
             "uld_token_merge_strategy vllm_sync_frequency", _DISTILLS),
    ),
    "distillation": _Trainer(
        "DistillationConfig and MiniLLMConfig",
        _BY_TEACHER,
        _set("kd_temperature rkl_advantage single_step_decomposition length_normalization loss_top_k loss_add_tail",
             "reverse_kl_top_1_mode distillation_objective iw_opd_epsilon iw_opd_gamma teacher_model_server_url",
             "teacher_server_urls use_teacher_server teacher_temperature vllm_sync_frequency", _DISTILLS),
        "minillm",
        True,
    ),
    "self-distillation": _Trainer(
        "SDPOConfig and SDFTConfig",
        "it follows the model's own answers as a teacher",
        _set("distillation_alpha distillation_mode distillation_topk distillation_is_clip distillation_add_tail",
             "distillation_weight teacher_model_kind teacher_sync_steps teacher_update_rate teacher_prompt_template",
             "num_loss_tokens_to_skip generate_from_teacher success_reward_threshold use_successful_as_teacher"),
        "sdpo|sdft",
        True,
    ),
    _ASYNC: _Trainer(
        "AsyncGRPOConfig",
        f"it {AHEAD}",
        _set("max_staleness queue_maxsize max_inflight_tasks weight_sync_steps weight_sync_timeout token_budget",
             "fork_threshold_tokens heartbeat_stale_after_s request_timeout"),
        "async grpo",
        True,
    ),
    "GRPO with another loss": _Trainer(
        "GFPOConfig, PAPOConfig, A2POConfig and GRPOWithReplayBufferConfig",
        "the loss follows more than GRPO's",
        _set("num_remains_in_group replay_buffer_size perception_loss_weight der_loss_weight1 der_loss_weight2",
             "mask_ratio mask_type num_value_samples filter_all_incorrect"),
        "gfpo|papo|a2po",
        True,
    ),
}  # fmt: skip
# Arguments that scripts of people's own have beside GRPOConfig's: they decide nothing against those.
_LOOSE = _set(
    "max_seq_length packing dataset_text_field dataset_kwargs dataset_batch_size eos_token pad_token padding_free",
    "chat_template_path activation_offloading use_liger max_new_tokens mini_batch_size reward_model_path exp_name",
    "request_timeout token_budget response_length stop_token lam mask_ratio mask_type label_smoothing",
    _PREFERENCES,
)
# Arguments that name a run; the last part of a path counts.
_NAMING = ("output_dir", "run_name", "hub_model_id", "push_to_hub_model_id")
# How a comment names a trainer: "SFT trainer config", "# sft_config.yaml".
_IN_COMMENTS = re.compile(r"\w+( \w+)? (?=(config|trainer|arguments|args|training)\b)")
_OURS = re.compile(r"(?<![a-z])(\w*grpo|gspo|dapo)(?![a-z])")


def signs(given: Iterable[str]) -> set[str]:
    """Return the arguments that show that completions are compared in groups, as in GRPO.

    An engine and a longest completion do not: trainers that distil have them, too.
    """
    return {*given} & (_GRPO | _GROUPS)


def check(
    given: Mapping[str, Any], file: str = "", folder: str = "", comments: str = "", insisted: bool = False
) -> tuple[str, ...]:
    """Return notes on the run of TRL that these arguments make. Raises ValueError, with the sign, if it is no GRPO run.

    `file`, `folder`, `comments`: names of what they stand in, and what stands beside them. `insisted`: --from trl says
    that they are GRPO's, which goes before names and before the lack of any sign, and not before an argument that
    another trainer has and GRPO has not.
    """
    found = signs(given)
    loss = str(given.get("loss_type", ""))
    if loss in _LOSSES:
        found.add("loss_type")
    names = _names(given, file, folder, comments)
    ours = [label for label, text in names if _OURS.search(text) and _named(text) != _ASYNC]
    other = next(((label, name) for label, text in names if label not in ours and (name := _named(text))), None)
    _refuse_own(given, found, loss, other[1] if other else "")
    if insisted:
        return () if found or ours else ("no argument is GRPO's alone: taken for GRPOConfig's, as --from trl says",)
    if not found and (other is not None or not ours):
        raise ValueError(_shows_nothing(given, other))
    if not ours and other is not None and _could_be(other[1], found):
        trainer = TRAINERS[other[1]]
        raise ValueError(
            f"{other[0]} names TRL's {other[1]}, which has {_listed(found)}, too: {CONVERTED} ({trainer.why}); {_ASK}"
        )
    if not found:
        return (f"no argument is GRPO's alone: taken for GRPOConfig's, as {ours[0]} says",)
    if not ours and found <= _GROUPS:
        return (f"{_listed(found)}: RLOO has the same arguments; they are taken for those of GRPO",)
    return ()


def other_trainer(word: str, reads: str) -> str | None:
    """Return why what a command or a file names is not read, None if it is no other trainer of TRL.

    `word`: a trainer's class, that of its arguments, or its script; `reads`: what is read in its place.
    """
    last = re.split(r"[./ ]", word.removesuffix(".py"))[-1]
    plain = _letters(re.sub(r"(Trainer|Config|ScriptArguments)$", "", last))
    for name, trainer in TRAINERS.items():
        classes = re.split(r",? and |, ", trainer.config.replace("Config", ""))
        if plain in {_letters(text) for text in (name, *trainer.words.split("|"), *classes)} - {""}:
            return f"{word} is another trainer of TRL: convert reads {reads} ({trainer.why})"
    return None


def class_of_another(tree: Tree) -> str:
    """Return the class of another trainer that a file uses in place of GRPO's, "" if there is none.

    GRPO's names may stand for another class, or its config be made beside the one trainer that is another's.
    """
    for name in ("GRPOConfig", "GRPOTrainer"):
        behind = tree.originals.get(name, name)
        if own := tree.classes.get(name):
            bases = [ast.unparse(base).rsplit(".", 1)[-1] for base in own.bases]
            behind = next((tree.originals.get(base, base) for base in bases), name)
        if behind != name and (behind == "TrainingArguments" or other_trainer(behind, "")):
            return behind
    made = [tree.originals.get(called(call), called(call)) for call in tree.calls]
    derived = {name for name, own in tree.classes.items() if any("GRPO" in ast.unparse(base) for base in own.bases)}
    if any(name.endswith("GRPOTrainer") or name in derived for name in made):
        return ""
    return next((name for name in made if name.endswith("Trainer") and other_trainer(name, "")), "")


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _refuse_own(given: Mapping[str, Any], found: set[str], loss: str, named: str) -> None:
    """Raise ValueError for arguments that another trainer has, and GRPOConfig has not.

    `found`: arguments that show GRPO; `loss`: loss_type; `named`: the trainer that a name names.
    """
    every = {name for name in given if any(name in trainer.own for trainer in TRAINERS.values())}
    own = every - _LOOSE or (set() if found else every)
    by_loss = [name for name, trainer in TRAINERS.items() if loss in trainer.losses]
    if not own and not by_loss:
        return
    ranks = {name: (len(trainer.own & own) + (name in by_loss), len(trainer.own & every), name == named,
                    len(trainer.also & {*given}))
             for name, trainer in TRAINERS.items()}  # fmt: skip
    best = [name for name, rank in ranks.items() if rank == max(ranks.values())]
    listed = [name for name in given if name in own and all(name in TRAINERS[one].own for one in best)]
    if loss and best[0] in by_loss:
        listed.insert(0, f"loss_type={loss}")
    it = "it" if len(listed) == 1 else "them"
    whose = _either(best) if len(best) < 4 else f"{', '.join(best[:3])} and others"
    why = f" ({TRAINERS[best[0]].why})" if len(best) == 1 else ""
    raise ValueError(
        f"{_listed(listed)} belong{'s' if it == 'it' else ''} to TRL's {whose}, and not to GRPO: {CONVERTED}{why}; if "
        f"a script for GRPO takes {it} too, leave {it} out"
    )


def _shows_nothing(given: Mapping[str, Any], other: tuple[str, str] | None) -> str:
    """Return the error for arguments of which none shows GRPO. `other`: what names another trainer, and which."""
    if other is not None:
        return (
            f"{other[0]} names TRL's {other[1]}, and no argument shows GRPO (num_generations, reward_funcs and the "
            f"like): {CONVERTED}; {_ASK}"
        )
    paired = [name for name in given if name in _PAIRED]
    whose = f"{_listed(paired)} can be DPO's or KTO's, too" if paired else "all trainers of TRL have those that it has"
    if given.get("use_vllm") is not None:
        whose = "use_vllm can be RLOO's, online DPO's or a distillation's, too"
    return (
        f"no argument shows that this is a GRPO run of TRL, as num_generations and reward_funcs do ({whose}): "
        f"{CONVERTED}; {_ASK}"
    )


def _names(given: Mapping[str, Any], file: str, folder: str, comments: str) -> list[tuple[str, str]]:
    """Return what names the run: a label, and the words of the name."""
    found = [(f"its file {file}", file)] if file else []
    if _OURS.fullmatch(words := _words(folder)) or _named(words, whole=True):
        found.append((f"its folder {folder}", folder))
    for name in _NAMING:
        if isinstance(value := given.get(name), str) and value.strip():
            found.append((f"{name} {value}"[:60], value.rstrip("/").rpartition("/")[2]))
    named = [(label, _words(text)) for label, text in found]
    told = " / ".join(match[0] for match in _IN_COMMENTS.finditer(_words(comments)))
    return [*named, ("a comment in it", told)] if told else named


def _words(text: str) -> str:
    """Return a name in lower case, its parts with one blank between."""
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"\.(ya?ml|py|sh|json)$", "", text))
    return re.sub(r"[^a-z0-9]+", " ", parts.lower()).strip()


def _named(text: str, among: Iterable[str] = TRAINERS, whole: bool = False) -> str | None:
    """Return the trainer that a name names, None if it names none: the longest word for one counts.

    `whole`: the name is nothing but the word.
    """
    hits = [(len(match[0]), name) for name in among if (words := TRAINERS[name].words)
            and (match := re.search(rf"^({words})$" if whole else rf"(?<![a-z])({words})(?![a-z])", text))]  # fmt: skip
    return max(hits)[1] if hits else None


def _could_be(name: str, found: set[str]) -> bool:
    """Tell whether another trainer has all the arguments that show GRPO."""
    samples = TRAINERS[name].samples
    return samples is True or (samples is not False and found <= samples)


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _listed(names: Iterable[str]) -> str:
    given = sorted(names) if isinstance(names, set | frozenset) else [*names]
    return ", ".join(given[:4]) + (f" and {len(given) - 4} more" if len(given) > 4 else "")
