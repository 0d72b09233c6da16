"""A group computes its prompt once: what is shared beyond whole cache blocks, and that the samples do not show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from gspo_hpc.data.records import Completion, Group, Prompt
from gspo_hpc.engine.engine import Engine, EngineSettings, Sampling

BLOCK, SAMPLES = 32, 6
# Of less than a block, of a block to the token and around, of several; the last token is always computed.
LENGTHS = (2, 5, 31, 32, 33, 34, 45, 64, 65, 96, 130)
SAMPLING = Sampling(temperature=1.0, max_tokens=40)  # into the block after the one that was copied


@pytest.fixture(scope="module")
def counting(settings: EngineSettings) -> Iterator[Engine]:
    """An engine that keeps statistics; of one thread, as two wait for each other at every layer of a busy machine."""
    made = Engine(replace(settings, threads=1, engine_args={"disable_log_stats": False}))
    made.start()
    yield made
    made.close()


def prompt(length: int) -> Prompt:
    return Prompt(length, np.random.default_rng(length).integers(4, 99, length).astype(np.int32), "", {})


def copied(engine: Engine) -> int:
    """Tokens, since the engine was started."""
    metrics = engine._llm("get_metrics")
    return int(sum(m.value for m in metrics if m.name == "vllm:external_prefix_cache_hits"))


def run(engine: Engine) -> dict[int, Group]:
    groups = {}
    while engine.pending:
        groups |= {group.slot: group for group in engine.step()}
    return groups


def bits(completion: Completion) -> tuple[bytes, bytes]:
    return completion.tokens.tobytes(), completion.logprobs.tobytes()


def test_the_rest_of_a_prompt_is_copied_and_the_samples_are_the_same(counting: Engine) -> None:
    seeds = {length: [1000 * length + sample for sample in range(SAMPLES)] for length in LENGTHS}
    before = copied(counting)
    for length in LENGTHS:
        counting.submit(length, prompt(length), seeds[length], SAMPLING)
    together = run(counting)
    rest = sum((length - 1) % BLOCK for length in LENGTHS)
    assert copied(counting) - before == (SAMPLES - 1) * rest

    before = copied(counting)
    for length in LENGTHS:
        for sample, seed in enumerate(seeds[length]):  # each by itself: it computes all of its prompt's last block
            counting.submit(0, prompt(length), [seed], SAMPLING)
            alone = run(counting)[0].completions[0]
            assert bits(alone) == bits(together[length].completions[sample]), (length, sample)
    assert copied(counting) == before


def test_an_aborted_group_leaves_nobody_waiting(counting: Engine) -> None:
    counting.submit(7, prompt(45), [1, 2, 3], SAMPLING)
    expected = [bits(c) for c in run(counting)[7].completions]
    counting.submit(8, prompt(45), [4, 5, 6], SAMPLING)
    counting.step()  # the first request computes the prompt, the others wait for it
    counting.abort()
    counting.submit(7, prompt(45), [1, 2, 3], SAMPLING)
    assert [bits(c) for c in run(counting)[7].completions] == expected
