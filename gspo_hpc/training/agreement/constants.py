"""Constants of engine and trainer, held against each other by value: rotary embeddings, scales, norms.

What is wrong is told whether the probe shows it or not, with the settings that give what the engine computes with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gspo_hpc.engine.constants.held import Held, Rotary
from gspo_hpc.models.parts import Rope
from gspo_hpc.ops.constants import Constants, Turns, turns_of
from gspo_hpc.ops.rope import inverse_frequencies
from gspo_hpc.system.text import rounded

_NEAR = 0.01  # of a scale: more than 16 bits lose on the way to the magnitude of a table
_THETAS = tuple(float(digit * 10**power) for power in range(3, 8) for digit in (1, 2, 5))
_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_CONTEXTS = tuple(1 << power for power in range(11, 18))  # in pre-training, as configurations have them


def differing(ours: Constants, workers: Sequence[Held], longest: int) -> str:
    """Return in which constants workers of an engine differ from the trainer; an empty text if in none.

    `longest` is the engine's context length, in which a sliding window that is as long hides nothing. Constants that an
    engine does not say are not compared.
    """
    told: dict[str, None] = {}
    for held in workers:
        for one in _of_worker(ours, held, longest):
            told.setdefault(one)
    return "; ".join(told)


def _of_worker(ours: Constants, held: Held, longest: int) -> Iterator[str]:
    magnitudes = {1.0}
    for rotary in held.rotary:
        found = turns_of(rotary.rows)
        if wrong := _of_rotary(ours, rotary, found):
            yield f"wrong rotary embeddings: {wrong}"
            return  # with them the scale of attention is another one as well
        magnitudes = {found.magnitude} if found is not None else magnitudes
    for (scale, window, bound), magnitude in itertools.product(held.attention, magnitudes):
        if not math.isclose(scale * magnitude**2, ours.attention_scale, rel_tol=_NEAR):
            yield f"attention scaled by {scale * magnitude**2:.4g} in the engine, by {ours.attention_scale:.4g} here"
        if 0 < window < longest:
            yield f"a sliding window of {window} tokens in the engine, none here"
        if bound:
            yield f"scores of attention bounded by {bound:g} in the engine, not here"
    for eps in held.norm_eps:
        if not math.isclose(eps, ours.norm_eps, rel_tol=_NEAR):
            yield f"norms with rms_norm_eps {eps:g} in the engine, {ours.norm_eps:g} here"
    for scale, bound in held.logits:
        if not math.isclose(scale, 1.0, rel_tol=_NEAR) or bound:
            yield f"logits multiplied by {scale:g}{f' and bounded by {bound:g}' if bound else ''} in the engine"


def _of_rotary(ours: Constants, rotary: Rotary, found: Turns | None) -> str:
    """Return what is wrong with an engine's rotary embeddings; an empty text if nothing is."""
    size = 2 * len(ours.inverse_frequencies)
    if rotary.size != size:
        return f"the engine rotates {rotary.size} of the {ours.head_dim} numbers of a head, the trainer {size}"
    if not rotary.by_halves:
        return "the engine rotates each number of a head with its neighbour, the trainer with one of the other half"
    if found is None:
        return ""
    if not found.is_regular:
        return "the engine's table of cosines and sines holds something else"
    expected = np.array(ours.inverse_frequencies, np.float32)
    if found.are(expected):
        return ""
    for name, rope in other_ropes(ours, found):
        alike = math.isclose(found.magnitude, rope.magnitude, rel_tol=_NEAR)
        if alike and found.are(inverse_frequencies(rope, size).numpy()):
            return f"the engine computes as the trainer would with {name}"
    place = int(np.abs(found.inverse_frequencies - expected).argmax())
    return (
        f"inverse frequency {place} of {size // 2} is {found.inverse_frequencies[place]:.4g} in the engine, and "
        f"{expected[place]:.4g} in the trainer"
    )


def other_ropes(ours: Constants, found: Turns) -> Iterator[tuple[str, Rope]]:
    """Yield rotary embeddings that an engine may have read instead of the trainer's, with what to call them."""
    rope, fitted = ours.rope, _theta_of(found)
    thetas = {f"rope_theta {theta:g}": theta for theta in _THETAS} | {
        f"a rope_theta of about {rounded(fitted)}": fitted
    }
    if rope.kind != "default":
        yield "no rope scaling", Rope(rope.theta)
        yield from ((f"{name} and no rope scaling", Rope(theta)) for name, theta in thetas.items())
    yield from ((name, replace(rope, theta=theta)) for name, theta in thetas.items())
    yield from _scaled(rope.theta, ours)
    for name, theta in thetas.items():
        yield from ((f"{name} and {scaling}", scaled) for scaling, scaled in _scaled(theta, ours))


def _scaled(theta: float, ours: Constants) -> Iterator[tuple[str, Rope]]:
    for by in _FACTORS:
        yield f"linear rope scaling by {by:g}", Rope(theta, "linear", by)
    longest = ours.max_position_embeddings
    for by in _FACTORS:
        for context in dict.fromkeys((ours.rope.original_length, longest, round(longest / by), *_CONTEXTS)):
            if context > 1:
                scaling = f"rope scaling by {by:g} of a context of {context} tokens"
                yield f"yarn {scaling}", Rope(theta, "yarn", by, context, magnitude=0.1 * math.log(by) + 1.0)
                yield f"llama3 {scaling}", Rope(theta, "llama3", by, context)


def _theta_of(found: Turns) -> float:
    """Return the rope_theta of these inverse frequencies, if they have no scaling."""
    inverse = found.inverse_frequencies.astype(np.float64)[1:]
    part = np.arange(1, len(inverse) + 1) / (len(inverse) + 1)
    sure = inverse * found.last_position * part  # the part of an angle that tells theta, by how well it is known
    if not inverse.size or not (sure > 0.0).any():
        return 1.0
    best = int(sure.argmax())
    return float(inverse[best] ** (-1.0 / part[best]))
