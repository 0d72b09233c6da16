"""What vLLM says: of a completion, as the record that travels between phases; of its own end, as a line.

Floor 3.
"""

from __future__ import annotations

import re
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


# The last line of a traceback that one of the engine's processes logged: "(EngineCore pid=7) ERROR 11-22 18:13:28
# [core.py:1510] ValueError: ...".
_RAISED = re.compile(
    r"^(?:\((?!MainProcess)\w+ pid=\d+\) )+ERROR [^\]\n]*\] ((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt): .+)$",
    re.MULTILINE,
)
_OF_ANOTHER = re.compile(r"root cause|stack trace|initialization failed", re.IGNORECASE)


def root_cause(said: str) -> str | None:
    """The error that ended the engine, from what its processes wrote: the one that vLLM raises only says that there was
    one. None where they told of none."""
    raised = [text for text in _RAISED.findall(said) if _OF_ANOTHER.search(text) is None]
    return raised[-1] if raised else None


def one_line(text: str) -> str:
    """The gist of an error's message, which may be many lines, without what pydantic says of its own inner life."""
    lines = [line.strip() for line in text.split(" [type=")[0].splitlines() if line.strip()]
    gist = " ".join(lines[:3])
    return gist if len(gist) <= 300 else gist[:297] + "..."
