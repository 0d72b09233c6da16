"""Read vLLM's output: its completions as our records, and the reason why an engine ended out of its log.

Shapes: T tokens whose experts are known, L layers, K experts of a token.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from gspo_hpc.data.records import Completion, Experts
from gspo_hpc.engine.messages import Sampled
from gspo_hpc.system.text import shortened


def add_sampled(sampled: Sampled, output: Any) -> None:
    """Add the tokens of vLLM's CompletionOutput to what a completion has, with the log-prob of each."""
    tokens = list(output.token_ids)
    sampled.tokens += tokens
    if tokens:  # else vLLM before 0.32 gives those of all tokens again
        sampled.logprobs += [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]


def as_completion(
    tokenizer: Any, sampled: Sampled, finish_reason: str, seed: int, num_cached_tokens: int
) -> Completion:
    """Return what was sampled as a Completion.

    `num_cached_tokens`: how many tokens of its prompt came from the prefix cache.
    """
    return Completion(
        tokens=np.asarray(sampled.tokens, dtype=np.int32),
        logprobs=np.asarray(sampled.logprobs, dtype=np.float32),
        text=tokenizer.decode(sampled.tokens, skip_special_tokens=True),
        finish_reason=finish_reason,
        seed=seed,
        num_cached_tokens=num_cached_tokens,
    )


def reported_experts(output: Any, prompt_len: int) -> tuple[Experts, Experts]:
    """Return the experts of the prompt's tokens [prompt_len, L, K] and of the completion's [response_len - 1, L, K].

    vLLM's CompletionOutput has them for every token that was computed, which the last one of a completion is not.
    Raises RuntimeError where `output` has none, or those of another number of tokens.
    """
    rows = output.routed_experts
    wanted = prompt_len + len(output.token_ids) - 1
    if rows is None or len(rows) != wanted:
        found = "no experts" if rows is None else f"the experts of {len(rows)} tokens"
        raise RuntimeError(
            f"vLLM reported {found} where it computed {wanted}; moe.router_replay=old_logprobs does not need them"
        )
    return rows[:prompt_len], rows[prompt_len:]


# The last line of a traceback that one of the engine's processes logged: "(EngineCore pid=7) ERROR 11-22 18:13:28
# [core.py:1510] ValueError: ...".
_RAISED = re.compile(
    r"^(?:\((?!MainProcess)\w+ pid=\d+\) )+ERROR [^\]\n]*\] ((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt): .+)$",
    re.MULTILINE,
)
_OF_ANOTHER = re.compile(r"root cause|stack trace|initialization failed", re.IGNORECASE)


def root_cause(log: str) -> str | None:
    """Return the error that ended the engine, found in the log of its processes; None where the log has none.

    Where the core has a process of its own, the error that vLLM raises says only that one of them failed.
    """
    raised = [text for text in _RAISED.findall(log) if _OF_ANOTHER.search(text) is None]
    return raised[-1] if raised else None


def one_line(text: str) -> str:
    """Return an error's message on one line of at most 300 characters, without pydantic's notes on its input."""
    lines = [line.strip() for line in text.split(" [type=")[0].splitlines() if line.strip()]
    return shortened(" ".join(lines[:3]), 300)


def gist(error: BaseException) -> str:
    """Return an error's message on one line, or the name of its type where it has none."""
    return one_line(str(error)) or type(error).__name__
