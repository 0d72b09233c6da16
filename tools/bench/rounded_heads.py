#!/usr/bin/env python3
"""Measure how surely a head that rounds its logits to 16 bits is told from one in fp32, and what it does to log-probs.

    .venv/bin/python tools/bench/rounded_heads.py [--models FOLDER ...]     # a minute; random models, and the folders

Each model computes a few sequences in 16 bits twice, with two kinds of attention, as trainer and engine do: the
difference is ordinary rounding. The second one's head is in fp32, or in the model's type. What the gate looks at is the
share of differences between a position's most likely log-probs that are multiples of 2^-12
(gspo_hpc.training.agreement.causes). The gap is weighted with probability, as the gate weights it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers

from gspo_hpc.training.agreement.causes import TOP, rounding_step, share_on_grid
from gspo_hpc.training.agreement.gap import measure

KINDS = ("Llama", "Qwen2", "Qwen3", "Mixtral")
SPREADS = (0.02, 0.2)  # of random weights: logits of a fresh model, and far from uniform
SEEDS = range(100, 104)
SEQUENCES, LENGTH = 4, 16  # of the probe


def random_models() -> Iterator[tuple[str, transformers.PreTrainedModel]]:
    """Yield random models of several families, spreads of weights and seeds, with what to call them."""
    for kind in KINDS:
        for spread in SPREADS:
            for seed in SEEDS:
                torch.manual_seed(seed)
                config = getattr(transformers, f"{kind}Config")(
                    vocab_size=4099, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                    num_attention_heads=4, num_key_value_heads=2, initializer_range=spread,
                )  # fmt: skip
                yield f"random, spread of weights {spread:g}", getattr(transformers, f"{kind}ForCausalLM")(config)


def logprobs(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, attention: str, exact_head: bool
) -> torch.Tensor:
    """Return the log-probs of all tokens after each token but the last, in fp32."""
    model.config._attn_implementation = attention
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        hidden = model.get_decoder()(tokens).last_hidden_state[:, :-1]
        logits = hidden.float() @ head.float().t() if exact_head else hidden @ head.t()
    return torch.log_softmax(logits.float(), -1)


def row(model: transformers.PreTrainedModel, dtype: torch.dtype, seed: int) -> list[tuple[float, float, float]]:
    """Return share on the grid, the step that is found and the weighted mean gap: with an fp32 head, and without."""
    model = copy.deepcopy(model).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, LENGTH), generator=generator)
    rest = tokens[:, 1:, None]
    trainer = logprobs(model, tokens, "eager", True).gather(-1, rest)[..., 0].numpy()
    found = []
    for exact in (True, False):
        every = logprobs(model, tokens, "sdpa", exact)
        top = every.topk(TOP).values.flatten(0, 1).numpy()
        gap = measure(list(trainer), list(every.gather(-1, rest)[..., 0].numpy()))
        found.append((share_on_grid(top), rounding_step(top) or 0.0, gap.weighted_mean))
    return found


def main() -> None:
    """Print a row for each kind of model and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders of Hugging Face models besides")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[tuple[str, str], list[np.ndarray]] = {}
    given = ((folder.name, transformers.AutoModelForCausalLM.from_pretrained(folder)) for folder in args.models)
    for source, seeds in ((given, SEEDS), (random_models(), SEEDS[:1])):
        for name, model in source:
            for dtype in (torch.bfloat16, torch.float16):
                for seed in seeds:
                    key = name, str(dtype).removeprefix("torch.")
                    measured.setdefault(key, []).append(np.array(row(model, dtype, seed)))
    print(
        "| model | type | probes | on the grid, fp32 head: at most | rounded head: at least | called rounded with an "
        "fp32 head | missed | weighted gap, fp32 head | rounded head |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, kind), values in measured.items():
        every = np.stack(values)  # [probes, heads, 3]
        gaps = [f"{every[:, head, 2].min():.1e} to {every[:, head, 2].max():.1e}" for head in (0, 1)]
        wrong, missed = int((every[:, 0, 1] > 0).sum()), int((every[:, 1, 1] == 0).sum())
        most, least = every[:, 0, 0].max(), every[:, 1, 0].min()
        row_of = [name, kind, len(every), f"{most:.2f}", f"{least:.2f}", wrong, missed, *gaps]
        print("| " + " | ".join(map(str, row_of)) + " |")


if __name__ == "__main__":
    main()
