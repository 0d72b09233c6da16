"""Tokens that a reward model reads of a completion: its chat template, or a message that asks for the score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import RewardModel
from gspo_hpc.data.prompts import MESSAGES
from gspo_hpc.data.records import Prompt
from gspo_hpc.ops import hf_folder
from gspo_hpc.rewards import judges
from gspo_hpc.system.text import parse_json


@dataclass(frozen=True)
class Reader:
    """The way from completions to the tokens of one model's sequences."""

    model: RewardModel
    tokenizer: Any
    longest: int  # tokens of a sequence
    padding: int | None  # the token that the model takes for padding, if there is one

    @classmethod
    def of(cls, model: RewardModel, longest: int) -> Reader:
        """Return the reader of a model whose folder is there, for sequences up to so many tokens with the reply."""
        content = parse_json((Path(model.path) / "config.json").read_text("utf-8"), finite=False)
        text = content.get("text_config") or {}  # of models that see
        padding = content.get("pad_token_id", text.get("pad_token_id")) if model.kind == "classification" else None
        room = longest - (model.max_reply_length if model.kind == "generative" else 0)
        return cls(model, hf_folder.tokenizer(model.path), room, padding)

    def tokens(self, prompt: Prompt, completion: str) -> list[int]:
        """Return the tokens of the sequence. Raises ValueError where the model cannot read it."""
        found = self._tokens(prompt, completion)
        while found and found[-1] == self.padding:  # transformers scores the last token that is no padding
            found.pop()
        if not found:
            raise ValueError("the sequence has no tokens")
        if len(found) > self.longest and self.model.too_long == "fail":
            raise ValueError(
                f"the sequence has {len(found)} tokens, and the model reads {self.longest} at most: raise max_length, "
                "or give too_long cut"
            )
        return found[-self.longest :]

    def _tokens(self, prompt: Prompt, completion: str) -> list[int]:
        model = self.model
        if model.kind == "generative":
            template = judges.TEMPLATE if model.template is None else model.template
            text = judges.message_for(template, prompt.text, completion, prompt.fields)
            return self._templated([{"role": "user", "content": text}], model.chat_template_kwargs, ends=False)
        if not self._has_template():
            return list(self.tokenizer(prompt.text + completion)["input_ids"])
        messages = [*prompt.fields[MESSAGES], {"role": "assistant", "content": completion}]
        return self._templated(messages, model.chat_template_kwargs, ends=True)

    def _has_template(self) -> bool:
        return bool(self.model.chat_template_kwargs.get("chat_template") or self.tokenizer.chat_template)

    def _templated(self, messages: list[Any], variables: Mapping[str, Any], *, ends: bool) -> list[int]:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not ends, **variables
            )
        except Exception as error:  # a template is a program of its own, and raises what it likes
            raise ValueError(f"its chat template refuses the messages: {error}") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
