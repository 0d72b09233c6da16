"""The tokens of an environment's reply: what a chat template puts behind a message of the model, up to its next one.

What the model sampled stays the tokens that it sampled. Only what follows them is tokenized, so a conversation grows at
its end alone, whatever a template would do to earlier messages if it were given the whole conversation again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gspo_hpc.config.schema import Data

_MESSAGE = "gspo-message"  # stands for the model's; no template changes or contains it
# Ends of a message in the harmony format, for which its template has another one in all messages but the last.
_ENDS = {"<|return|>": "<|end|>", "<|call|>": "<|end|>"}


class Replies:
    """The text around an environment's replies, by the chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, data: Data, tools: Sequence[dict[str, Any]] = (), *, users: bool = True) -> None:
        """Take the template apart. Raises ValueError where it has no place for a reply.

        `tools` are those that the template shows. `users`: there are replies as from a user.
        """
        self._tokenizer = tokenizer
        self._kwargs = data.chat_template_kwargs | ({"tools": [*tools]} if tools else {})
        self._shows_calls = False  # the template takes a result only behind a message that calls a tool
        try:
            if users:
                self._after([{"role": "user", "content": "gspo-reply"}])
            if tools:
                self._try_results(_results([("gspo-tool", f"gspo-result-{number}") for number in range(2)]))
        except Exception as error:  # a template is a program of its own, and raises what it likes
            raise ValueError(f"environment: the chat template takes no reply after an answer: {error}") from None

    def tokens(self, reply: str | Sequence[tuple[str, str]], last: int) -> list[int]:
        """Return the tokens that follow a message of the model whose last token is `last`. Raises ValueError.

        A reply is a text as from the user, or the results of calls of tools, each with the tool's name.
        """
        text = self._after([{"role": "user", "content": reply}] if isinstance(reply, str) else _results(reply))
        ended = self._tokenizer.decode([last], skip_special_tokens=False, clean_up_tokenization_spaces=False).strip()
        for end in (ended, _ENDS.get(ended)):
            if end and text.lstrip().startswith(end):  # the model has ended its message itself
                text = text.lstrip().removeprefix(end)
                break
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """Return a message of the model with the special tokens in it, which calls of tools may begin with."""
        found: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return found

    def _try_results(self, results: list[dict[str, Any]]) -> None:
        """Find out behind what kind of message the template takes results of tools. Raises what it raises."""
        try:
            self._after(results)
        except Exception as error:  # of its own, and of any kind
            self._shows_calls = True
            try:
                self._after(results)
            except Exception:
                raise error from None

    def _after(self, replies: list[dict[str, Any]]) -> str:
        """Return what the template puts behind a message of the model where these messages follow."""
        message: dict[str, Any] = {"role": "assistant", "content": _MESSAGE}
        if self._shows_calls and replies[0]["role"] == "tool":  # the arguments stand for the whole message
            function = {"name": replies[0]["name"], "arguments": _MESSAGE}
            message |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
        whole = self._render([{"role": "user", "content": "gspo-question"}, message, *replies], True)
        if whole.count(_MESSAGE) != 1:
            raise ValueError("it does not keep the model's message as it is")
        before, _, after = whole.partition(_MESSAGE)
        if before.endswith('"'):  # arguments are written as JSON
            after = after.removeprefix('"')
        for reply in replies:
            # A result of a tool may be written as JSON.
            if (
                reply["content"].strip() not in after
                and json.dumps(reply["content"], ensure_ascii=False)[1:-1] not in after
            ):
                raise ValueError("it leaves the reply out")
        return after

    def _render(self, messages: list[dict[str, Any]], generate: bool) -> str:
        found: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **self._kwargs
        )
        return found


def _results(results: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": "tool", "name": name, "content": text} for name, text in results]
