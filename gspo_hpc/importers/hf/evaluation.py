"""Put when Hugging Face's trainers evaluate."""

from __future__ import annotations

import math

from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null
from gspo_hpc.importers.scripts.scope import is_unset
from gspo_hpc.importers.texts.uses import ends


def never(draft: Draft) -> None:
    """Report that ms-swift evaluates nothing, whatever its arguments of the evaluation say."""
    for name in ("eval_strategy", "eval_steps"):
        draft.drop(name, "since 3.6 ms-swift evaluates nothing without val_dataset or split_dataset_ratio")


def interval(draft: Draft, steps: float) -> float:
    """Return a number of steps: below 1 it is a share of those of the run, and 0 where these are not known."""
    whole = draft.settings.get("run.max_steps", (0,))[0]
    return steps if steps >= 1 else math.ceil(steps * whole)


def put(draft: Draft, strategy: str, every: int | None) -> None:
    """Put when Hugging Face's trainer evaluates; `every`: where eval_steps is not given, the steps in between."""
    if strategy == "steps" and is_unset(draft.values.get("eval_steps")):
        draft.whole("eval_steps")  # reports it
        draft.drop("eval_strategy", "set eval.interval: optimizer steps")
    elif strategy == "steps" and draft.given("eval_steps"):
        given = draft.number("eval_steps") or 0.0
        if steps := interval(draft, given) if given < 1 else draft.whole("eval_steps"):
            draft.put("eval.interval", int(steps), "eval_steps")
            draft.credit("eval.interval", "eval_strategy")
        else:
            draft.drop("eval_steps", "it is a share of the steps: set eval.interval once run.max_steps is known")
    elif strategy == "steps" and every is not None:
        draft.put("eval.interval", every, comment="as often as save_steps", of=("eval_strategy",))
    elif strategy != "no":
        draft.drop("eval_strategy", "set eval.interval: optimizer steps")
        if strategy == "epoch" and not draft.given("eval_strategy"):
            draft.assumed.append("it is evaluated once in an epoch there; set eval.interval: optimizer steps")
    asked = strategy != "no" or (draft.given("do_eval") and draft.switch("do_eval"))  # what do_eval is in transformers
    script = draft.variables.get(ends.EVALUATES)
    last = draft.source.project == "ms-swift" and strategy != "no"  # whose callback evaluates at the last step
    after = last or script == ends.ALWAYS or (script == ends.ASKED and asked)
    _asked(draft, strategy, after)
    data = {"data.eval", "data.train_ratio"} & {*draft.settings} or not is_null(draft.values.get("eval_dataset"))
    if not (data or strategy != "no" or after):
        return
    draft.put("eval.before", draft.switch("eval_on_start"), "eval_on_start", "eval_on_start is false by default there")
    text = "the script evaluates once more after the run" if after else "evaluated there only at its own steps"
    text = "ms-swift also evaluates at the last step" if last else text
    text += "" if after else ", unless the last is one of them"
    if script == ends.PERHAPS:
        text += "; whether the script does so after the run is known only when it runs"
    elif script is None and asked and draft.source.project == "TRL":
        text += "; scripts of open-r1 do so after the run, too, where do_eval is true (eval.after: true)"
    draft.put("eval.after", after, comment=text, of=("do_eval",) if after and script == ends.ASKED else ())
    if strategy != "no" or after:
        draft.differs.append(
            "an evaluation samples there as in training; here it is greedy, unless eval.samples is 2 or more"
        )


def _asked(draft: Draft, strategy: str, after: bool) -> None:
    """Say what becomes of do_eval."""
    if not (draft.given("do_eval") and draft.switch("do_eval")) or after:
        return
    if strategy != "no":
        draft.drop("do_eval", "it is true in any case where eval_strategy is given, which decides when")
    else:
        draft.drop("do_eval", "without eval_strategy the trainer evaluates nothing by it: set eval.interval")
