"""How experts are divided into pieces: every rank and the plan must find the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_hpc.models import parts

MIB = 1 << 20


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 40), st.integers(1, 400))
@settings(max_examples=300, deadline=None)
def test_every_owners_parameters_are_in_one_piece_as_large_as_may_be(sizes: list[int], owners: int, most: int) -> None:
    pieces = list(parts.divide_experts(sizes, owners, most))
    found = [(place, owner) for p in pieces for place in range(p.begin, p.end) for owner in range(p.first, p.last)]
    assert sorted(found) == [(place, owner) for place in range(len(sizes)) for owner in range(owners)]
    for piece in pieces:
        assert piece.size == sum(sizes[piece.begin : piece.end]) * (piece.last - piece.first)
        assert piece.size <= most or (piece.end, piece.last) == (piece.begin + 1, piece.first + 1)
    for one in {(piece.begin, piece.end) for piece in pieces}:
        counts = [piece.last - piece.first for piece in pieces if (piece.begin, piece.end) == one]
        fewest = -(-owners // max(1, most // sum(sizes[slice(*one)])))
        assert max(counts) - min(counts) <= 1 and len(counts) == fewest
    assert (len({(piece.begin, piece.end) for piece in pieces}) == 1) >= (sum(sizes) <= most)


@pytest.mark.parametrize(
    ("matrix", "owners", "pieces"),
    [
        (3, 8, [(0, 2, 0, 8)]),  # Qwen3-30B-A3B: 72 MiB at once
        (12, 8, [(0, 2, 0, 8)]),  # Qwen3-235B-A22B over 8 ranks: 288 MiB
        (12, 32, [(0, 2, 0, 10), (0, 2, 10, 21), (0, 2, 21, 32)]),  # over 32: 1,152 MiB
        (28, 32, [(0, 2, first * 16 // 3, (first + 1) * 16 // 3) for first in range(6)]),  # Kimi-K2: 2,688 MiB
        (192, 2, [(0, 1, 0, 1), (0, 1, 1, 2), (1, 2, 0, 2)]),  # Mixtral 8x22B: an expert alone has 576 MiB
    ],
)
def test_experts_of_known_models(matrix: int, owners: int, pieces: list[tuple[int, ...]]) -> None:
    assert [
        tuple(one)[:4] for one in parts.divide_experts([2 * matrix * MIB, matrix * MIB], owners, 512 * MIB)
    ] == pieces
