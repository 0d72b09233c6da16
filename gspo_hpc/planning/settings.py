"""Settings by their dotted keys, read and changed, for whatever tries other values of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from gspo_hpc.config.schema import Config, replace

ENGINE = "rollout.engine."  # in front of an argument of the engine
_LARGEST_FACTOR = 10_000  # primes above are not looked for


def value_of(config: Config, key: str) -> Any:
    """Return the value of a dotted key; None for an argument of the engine that is not given."""
    if key.startswith(ENGINE):
        return config.rollout.engine.get(key.removeprefix(ENGINE))
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def with_value(config: Config, key: str, value: Any) -> Config:
    """Return the config with one setting changed."""
    if key.startswith(ENGINE):
        engine = config.rollout.engine | {key.removeprefix(ENGINE): value}
        engine = {name: given for name, given in engine.items() if given is not None}  # null: vLLM's default
        return replace(config, rollout=replace(config.rollout, engine=engine))
    section, name = key.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return divisors in ascending order; not all of them for numbers with several large prime factors."""
    found, rest, factor = [1], number, 2
    while factor <= _LARGEST_FACTOR and factor * factor <= rest:
        powers = [1]
        while rest % factor == 0:
            rest //= factor
            powers.append(powers[-1] * factor)
        if len(powers) > 1:
            found = [one * power for one in found for power in powers]
        factor += 1 if factor == 2 else 2
    if rest > 1:
        found += [one * rest for one in found]
    return tuple(sorted(found))
