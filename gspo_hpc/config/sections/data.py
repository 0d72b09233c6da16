"""The section data: prompts for training and evaluation, from one file or from several sources."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gspo_hpc.config.section import FreeForm, Listed, Positive, Section, Share, checked, key
from gspo_hpc.config.sections.evaluation import EvalSet
from gspo_hpc.config.sections.rows import Rows

# What transformers' apply_chat_template takes beside the variables of a template; prompts are made in one way here.
_RENDERING = (
    "conversation tokenize add_generation_prompt continue_final_message padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs"
).split()
_VARIABLES = f"must hold variables of the chat template, and none of {', '.join(_RENDERING)}"
TemplateVariables = Annotated[
    FreeForm,
    Field(json_schema_extra={"propertyNames": {"not": {"enum": _RENDERING}}, "errorMessage": _VARIABLES}),
    checked(lambda v: not {*v} & {*_RENDERING}, _VARIABLES),
]


class Source(Rows):
    """One of several sources of training prompts: files, share, which rows are used, and who grades them."""

    eval: str | None = key(None, "Its evaluation prompts, named as its files are; the other keys apply to them, too.")
    weight: Positive | None = key(
        None,
        "Its share of the prompts that are drawn, among the weights of all sources. Give all of them or none; without "
        "weights each source has the share of its size.",
    )


class Data(Section):
    """Prompts: rows of JSONL, CSV, parquet or a dataset, each with text or chat messages; rewards get other fields."""

    train: str | None = key(
        None,
        "The file of training prompts, a pattern (data/train-*.parquet), a folder (FOLDER:CONFIG/SPLIT), or a dataset "
        "on the hub: OWNER/NAME:CONFIG/SPLIT, or OWNER/NAME@REVISION:FILE, where FILE may be a pattern.",
    )
    sources: Annotated[tuple[Source, ...], Listed] = key(
        (), "Several sources of training prompts, which are mixed; give these or data.train (docs/data.md)."
    )
    deduplicate: bool = key(
        False, "Of rows with the same prompt, use the first alone, over all sources; spaces around it do not count."
    )
    curriculum_floor: Share | None = key(
        None,
        "Draw a prompt of a later pass over the data with the chance 4p(1 - p), p being the share of right answers in "
        "its newest group, and at least with this chance; the default draws all alike.",
    )
    curriculum_key: str | None = key(
        None, "The field with a pass rate of 0 to 1 that stands for p until a prompt has a group of its own."
    )
    eval: str | None = key(None, "The file of evaluation prompts; named as data.train is.")
    eval_sets: Annotated[tuple[EvalSet, ...], Listed] = key(
        (),
        "Several sets of evaluation prompts, each with a name, and with graders, sampling and a system prompt of its "
        "own (docs/evaluation.md).",
    )
    train_ratio: Share = key(
        1.0,
        "Share of data.train that is trained on; the rest, drawn by run.seed, are the evaluation prompts. Give this or "
        "data.eval.",
    )
    prompt_key: str = key("prompt", "The field of a row that holds the prompt.")
    system_prompt: str | None = key(None, "A system message in front of every prompt.")
    chat_template: bool = key(True, "Put text prompts through the tokenizer's chat template, as one user message.")
    chat_template_kwargs: TemplateVariables = key(
        {}, "Further variables of the chat template, such as {enable_thinking: false} for Qwen3."
    )
    shuffle: bool = key(True, "Shuffle the prompts in every pass over the data.")
    no_resampling_pass_rate: Share | None = key(
        None,
        "Retire a prompt once this share of the completions of its group, or more, is right (more than half a mark of "
        "eval.reward): later epochs do not sample it again. ScaleRL has 0.9; the default is never.",
    )
    overlong: Literal["error", "drop", "truncate_left"] = key(
        "error", "What to do with prompts that are longer than rollout.max_prompt_length."
    )

    @property
    def named(self) -> tuple[Rows, ...]:
        """The sources and the evaluation sets: what rows may be of, by the name in their field data_source."""
        return (*self.sources, *self.eval_sets)
