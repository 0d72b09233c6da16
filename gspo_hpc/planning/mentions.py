"""The settings that a message of a rule speaks of, and where they stand.

Messages name settings by their keys, so a new rule has nothing to declare. What follows from several settings, such as
`dp_size`, stands for all of these.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from gspo_hpc.config.reading.places import Places
from gspo_hpc.config.schema import keys
from gspo_hpc.planning.builder import Broken

_GPUS = ("cluster.nodes", "cluster.gpus_per_node")
_TP, _ETP, _EP, _PP, _CP = (
    f"parallel.{name}_parallel_size"
    for name in ("tensor_model", "expert_tensor", "expert_model", "pipeline_model", "context")
)
_DP = (*_GPUS, _TP, _PP, _CP)
_ROLLOUT = ("batch.generation_batch_size", "batch.global_batch_size", "batch.steps_per_generation")
_LENGTHS = ("rollout.max_prompt_length", "rollout.max_response_length")
# Words of messages that are no keys, and the settings behind them.
_WORDS: dict[str, tuple[str, ...]] = {
    "world_size": _GPUS,
    "dp_size": _DP,
    "expert_dp_size": (*_GPUS, _ETP, _TP, _EP, _PP),
    "expert tensor": (_ETP, _TP),
    "x expert": (_EP,),
    "num_rollout_prompt": (*_ROLLOUT, "batch.num_generations"),
    "num_rollout_prompts": (*_ROLLOUT, "batch.num_generations"),
    "Per-device rollout prompt count": (*_ROLLOUT, "batch.num_generations", *_DP),
    "global train batch size": ("batch.global_batch_size",),
    "number of generations per prompt": ("batch.num_generations",),
    "longest sequence": _LENGTHS,
    "training data": ("data.train",),
    "of the model": ("model.path",),
    "the model's": ("model.path",),
    "a model with experts": ("model.path",),
    "config.json": ("model.path",),
    "GiB": ("cluster.gpu", "model.path"),  # a message about memory
}
# Settings that stand for another one if it is not given.
_INSTEAD: dict[str, tuple[str, ...]] = {
    "batch.generation_batch_size": _ROLLOUT[1:],
    "cluster.generation_gpus_per_node": ("cluster.gpus_per_node",),
    "rollout.engines_per_node": ("cluster.gpus_per_node", "rollout.tensor_parallel_size"),
    _ETP: (_TP,),
}
_FREE = re.compile(r"\b(?:rollout\.engine|algorithm)\.\w+")
_START = re.compile(r"(?<![\w.])\w|\b(?=rollout\.engine\.\w|algorithm\.\w)")  # where a word may begin
_GOES_ON = re.compile(r"\w|\.\w")


def mentioned(message: str) -> tuple[str, ...]:
    """Return the dotted keys of the settings that a message speaks of, in its order."""
    found, end = list[str](), 0
    for start in (match.start() for match in _START.finditer(message)):
        if start < end:  # inside the word before
            continue
        if free := _FREE.match(message, start):
            found.append(free[0])
            end = free.end()
        elif message[start - 1 : start] != "." and (word := _word_at(message, start)):
            found += _words()[message[start]][word]
            end = start + len(word)
    return tuple(dict.fromkeys(found))


def _word_at(message: str, start: int) -> str | None:
    """Return the longest word of a setting that stands in a message from `start`, and does not go on behind it."""
    for word in _words().get(message[start], ()):
        if message.startswith(word, start) and not _GOES_ON.match(message, start + len(word)):
            return word
    return None


def given(broken: Broken, places: Places) -> dict[str, str]:
    """Return the place of each setting that a broken rule speaks of, by its key; defaults have none."""
    named = mentioned(broken.message)
    wanted = [one for key in named for one in ((key,) if key in places else (key, *_INSTEAD.get(key, ())))]
    return {key: place for key in wanted if (place := places.setting(key)) is not None}


@cache
def _words() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the settings behind each word by its first letter, longer words first."""
    words: dict[str, tuple[str, ...]] = {key: (key,) for key in keys()}
    last = {key: key.split(".")[1] for key in keys()}
    once = {name for name, count in Counter(last.values()).items() if count == 1 and "_" in name}
    words |= {name: (key,) for key, name in last.items() if name in once} | _WORDS
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for word in sorted(words, key=len, reverse=True):
        found.setdefault(word[0], {})[word] = words[word]
    return found
