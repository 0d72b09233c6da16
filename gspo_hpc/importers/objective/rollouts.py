"""Tell how TRL and ms-swift make rollouts of the data, and updates of a rollout."""

from __future__ import annotations

from gspo_hpc.importers.draft import Draft

# What says how many prompts a rollout has, with its value where it is not given.
_ROLLOUT = {"generation_batch_size": None, "global_batch_size": None, "steps_per_generation": 1, "num_generations": 8}


def shared(draft: Draft, micro: int, accumulated: int) -> None:
    """Tell how TRL divides a rollout among its updates; `micro`: completions of a micro-batch of all processes."""
    rollout = draft.whole("generation_batch_size")
    count = draft.whole("steps_per_generation") or (max(1, rollout // micro) if rollout else accumulated)
    loss, ratio = draft.text("loss_type") or "dapo", count / accumulated
    if ratio > 1:
        draft.differs.append("TRL shuffles completions among the updates of a rollout, which have whole groups here")
    by_token = (draft.text("importance_sampling_level") or "token") == "token"
    if ratio != 1 and by_token and loss in ("dapo", "cispo"):
        times = f"1/{ratio:g} of" if ratio > 1 else f"{1 / ratio:g} times"
        draft.differs.append(
            f"loss_type {loss} divides an update by all tokens of its rollout in TRL, and by its own here: there the "
            f"loss is about {times} the mean, before clipping"
        )


def dropped(draft: Draft) -> None:
    """Tell what becomes of prompts at the end of an epoch."""
    size = {key: draft.settings.get(f"batch.{key}", (usual,))[0] for key, usual in _ROLLOUT.items()}
    made = size["generation_batch_size"] or (size["global_batch_size"] or 0) * size["steps_per_generation"]
    if made > size["num_generations"]:
        draft.differs.append(
            f"an epoch of {draft.source.project} drops the last prompts where they fill no rollout; here they go into "
            "the next"
        )
