"""What vLLM says of a completion, as the record that travels between phases.

Floor 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gspo_hpc.records import Completion, Experts


def as_completion(tokenizer: Any, output: Any, seed: int) -> Completion:
    """A completion from vLLM's CompletionOutput, with the log-prob of every sampled token."""
    tokens = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
    return Completion(
        tokens=np.asarray(tokens, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        finish_reason=str(output.finish_reason),
        seed=seed,
    )


def told_experts(output: Any, prompt_len: int) -> tuple[Experts, Experts]:
    """The experts of the prompt's tokens [prompt_len, layers, top_k] and of the completion's but the last, from vLLM's
    CompletionOutput: it tells them of every token that was computed."""
    rows = output.routed_experts
    wanted = prompt_len + len(output.token_ids) - 1
    if rows is None or len(rows) != wanted:
        told = "no experts" if rows is None else f"the experts of {len(rows)} tokens"
        raise RuntimeError(
            f"vLLM told {told} where it computed {wanted}: moe.router_replay=old_logprobs does not need them"
        )
    return rows[:prompt_len], rows[prompt_len:]
