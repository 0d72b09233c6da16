"""Put when Hugging Face's trainers evaluate."""

from __future__ import annotations

from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import is_null
from gspo_hpc.importers.scripts.scope import is_unset


def never(draft: Draft) -> None:
    """Report that ms-swift evaluates nothing, whatever its arguments of the evaluation say."""
    for name in ("eval_strategy", "eval_steps"):
        draft.drop(name, "since 3.6 ms-swift evaluates nothing without val_dataset or split_dataset_ratio")


def put(draft: Draft, strategy: str, every: int | None) -> None:
    """Put when Hugging Face's trainer evaluates; `every`: where eval_steps is not given, the steps in between."""
    if strategy == "steps" and is_unset(draft.values.get("eval_steps")):
        draft.whole("eval_steps")  # reports it
        draft.drop("eval_strategy", "set eval.interval: optimizer steps")
    elif strategy == "steps" and draft.given("eval_steps"):
        draft.put("eval.interval", draft.whole("eval_steps"), "eval_steps")
        draft.credit("eval.interval", "eval_strategy")
    elif strategy == "steps" and every is not None:
        draft.put("eval.interval", every, comment="as often as save_steps", of=("eval_strategy",))
    elif strategy != "no":
        draft.drop("eval_strategy", "set eval.interval: optimizer steps")
    if not {"data.eval", "data.train_ratio"} & {*draft.settings} and is_null(draft.values.get("eval_dataset")):
        return
    draft.put("eval.before", draft.switch("eval_on_start"), "eval_on_start", "eval_on_start is false by default there")
    draft.put("eval.after", False, comment="evaluated there only at its own steps, unless the last is one of them")
    if strategy != "no":
        draft.differs.append(
            "an evaluation samples there as in training; here it is greedy, unless eval.samples is 2 or more"
        )
