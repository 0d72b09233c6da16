"""The requests that an engine is sent: sampling parameters of completions and of the probe, as vLLM takes them."""

from __future__ import annotations

from typing import Any

from gspo_hpc.engine.settings import Sampling


def completion(sampling: Sampling, seed: int) -> Any:
    """Return the vllm.SamplingParams of one completion, whose result comes once, as tokens with their log-probs."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
        logprobs=0,  # log-probs of sampled tokens only
        detokenize=False,  # done once, at the end
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probe(prompt_logprobs: int | None = 0) -> Any:
    """Return the vllm.SamplingParams of a request for the log-probs of its prompt, and of the most likely tokens there.

    vLLM computes such a prompt and does not read it from its prefix cache, as it does with `prompt_logprobs` None.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,  # the least that vLLM takes
        prompt_logprobs=prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
