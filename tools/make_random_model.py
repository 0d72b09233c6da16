#!/usr/bin/env python3
"""Make a small Hugging Face folder with random weights and a tiny tokenizer, for tests and benchmarks.

Head size is 32 or more, because vLLM's attention on the CPU refuses 16. The same arguments give the same weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def make_random_model(
    out: Path,
    family: str = "qwen3",
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 256,
    vocab: int = 256,
    tied: bool = True,
    std: float = 0.2,
    seed: int = 0,
    dtype: str = "float32",
    classifies: bool = False,
) -> Path:
    """Write config.json, model.safetensors and the tokenizer to `out`.

    `classifies`: a model of sequences with one label, as reward models are, and none that generates. A `std` of 0.2
    makes random logits peaked enough that different weights greedily choose different tokens. Raises ValueError for an
    unknown family or a vocabulary that does not hold the 95 printable characters.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is not known: one of {', '.join(FAMILIES)}")
    tokenizer = make_tokenizer(vocab)
    settings: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "initializer_range": std,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family != "qwen2":  # Qwen2's head size is always hidden / heads
        settings["head_dim"] = head_dim
    elif hidden != heads * head_dim:
        raise ValueError(f"qwen2 needs hidden = heads x head_dim, not {hidden} = {heads} x {head_dim}")
    torch.manual_seed(seed)
    kind = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    labels = {"num_labels": 1} if classifies else {}
    model = kind.from_config(AutoConfig.for_model(family, **settings, **labels), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, or a mix-up of them would not show
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def make_tokenizer(vocab: int) -> Any:
    """A tokenizer of single printable characters, three special tokens, and unused words up to `vocab`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, BOS, EOS, "\n", *(chr(code) for code in range(32, 127))]
    if vocab < len(words):
        raise ValueError(f"vocab {vocab} is too small: at least {len(words)}")
    words += [f"<{index}>" for index in range(len(words), vocab)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--family", default="qwen3", choices=FAMILIES)
    defaults = make_random_model.__kwdefaults__ or {}
    for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=int, default=defaults[name])
    parser.add_argument(
        "--untied",
        dest="tied",
        action="store_false",
        help="give the output layer its own weights, not those of the embedding",
    )
    parser.add_argument(
        "--classifies", action="store_true", help="give sequences one number instead of generating, as reward models do"
    )
    parser.add_argument("--dtype", default=defaults["dtype"], choices=DTYPES, help="type of the weights")
    parser.add_argument("--std", type=float, default=defaults["std"], help="standard deviation of the weights")
    arguments = vars(parser.parse_args())
    try:
        print(make_random_model(**arguments))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
