"""Tokenize prompts without transformers, which takes seconds to import and brings torch.

:class:`LightTokenizer` reads the files of a model's folder with the library `tokenizers`, and renders chat templates in
the environment of jinja2 that transformers documents for them. It offers what
:func:`gspo_hpc.data.prompts.build_prompts` asks of a tokenizer. Ranks tokenize with transformers, which has rules of
its own for a few models, so the tokens of a run may differ in rare cases by a few.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gspo_hpc.system import environment
from gspo_hpc.system.text import first_line, parse_json

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class NotReadable(Exception):
    """The tokenizer cannot be read here, although a run may be able to; the text is a clause that says why."""


class LightTokenizer:
    """The tokenizer of a folder, as far as prompts need it. Raises NotReadable where it cannot be read this way.

    `doubt` says what went wrong in a chat template other than an error that the template itself raises: transformers
    may know what this class does not, so such a failure decides nothing about the run.
    """

    def __init__(self, folder: Path, *, tools: bool = False) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise NotReadable("the library tokenizers is not installed here (pip install 'gspo-hpc[hub]')") from None
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise NotReadable(f"{folder} has no tokenizer.json")
        try:
            self._core = Tokenizer.from_file(str(file))
            settings = _json(folder / "tokenizer_config.json")
            self.chat_template = _template(folder, settings, tools=tools)
        except Exception as error:  # the library raises Exception itself
            raise NotReadable(f"{folder}: {first_line(str(error))}") from None
        self._core.no_truncation()
        self._core.no_padding()
        self._special = {name: text for name in _SPECIAL if (text := _text(settings.get(name))) is not None}
        self._compiled: dict[str, Any] = {}
        self.doubt: str | None = None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of `messages`. Raises whatever the template raises."""
        assert not tokenize
        text = chat_template or self.chat_template
        if text is None:
            self.doubt = "no chat template was found"
            raise ValueError(self.doubt)
        import jinja2

        try:
            if text not in self._compiled:
                self._compiled[text] = _environment().from_string(text)
            given = self._special | {"tools": tools, "documents": None} | variables
            rendered = self._compiled[text].render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )
        except Exception as error:
            if type(error) is not jinja2.TemplateError:  # which only raise_exception of the template raises
                self.doubt = f"the chat template cannot be rendered here: {first_line(str(error))}"
            raise
        return str(rendered)

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        """Return the tokens of every text, as transformers does."""
        with _set(environment.one_thread_of_tokenizers()):
            found = self._core.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in found]}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        """Return the text of tokens, with special ones."""
        return str(self._core.decode(list(tokens), skip_special_tokens=False))


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within the block; processes that are started later do not have them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _json(path: Path) -> dict[str, Any]:
    found = parse_json(path.read_text("utf-8"), finite=False) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str | None:
    """Return the text of a special token, which files give as text or as an object."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _template(folder: Path, settings: Mapping[str, Any], *, tools: bool) -> str | None:
    """Return the chat template; of several the one for tools where there are `tools`, or else the default."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text("utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {one["name"]: one["template"] for one in found}
        found = named.get("tool_use", named.get("default")) if tools else named.get("default")
    return found if isinstance(found, str) else None


def _environment() -> Any:
    """Return the environment in which chat templates are programs: filters, functions and tags that they expect."""
    import jinja2
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """Let `{% generation %}`, which marks answers for losses, change nothing in the text."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made
