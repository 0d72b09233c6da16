"""Carry over that groups without signal are replaced (DAPO): ``rollout.dynamic_sampling``.

Groups whose completions all have the same reward are left out there as here, and further prompts are drawn until the
rollout has all its groups. What becomes of surplus prompts, and of a rollout that finds too few groups, differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gspo_hpc.importers.draft import Draft

_KEY, _MOST = "rollout.dynamic_sampling", "rollout.max_num_gen_batches"
_LEAST = 2  # with 1, nothing could be replaced


def _put(draft: Draft, name: str, differs: str, read: Sequence[str]) -> bool:
    """Put that groups are replaced; False where they are not. `read`: arguments that are read with `name` only."""
    if not draft.switch(name):
        draft.credit(_KEY, name)  # off, as it is here
        for other in filter(draft.given, read):
            draft.drop(other, f"it is read with {name} only")
        return False
    draft.put(_KEY, True, name, differs)
    return True


def of_swift(draft: Draft) -> None:
    """Put ms-swift's dynamic_sample, which looks at max_resample_times batches, the first one included."""
    most = "max_resample_times"
    differs = (
        "there whole batches are drawn, in another order of the data, and a rollout with too few groups is the first "
        "batch as it was; here others fill it up"
    )
    if _put(draft, "dynamic_sample", differs, (most,)):
        batches = draft.whole(most, 3, least=0) or 0
        text = f"{most} {batches}, batches whose groups are looked at" + f"; {_LEAST} at least here" * (
            batches < _LEAST
        )
        draft.put(_MOST, max(_LEAST, batches), most, text)


_FILTER = "algorithm.filter_groups"
_REWARD = ("seq_reward", "seq_final_reward", "score")  # metrics that are the whole reward


def of_verl(draft: Draft, trained: int, drawn: int) -> bool:
    """Put verl's filter_groups; return whether it is on.

    `trained`, `drawn`: prompts of a rollout, and those that are drawn at once.
    """
    enable, metric, most = f"{_FILTER}.enable", f"{_FILTER}.metric", f"{_FILTER}.max_num_gen_batches"
    gen = "data.gen_batch_size"
    entry = draft.variables.get("entry", "")
    legacy = "main_ppo_v0" in entry or not draft.switch("trainer.use_v1", True)
    recipe = "dapo" in entry
    if legacy and not recipe and draft.switch(enable):
        text = "nothing in that trainer of verl's reads it (trainer.use_v1=False), so groups without signal are kept"
        for given in filter(draft.given, (enable, metric, most)):
            draft.drop(given, text)
        draft.assumed.append(f"{draft.label(enable)}: {text}; {_KEY}: true leaves them out")
        return False
    differs = (
        "there prompts beyond the rollout are lost, and too few groups end the run; here the next rollout begins with "
        "those, and others fill it up"
    )
    if not recipe:
        differs = (
            "there a prompt is drawn for each group that is left out, without a bound, and groups beyond the rollout "
            "are lost; here the next rollout begins with those"
        )
    if not _put(draft, enable, differs, (metric, most)):
        return False
    if not recipe:
        which = "the trainer of main_ppo reads it since verl 0.9 only, and recipe.dapo.main_dapo in any version"
        draft.assumed.append(f"{draft.label(enable)}: {which}; for a run of an earlier main_ppo, leave out {_KEY}")
        draft.drop(gen, "with filter_groups main_ppo draws single prompts")
        draft.drop(most, f"main_ppo of verl 0.9 ignores it; {_MOST} is the bound here")
    else:
        _bounds(draft, trained, drawn, gen, most)
        if (draft.whole("trainer.test_freq", -1, least=-1) or -1) > 1:  # 1: after every step
            draft.differs.append(
                "the DAPO recipe does not evaluate after its last step where epochs end the run; here eval.after does"
            )
    name = draft.text(metric)
    if name in _REWARD:
        draft.credit(_KEY, metric)
    elif draft.given(metric):
        text = f"a group needs an advantage here, or else rollout.dynamic_sampling_metric names the function of {name}"
        draft.drop(metric, text)
        draft.assumed.append(f"{draft.label(metric)}: {text}")
    return True


def _bounds(draft: Draft, trained: int, drawn: int, gen: str, most: str) -> None:
    """Put how many prompts the DAPO recipe draws at once, and how often."""
    if drawn > trained:
        text = f"{gen} {drawn} / train_batch_size {trained}"
        factor = math.floor(drawn / trained * 10**6) / 10**6  # not above it: the prompts are rounded up
        draft.put("rollout.oversampling_factor", factor, gen, text)
    else:
        draft.drop(gen, "a rollout first draws as many prompts as it trains on here, or more")
    batches = draft.whole(most, 0, least=-1) or 0
    if batches > 0:
        text = f"max_num_gen_batches {batches} x {drawn} prompts, in rollouts of {trained}"
        draft.put(_MOST, max(_LEAST, math.ceil(batches * drawn / trained)), most, text)
    else:
        draft.drop(most, f"0 and less are no bound there; {_MOST} is one here")
