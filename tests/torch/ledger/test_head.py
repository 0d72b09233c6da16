"""The memory that a head's two passes allocate in a real step equals the plan's figures.

Costs five imports of Megatron and steps of models of one layer (40 s). Catches a copy of the hidden states, or a block,
that ops/logprobs.py takes or keeps and planning/estimates/head.py does not count, and the reverse; and a gradient of
the head that is freed, or not, at another time than the plan says. The formulas were written while the cases of
`SEEN` were looked at, and are judged by those of `UNSEEN`, which have other sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from gspo_hpc.config import constants
from gspo_hpc.planning.estimates.head import Head
from tests.gloo.ranks import Meeting
from tests.torch.ledger.measured import Case

WITHIN = 0.01  # of the estimate: values that there are one of for each token are not in it
SEEN = [
    Case(),
    Case(dtype="float32"),
    Case(tied=True),
    Case(tied=True, dtype="float32"),
    Case(shared=False, prompt=40),
    Case(vocabulary=4000, hidden=128),
]
UNSEEN = [
    Case(hidden=640, vocabulary=777, responses=(333, 222, 111)),
    Case(hidden=640, vocabulary=3001, responses=(64,), tied=True),
    Case(hidden=384, vocabulary=1500, responses=(50, 51, 52, 53), block=1 << 20, block_tokens=512, dtype="float32"),
    Case(hidden=384, vocabulary=1500, responses=(700, 90), block=1 << 16, block_tokens=16, shared=False, prompt=100),
    Case(hidden=512, vocabulary=6007, responses=(400, 300), block=1 << 21, block_tokens=200, dtype="float16"),
    Case(hidden=512, vocabulary=2000, responses=(900, 900), block=1 << 22, tied=True, dtype="float32"),
]
UNSEEN += [  # with hidden states that are much smaller than a block's tokens
    Case(hidden=128, vocabulary=3000, responses=(900, 700), block=1 << 20, block_tokens=512, tied=tied)
    for tied in (False, True)
]
UNSEEN += [  # beside adapters
    Case(hidden=640, vocabulary=777, responses=(333, 222, 111), adapted=True),
    Case(hidden=384, vocabulary=1500, responses=(50, 51, 52, 53), dtype="float32", adapted=True),
    Case(hidden=512, vocabulary=2000, responses=(900, 900), block=1 << 21, tied=True, adapted=True),
    Case(
        hidden=512, vocabulary=6007, responses=(400, 300), block=1 << 16, block_tokens=16, dtype="float16", adapted=True
    ),
]
OF_TWO = [
    Case(hidden=640, vocabulary=777, responses=(333, 222, 111)),
    Case(hidden=640, vocabulary=3001, responses=(64, 65), tied=True, sequence_parallel=True),
    Case(hidden=384, vocabulary=1500, responses=(250, 31), sequence_parallel=True, dtype="float32"),
    Case(hidden=384, vocabulary=1500, responses=(250, 31), sequence_parallel=True, adapted=True),
    Case(hidden=384, vocabulary=1500, responses=(700, 90), block=1 << 19, block_tokens=256, shared=False, prompt=100),
]
GROUPS = {"seen": (1, SEEN), "unseen": (1, UNSEEN), "of two": (2, OF_TWO)}
Measured = list[tuple[int, Case, dict[str, int]]]


def measured(world: int, cases: list[Case]) -> Measured:
    """Return what rank 0 of so many finds in each case."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.torch.ledger.measured",
        json.dumps(list(map(asdict, cases))),
    ]
    with Meeting(world) as meeting:
        ranks = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **meeting.options(rank)
            )
            for rank in range(world)
        ]
    try:
        answers = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(error[-2000:] for _, error in answers)
    found = json.loads(answers[0][0].splitlines()[-1])
    return [(world, case, one) for case, one in zip(cases, found, strict=True)]


@pytest.fixture(scope="module", params=sorted(GROUPS))
def steps(request: pytest.FixtureRequest) -> Measured:
    """A group of cases, with what was measured."""
    return measured(*GROUPS[request.param])


def planned(world: int, case: Case, responses: int, monkeypatch: pytest.MonkeyPatch) -> Head:
    """Return what the plan counts with, where blocks have the sizes of a case."""
    monkeypatch.setitem(constants.LOGITS_BLOCK_BYTES, "cuda", case.block)
    monkeypatch.setitem(constants.LOGITS_BLOCK_TOKENS, "cuda", case.block_tokens)
    item = 4 if case.dtype == "float32" else 2
    return Head(responses, case.hidden, -(-case.vocabulary // world), item, frozen=case.adapted)


def test_the_head_s_passes_take_what_the_plan_says(steps: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    for world, case, found in steps:
        assert found["responses"] == sum(case.responses)
        head = planned(world, case, found["responses"], monkeypatch)
        backward = head.inputs + head.gradient + head.backward_blocks
        assert 0 <= found["backward"] / backward - 1.0 < WITHIN, (case, found, backward)
        scalars = 64 * head.tokens  # bytes: maxima, sums, logits of targets, log-probs, entropies
        assert 0 <= found["forward"] - head.forward_blocks < scalars, (case, found, head.forward_blocks)


def test_a_head_s_gradient_waits_for_the_embedding_s_where_they_are_one(
    steps: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is gone when layers begin, as are the hidden states that were kept for it."""
    for world, case, found in steps:
        head = planned(world, case, found["responses"], monkeypatch)
        left = found["after"] - found["leaves"] - found["backward_begins"]
        kept = head.tokens * case.hidden * head.item
        scalars = 64 * head.tokens
        gathered = case.sequence_parallel * found["tokens"] * case.hidden * head.item
        assert -scalars - gathered <= left + kept - case.tied * head.gradient <= scalars, (case, found)


def test_an_embedding_s_gradient_is_added_where_the_head_s_waits(
    steps: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end there are two matrices of the vocabulary's size at most, where it is what the step takes most of."""
    for world, case, found in steps:
        head = planned(world, case, found["responses"], monkeypatch)
        if case.tied and not case.adapted:
            assert found["peak"] < found["backward_begins"] + 2 * head.gradient + head.inputs + head.backward_blocks
