"""Tell how TRL and ms-swift make rollouts of the data, and updates of a rollout."""

from __future__ import annotations

from gspo_hpc.importers.draft import Draft


def micro_batches(draft: Draft, micro: int, accumulated: int) -> int:
    """Return the micro-batches of a rollout: of `micro` completions each, of which `accumulated` make an update."""
    rollout = draft.whole("generation_batch_size")
    return draft.whole("steps_per_generation") or (max(1, rollout // micro) if rollout else accumulated)


def shared(draft: Draft, micro: int, accumulated: int) -> None:
    """Tell how TRL divides a rollout among its updates; `micro`: completions of a micro-batch of all processes."""
    loss, ratio = draft.text("loss_type") or "dapo", micro_batches(draft, micro, accumulated) / accumulated
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
    settings = draft.settings
    group = int(settings.get("batch.num_generations", (8,))[0])
    updates = settings.get("batch.steps_per_generation", (1,))[0]
    made = settings.get("batch.generation_batch_size") or (int(settings["batch.global_batch_size"][0]) * int(updates),)
    if int(made[0]) > group:
        draft.differs.append(
            f"an epoch of {draft.source.project} drops the last prompts where they fill no rollout; here they go into "
            "the next"
        )
