"""Tokens without transformers are those of transformers: templates, special tokens, plain text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from gspo_hpc.config.schema import Data
from gspo_hpc.data.light_tokenizer import LightTokenizer
from gspo_hpc.data.prompts import build_prompts
from gspo_hpc.data.rows import load_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer that puts <bos> before plain text, one token a byte, with a limit that is not ours."""
    special = ["<bos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*special, *alphabet])}, merges=[]))
    core.add_special_tokens(special)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    core.enable_truncation(8)
    core.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": {"content": "<|end|>"}}
    settings["eos_token"] |= {"__type": "AddedToken", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


# Templates whose text depends on what the environment of transformers gives them.
TEMPLATES = [
    "{% for m in messages %}\n    {{- bos_token if loop.first }}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}{% generation %}a{{ ns is defined }}{% endgeneration %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m['content'] }}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{{ '<think>' if enable_thinking is not false }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_are_those_of_transformers(template: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text(template)
    rows = folder / "rows.jsonl"
    chat = [{"role": "system", "content": "Answer."}, {"role": "user", "content": " é 中文 \n 7 "}]
    rows.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in ("What is 6 + 18?", chat, "x" * 90)))
    tools = [{"type": "function", "function": {"name": "add", "description": "a <b>", "parameters": {}}}]
    for data, shown in ((Data(), []), (Data(chat_template_kwargs={"enable_thinking": False}), tools)):
        for overlong in ("error", "truncate_left"):
            asked = data.model_copy(update={"overlong": overlong})
            most = 50 if overlong == "truncate_left" else 4096
            ours, theirs = (
                build_prompts(load_rows(rows, asked), one, asked, most, tools=shown)
                for one in (LightTokenizer(folder), AutoTokenizer.from_pretrained(folder))
            )
            assert [(one.tokens.tolist(), one.text) for one in ours] == [(x.tokens.tolist(), x.text) for x in theirs]
    plain = Data(chat_template=False)
    texts = [row for row in load_rows(rows, plain) if isinstance(row.prompt, str)]
    ours, theirs = (
        build_prompts(texts, one, plain, 4096)
        for one in (LightTokenizer(folder), AutoTokenizer.from_pretrained(folder))
    )
    assert [one.tokens.tolist() for one in ours] == [one.tokens.tolist() for one in theirs]
