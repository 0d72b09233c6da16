"""The tokenizer of the small model that tools/ makes."""

from __future__ import annotations

import sys
from pathlib import Path


def test_the_tokenizer_of_the_tiny_model(project: Path) -> None:
    sys.path.insert(0, str(project / "tools"))
    try:
        import make_tiny_model as tiny
    finally:
        sys.path.remove(str(project / "tools"))
    tokenizer = tiny.make_tokenizer()
    text = "<|user|>What is 37 + 48?<|assistant|>37 + 48 = 85<|end|>"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == 11 + 9 and tokens[-1] == tokenizer.eos_token_id == 0
    assert tokenizer.decode(tokens) == text
    assert tiny.lesson(37, 48, 85) == text
    chat = [{"role": "user", "content": "What is 37 + 48?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text[:37]
    odd = 'Hello, {world}! What\n "is" = ~12 - 3'
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd
    assert tokenizer.unk_token_id not in tokenizer(odd)["input_ids"]
