"""A small model that has something to learn, and its data: `make_tiny_model.py --out DIR`.

DIR/model is a Qwen3 of 0.4 million parameters with a tokenizer of characters and a few words, pre-trained on sums of
two-digit numbers from a careless teacher, who forgets the carry more often than not: "37 + 48 = 75". Greedy decoding
follows the bad habit, but sampling is right often enough for reinforcement to find the better one. DIR/data has the
prompts; pre-training did not see the evaluation prompts either. The same seed gives the same files on the same machine.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import shutil
import string
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import make_arithmetic

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

KIND = "sum99"
FORGETS = 0.7  # share of the teacher's sums without carries
STEPS, BATCH, PEAK_LR, WARM_UP = 600, 128, 3e-3, 50
END, ROLES, UNKNOWN = "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>"), "<|unk|>"
PIECES = ("What", " is", " + ", " - ", " = ")  # what occurs in every row is one token; all else is characters
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words that occur in every row, else single characters; exact both ways for printable ASCII."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [c for c in string.printable if c.isprintable() or c == "\n"]
    vocabulary = {text: i for i, text in enumerate([END, *ROLES, UNKNOWN, *PIECES, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"What| is| [+=-] |[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """Random weights. Head size 32, because vLLM's attention on the CPU refuses 16."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    return model


def without_carry(a: int, b: int) -> int:
    """The sum column by column, each carry forgotten: 37 + 48 -> 75."""
    return (a // 10 + b // 10) % 10 * 10 + (a % 10 + b % 10) % 10


def lesson(a: int, b: int, answer: int) -> str:
    """One conversation, as the chat template writes it."""
    return f"<|user|>What is {a} + {b}?<|assistant|>{a} + {b} = {answer}{END}"


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]], seed: int) -> None:
    """Teach the model the careless teacher's answers to `pairs`."""
    import torch
    from torch.nn.functional import cross_entropy

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.01, betas=(0.9, 0.98))
    assistant = tokenizer.convert_tokens_to_ids(ROLES[2])
    started = time.monotonic()
    for step in range(1, STEPS + 1):
        texts = []
        for a, b in rng.choices(pairs, k=BATCH):
            texts.append(lesson(a, b, without_carry(a, b) if rng.random() < FORGETS else a + b))
        encoded = tokenizer(texts, padding=True, return_tensors="pt")
        tokens: Tensor = encoded["input_ids"]  # [batch, length]
        answer_begins = (tokens == assistant).int().argmax(dim=1, keepdim=True)
        learned = (torch.arange(tokens.shape[1]) > answer_begins) & encoded["attention_mask"].bool()
        targets = tokens.masked_fill(~learned, -100)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(step / WARM_UP, max(0.02, 1 - step / STEPS))
        logits = model(input_ids=tokens).logits  # [batch, length, vocabulary]; causal: padding on the right is unseen
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            say(f"step {step}/{STEPS}, loss {loss.item():.3f}, {time.monotonic() - started:.0f} s")


def answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]], sampled: bool
) -> list[bool]:
    """Return for each row whether its answer is right, decoded greedily or sampled at temperature 1."""
    import torch

    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=16,
            **({"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}),
        )
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.split("= ")[-1] == str(row["answer"]) for text, row in zip(texts, rows, strict=True)]


def make(out: Path, seed: int) -> None:
    """Make DIR/data and DIR/model; the model folder appears whole or not at all.

    One process at a time: a second one waits, and then finds them made.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _make(out, seed)
    finally:
        os.close(folder)


def _make(out: Path, seed: int) -> None:
    if (out / "model" / "config.json").is_file():
        say(f"{out} is there already; remove it to make it again")
        return
    make_arithmetic.make(out / "data", KIND, seed)
    seen, unseen = make_arithmetic.rows(make_arithmetic.KINDS[KIND], seed)
    say("loading torch and transformers")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    import torch

    torch.set_num_threads(1)  # so small a model gains nothing by more, and the result must not depend on it
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), seed)
    say(f"pre-training {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters")
    pairs = [(int(words[2]), int(words[4].rstrip("?"))) for words in (str(row["prompt"]).split() for row in seen)]
    train(model, tokenizer, pairs, seed)
    model.eval()
    greedy, sampled = (answers(model, tokenizer, unseen, sampled) for sampled in (False, True))
    say(f"unseen prompts: right {sum(greedy) / len(greedy):.2f} greedily, {sum(sampled) / len(sampled):.2f} sampled")
    work = Path(tempfile.mkdtemp(prefix=".model.", dir=out))
    try:
        model.save_pretrained(work / "model")
        tokenizer.save_pretrained(work / "model")
        (work / "model").rename(out / "model")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"done: {out / 'model'}")


def say(text: str) -> None:
    """A line of progress, seen at once also where the output goes to a file."""
    print(f"make_tiny_model: {text}", flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and data/")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the weights, the lessons and the choice of unseen prompts (default: 0)",
    )
    args = parser.parse_args()
    make(args.out, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
