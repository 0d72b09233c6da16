"""Do what Unsloth's GRPOConfig does to its own arguments (unsloth/models/rl.py of August 2026), and say it."""

from __future__ import annotations

from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.texts.trainers import UNSLOTH, WARM_UP

_HIGH = 0.28  # what epsilon_high is with loss_type dapo
_SIZE, _STEPS, _GROUP = "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"


def rewrite(draft: Draft, processes: int) -> None:
    """Replace the arguments that Unsloth overrides, where the file imports it. `processes`: the ranks that train."""
    if UNSLOTH not in draft.variables:
        return
    _warm_up(draft)
    loss = (draft.text("loss_type") or "").lower()
    if loss == "dapo":
        _override(draft, loss, "epsilon_high", _HIGH)
        _override(draft, loss, "mask_truncated_completions", True)
    elif loss == "dr_grpo":
        _scale(draft, loss)
    _raise_batch(draft, processes)


def _warm_up(draft: Draft) -> None:
    """Let a warmup_ratio that is given count, and not the default of warmup_steps."""
    steps = draft.values.get("warmup_steps")
    if steps == WARM_UP and draft.given("warmup_ratio"):
        del draft.values["warmup_steps"]
    elif draft.given("warmup_steps") and not draft.given("warmup_ratio") and not draft.number("warmup_steps", WARM_UP):
        draft.assumed.append(
            f"{draft.label('warmup_steps')}: no warm-up; with transformers 4, warmup_ratio {WARM_UP:g}, the default of "
            "Unsloth, counts then"
        )


def _override(draft: Draft, loss: str, name: str, value: float | bool) -> None:
    """Set an argument to a value, whatever it was."""
    given = draft.label(name) if name in draft.values else f"{name}, not given"
    if (draft.switch(name) if isinstance(value, bool) else draft.number(name)) == value:
        return
    draft.values[name] = value
    draft.assumed.append(f"{given}: Unsloth sets it to {str(value).lower()} with loss_type {loss}")


def _scale(draft: Draft, loss: str) -> None:
    """Take scale_rewards for its opposite where it is true or null."""
    name = "scale_rewards"
    if name not in draft.values:
        draft.assumed.append(f"{name} is not given: with loss_type {loss}, Unsloth sets false up to TRL 0.22")
        return
    value = draft.values[name]
    if value is True or value is None or str(value) in ("True", "true", "None"):
        given, value = draft.label(name), str(value).lower() == "none"
        draft.values[name] = value
        draft.assumed.append(f"{given}: Unsloth sets it to {str(value).lower()} with loss_type {loss}")


def _raise_batch(draft: Draft, processes: int) -> None:
    """Make the batch of a device a group of completions where an update is no multiple of one."""
    if draft.given("steps_per_generation") or draft.given("generation_batch_size"):
        return
    group = draft.whole(_GROUP, 8) or 8
    size, steps = draft.whole(_SIZE, 4) or 4, draft.whole(_STEPS, 2) or 2
    if not size * steps * processes % group:
        return
    if unknown := [name for name in (_GROUP, _SIZE, _STEPS) if is_unset(draft.values.get(name))]:
        why = f"Unsloth makes it {_GROUP} where an update is no multiple of that"
        why += f", which depends on {' and '.join(unknown)}, and is not known"
        draft.values[_SIZE] = group
        draft.drop(_SIZE, f"{why}: {group} is taken")
        draft.assumed.append(f"{_SIZE}: {why}: {group} is taken")
        return
    draft.assumed.append(
        f"{_SIZE} {size}: Unsloth makes it {group}, since {size} x {steps} accumulated x {processes} processes is "
        f"no multiple of {_GROUP} ({group})"
    )
    draft.values[_SIZE] = group
