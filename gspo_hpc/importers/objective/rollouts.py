"""Tell how TRL and ms-swift make rollouts of the data, and updates of a rollout."""

from __future__ import annotations

import math

from gspo_hpc.importers.draft import Draft

SIZE = "completions of a rollout"  # of the original, among a draft's variables, of which none has such a name


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


def scaled(draft: Draft, size: int, processes: int) -> None:
    """Tell by what ms-swift divides a loss that is a mean over tokens.

    `size`: completions of a micro-batch of one of the `processes` that have different ones. Each micro-batch is divided
    by all tokens of the rollout, and then by the micro-batches of an update (transformers, and Megatron's schedules).
    """
    loss, level = draft.text("loss_type"), draft.text("importance_sampling_level") or "token"
    if loss not in ("dapo", "cispo") or level != "token":
        return
    update = int(draft.settings["batch.global_batch_size"][0])
    rollout = draft.settings.get("batch.generation_batch_size", (0,))[0] or (
        update * int(draft.settings.get("batch.steps_per_generation", (1,))[0])
    )
    micro = micro_batches(draft, size * processes, update // (size * processes))
    count = micro if draft.source.project == "ms-swift" else int(rollout) // (size * processes)
    if count <= 1:
        return
    bound = float(draft.settings.get("optimizer.clip_grad", (1.0,))[0])
    clips = f": clip_grad {bound:g} there is {bound * count:g} here" if bound else ""
    shared = ", and an update counts by its share of these tokens" if rollout > update else ""
    draft.differs.append(
        f"loss_type {loss} divides a micro-batch by all tokens of its rollout, and again by the micro-batches of an "
        f"update in {draft.source.project}{shared}: there the loss is about 1/{count} of the mean here, before "
        f"clipping, which Adam does not notice and the bound of gradients does{clips}"
    )


def updates(draft: Draft, update: int, rows: int, epochs: float) -> int:
    """Return the updates of `epochs` over `rows` prompts, of which each epoch only takes those that fill rollouts."""
    group, passes = int(draft.settings["batch.num_generations"][0]), draft.whole("num_iterations", 1) or 1
    made = int(draft.variables.get(SIZE, update))
    each = math.ceil(rows // max(1, made // group) * made * passes / update)
    return max(1, math.ceil(each * epochs))


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
