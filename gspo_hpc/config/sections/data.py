"""The section data: prompts for training and evaluation, from one file, from several sources, in several sets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gspo_hpc.config.section import (
    Count,
    FreeForm,
    Listed,
    Matching,
    Positive,
    Range,
    Section,
    Share,
    Temperature,
    TopK,
    checked,
    key,
)

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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_condition(value: Any) -> bool:
    """Tell whether a value says which values of a field are wanted."""
    if isinstance(value, dict):
        return bool(value) and value.keys() <= {"min", "max"} and all(map(_is_number, value.values()))
    wanted = value if isinstance(value, list) else [value]
    return bool(wanted) and all(one is None or isinstance(one, str | int | float) for one in wanted)


_VALUE = {"type": ["string", "number", "boolean", "null"]}
_A_CONDITION = {
    "anyOf": [
        _VALUE,
        {"type": "array", "items": _VALUE, "minItems": 1},
        {
            "type": "object",
            "properties": {"min": {"type": "number"}, "max": {"type": "number"}},
            "additionalProperties": False,
            "minProperties": 1,
        },
    ]
}
_NEW_NAMES = "must have new names of columns, as text, or null"
NewNames = Annotated[
    FreeForm,
    Field(
        json_schema_extra={
            "additionalProperties": {"type": ["string", "null"], "minLength": 1},
            "errorMessage": _NEW_NAMES,
        }
    ),
    checked(lambda v: all(one is None or (isinstance(one, str) and one) for one in v.values()), _NEW_NAMES),
]
_CONDITION = "must have for each field a value, a list of values, or {min: number, max: number}"
Conditions = Annotated[
    FreeForm,
    Field(json_schema_extra={"additionalProperties": _A_CONDITION, "errorMessage": _CONDITION}),
    checked(lambda v: all(map(_is_condition, v.values())), _CONDITION),
]
_WEIGHTS = "must have a number for each reward function, and at least one of them"
Weights = Annotated[
    FreeForm,
    Field(json_schema_extra={"minProperties": 1, "additionalProperties": {"type": "number"}, "errorMessage": _WEIGHTS}),
    checked(lambda v: v and all(map(_is_number, v.values())), _WEIGHTS),
]


class Rows(Section):
    """Rows of files under a name: which of them are used, how their columns are called, and who grades them."""

    name: Annotated[
        str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", "must be 1 to 40 letters, digits, '.', '_' or '-'")
    ] = key(..., "The name of the source or set, in metrics and in the field data_source of its rows.")
    files: str = key(..., "Its prompts, named as data.train is; #N behind takes N of its rows, drawn by run.seed.")
    columns: NewNames = key(
        {}, "Columns that are renamed, {old: new}, such as {question: prompt}; {old: null} leaves a column out."
    )
    constants: FreeForm = key({}, "Fields that every row gets, such as {subject: algebra}.")
    filter: Conditions = key(
        {},
        "Rows that are used, by their fields after renaming, all of which must fit: {field: value}, {field: [value, "
        "...]} or {field: {min: number, max: number}}.",
    )
    characters: Range | None = key(None, "Fewest and most characters of a prompt, [low, high]; others are left out.")
    tokens: Range | None = key(
        None, "Fewest and most tokens of a prompt with its chat template, [low, high]; others are left out."
    )
    system_prompt: str | None = key(None, "A system message in front of its prompts, in place of data.system_prompt.")
    rewards: Weights | None = key(
        None,
        "The reward functions that grade it, by their names in reward.functions, and their weights: {number_match: 1}. "
        "The first of them decides whether an answer is right; by default all grade it, with their own weights.",
    )


class Source(Rows):
    """One of several sources of training prompts: files, share, which rows are used, and who grades them."""

    eval: str | None = key(None, "Its evaluation prompts, named as its files are; the other keys apply to them, too.")
    weight: Positive | None = key(
        None,
        "Its share of the prompts that are drawn, among the weights of all sources. Give all of them or none; without "
        "weights each source has the share of its size.",
    )


class EvalSet(Rows):
    """One of several sets of evaluation prompts: files, graders, system prompt, and how its answers are sampled."""

    max_prompts: Count | None = key(None, "Number of its prompts that are evaluated; the default is eval.max_prompts.")
    samples: Count | None = key(None, "Sampled completions of each of its prompts; the default is eval.samples.")
    temperature: Temperature | None = key(
        None, "The sampling temperature of its samples; the default is eval.temperature."
    )
    top_p: Share | None = key(None, "The top_p of its samples; the default is eval.top_p.")
    top_k: TopK | None = key(None, "The top_k of its samples; the default is eval.top_k.")
    max_tokens: Count | None = key(
        None, "Tokens of its longest answer, also of the greedy ones; the default is eval.max_tokens."
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
        "Several sets of evaluation prompts, each with a name, and with reward functions, sampling and a system prompt "
        "of its own (docs/evaluation.md).",
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
