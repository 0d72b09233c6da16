"""Tell which versions of ms-swift a run may be of, and what these have in place of the defaults of ms-swift 4.5.

Arguments show it: some that version 3 has are called otherwise in 4, or gone; a few were gone before 3.5.
"""

from __future__ import annotations

from gspo_hpc.importers import parts as parts
from gspo_hpc.importers.draft import Draft

# Argument of version 3 alone -> the last version that has it: grpo_trainer.py and arguments.py of each tag.
_THIRD = {"train_type": "3.12", "num_infer_workers": "3.5", "tensor_parallel_size": "3.5", "tools_prompt": "3.2"}
_FOURTH = {"top_p": "0.9 (up to 4.0.2)", "top_k": "50 (up to 4.0.2)"}
_HELD = {"split_dataset_ratio": "0.01 (up to 3.5)"}
_EARLIEST = {  # before 3.5, whose server vllm_mode chooses
    "loss_type": "bnpo, a mean over the tokens of a micro-batch (up to 3.3)",
    "adam_beta2": "0.999 (up to 3.2.1)",
}


def third(draft: Draft) -> str:
    """Return an argument that only version 3 has, the one that was gone first; empty if there is none."""
    given = {draft.name(name) for name in ("tuner_type", "vllm_tensor_parallel_size")} | {*draft.values}
    found = [name for name in _THIRD if name in given]
    return min(found, key=lambda name: float(_THIRD[name].partition(".")[2])) if found else ""


def loss(draft: Draft) -> str:
    """Return the loss_type of a run that gives none: a mean over tokens where the version is below 3.4 for sure."""
    return "bnpo" if third(draft) == "tools_prompt" else "grpo"


def tell(draft: Draft, sign: str) -> None:
    """Tell which defaults were taken, and which ones another version had; `sign`: see :func:`third`."""
    earlier = dict(_HELD)
    if draft.source.project == "ms-swift" and not draft.given("vllm_mode"):  # Megatron-SWIFT has GRPO since 3.8
        earlier |= _EARLIEST
    if not sign:
        held = {} if draft.given("tuner_type") else earlier  # 3 has no tuner_type
        parts.earlier(draft, "ms-swift 4.5", {**_FOURTH, **held})
        return
    taken = "top_p and top_k"
    if loss(draft) != "grpo":
        taken = "top_p, top_k and loss_type (bnpo: a mean over a micro-batch there)"
        earlier.pop("loss_type", None)
    told = "; ".join(f"{name} {value}" for name, value in earlier.items() if name not in draft.values)
    draft.assumed.append(
        f"{sign} is an argument of ms-swift 3 (up to {_THIRD[sign]}): {taken} have its defaults where they are not "
        f"given, all others those of 4{'; earlier ones of 3 also had ' if told else ''}{told}"
    )
