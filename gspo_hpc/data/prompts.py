"""Prompts: rows of a data file, their tokens, and the resumable order in which they are sampled.

Two of the three steps run before training starts: :func:`gspo_hpc.data.rows.load_rows` reads and checks every row, and
:func:`build_prompts` tokenizes them. :class:`PromptStream` then returns indices into that list.
"""

from __future__ import annotations

import heapq
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gspo_hpc.config.derived import trained_rows
from gspo_hpc.config.schema import Data
from gspo_hpc.data.carried import Carried, count
from gspo_hpc.data.records import Prompt
from gspo_hpc.data.retired import PassRates, Retired, Retirement
from gspo_hpc.data.rows import Messages, Row, listed
from gspo_hpc.data.sources.selection import FIELD, find_source, number
from gspo_hpc.system.progress import mark

log = logging.getLogger(__name__)

NONE_RETIRED, NO_RATES = Retired(), PassRates()
_Key = tuple[tuple[int, ...], tuple[Retirement, ...]]  # retired prompts that each epoch leaves out, and which
MESSAGES = "prompt_messages"  # a field of prompts that a reward model reads: the messages, for its own chat template
_CHANCE = 1  # tells the words that decide about prompts from those that order them
_AT_ONCE = 10_000  # prompts that are tokenized between two signs of life


def split(rows: list[Row], data: Data, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the rows that are trained on, and those that data.train_ratio holds out; both in the order of the file.

    Which they are is a function of `seed` and of the number of rows.
    """
    kept = trained_rows(len(rows), data)
    drawn = np.argsort(np.random.PCG64([seed, len(rows)]).random_raw(len(rows)), kind="stable")
    chosen = set(drawn[:kept].tolist())
    return [r for i, r in enumerate(rows) if i in chosen], [r for i, r in enumerate(rows) if i not in chosen]


def own_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields that the row of a prompt has, without the messages that are kept for reward models."""
    return {name: value for name, value in prompt.fields.items() if name != MESSAGES}


def sizes(prompts: Sequence[Prompt], data: Data) -> dict[str, int]:
    """Return the number of prompts of each source, in their order; without sources, of all under ""."""
    if not data.sources:
        return {"": len(prompts)}
    found = Counter(str(prompt.fields[FIELD]) for prompt in prompts)
    return {one.name: found[one.name] for one in data.sources}


def prior_rates(prompts: Sequence[Prompt], data: Data) -> list[float | None] | None:
    """Return the pass rates that rows have under data.curriculum_key, None for a row without; None without that key.

    Raises ValueError for one that is no number from 0 to 1, and if no row has any.
    """
    key = data.curriculum_key
    if key is None:
        return None
    found = [number(prompt.fields.get(key)) for prompt in prompts]
    for prompt, rate in zip(prompts, found, strict=True):
        given = prompt.fields.get(key)
        if (rate is None and given not in (None, "")) or (rate is not None and not 0 <= rate <= 1):
            raise ValueError(f"row {prompt.index}: {key!r} (data.curriculum_key) is {given!r}: it must be from 0 to 1")
    if all(rate is None for rate in found):
        raise ValueError(f"data.curriculum_key: no prompt has a pass rate in the field {key!r}")
    return found


def template_of(tokenizer: Any, data: Data) -> str:
    """Return the chat template as text; where a tokenizer has several, all of them."""
    return str(data.chat_template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None) or "")


def build_prompts(
    rows: list[Row],
    tokenizer: Any,
    data: Data,
    max_prompt_length: int,
    *,
    tools: Sequence[dict[str, Any]] = (),
    keeps_messages: bool = False,
) -> list[Prompt]:
    """Return the prompts of `rows`, tokenized.

    `tokenizer` is one of Hugging Face's, or an object with the same `apply_chat_template`, `__call__` and `decode`.
    Chat messages go through the chat template with the generation prompt, and so does text (as one user message) unless
    data.chat_template is false. The template also gets data.chat_template_kwargs; a warning names those that it does
    not have. It shows `tools`, JSON Schemas of what the model may call. data.system_prompt is put before messages that
    have no system message. Prompts of more than `max_prompt_length` tokens are an error, are dropped, or keep their
    last tokens, as data.overlong says; those outside the `tokens` of their source are left out. A prompt's `index` is
    its row's, so there are gaps where rows were dropped. With `keeps_messages` the field MESSAGES has the messages.
    Raises ValueError for prompts that cannot be built or are too long, and where none is left.
    """
    texts: list[str] = []
    faults: list[str] = []
    template = template_of(tokenizer, data)
    variables = data.chat_template_kwargs | ({"tools": [*tools]} if tools else {})
    unread = [name for name in data.chat_template_kwargs if not _stands_in(template, name)]
    for row in rows:
        mark()
        if isinstance(row.prompt, str) and not data.chat_template:
            texts.append(row.prompt)
            continue
        try:
            texts.append(
                tokenizer.apply_chat_template(
                    _messages(row, data), tokenize=False, add_generation_prompt=True, **variables
                )
            )
        except Exception as error:  # a template is a program of its own, and raises what it likes
            if getattr(tokenizer, "chat_template", None) is None:
                raise ValueError(
                    "the tokenizer has no chat template: set data.chat_template=false for text prompts, or use a "
                    f"model that has one (chat messages need it); first row: {row.where}"
                ) from None
            faults.append(f"{row.where}: the chat template refuses the prompt: {error}")
            texts.append("")
    if faults:
        raise ValueError(listed(f"{len(faults)} of {len(rows)} prompts cannot be built", faults))
    if unread:
        log.warning("data.chat_template_kwargs: the chat template has no %s, so it changes nothing", ", ".join(unread))
    prompts = []
    overlong: list[tuple[int, str]] = []  # tokens, and the row
    left_out = Counter[str]()  # prompts that a source does not want for their length, by its name
    for row, text, tokens in zip(rows, texts, _encode(rows, texts, tokenizer, data), strict=True):
        if not tokens:
            raise ValueError(f"{row.where}: the prompt has no tokens")
        source = find_source(row.fields, data)
        if source is not None and source.tokens is not None:
            low, high = source.tokens
            if not low <= len(tokens) <= high:
                left_out[source.name] += 1
                continue
        if len(tokens) > max_prompt_length:
            overlong.append((len(tokens), row.where))
            if data.overlong != "truncate_left":
                continue
            tokens = tokens[-max_prompt_length:]
            text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        fields = row.fields | {MESSAGES: _messages(row, data)} if keeps_messages else row.fields
        prompts.append(Prompt(row.index, np.asarray(tokens, dtype=np.int32), text, fields))
    for one in data.named:
        if left_out[one.name] and left_out[one.name] == sum(find_source(row.fields, data) is one for row in rows):
            low, high = one.tokens or (0, 0)
            raise ValueError(f"source {one.name}: no prompt has {low:g} to {high:g} tokens (tokens)")
    found = f"{len(overlong)} of {len(rows)} prompts are longer than rollout.max_prompt_length ({max_prompt_length})"
    if overlong and data.overlong == "error":
        most, where = max(overlong, key=lambda one: one[0])
        ways = "truncate_left" if len(overlong) == len(rows) else "drop or truncate_left"
        raise ValueError(
            f"{found}, first {overlong[0][1]} with {overlong[0][0]} tokens, at most {most} ({where})\n"
            f"set rollout.max_prompt_length={most}, or data.overlong to {ways}"
        )
    if not prompts:
        most = max(tokens for tokens, _ in overlong)
        raise ValueError(f"{found}, and data.overlong=drop leaves none: set rollout.max_prompt_length={most}")
    if overlong:
        done = "dropped" if data.overlong == "drop" else "cut to their last tokens"
        log.warning("%s: they are %s", found, done)
    return prompts


class SourcePosition(NamedTuple):
    """A position among the prompts of one of several sources."""

    draws: int  # of the source since the run began
    epoch: int
    offset: int
    known: tuple[tuple[int, int], ...]  # see Retired


@dataclass(frozen=True)
class Position:
    """A position in a prompt stream: `offset` places of `epoch` are behind it; `retired` prompts are not taken.

    The groups that are `carried` from rollouts before come in front of those whose prompts are taken there.
    """

    epoch: int = 0
    offset: int = 0
    retired: Retired = NONE_RETIRED
    rates: PassRates = NO_RATES  # by which prompts are drawn, where there is a curriculum
    parts: tuple[SourcePosition, ...] = ()  # by source, where there are several and something was drawn
    carried: tuple[Carried, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON."""
        raw: dict[str, Any] = {"epoch": self.epoch, "offset": self.offset}
        raw |= {"retired": self.retired.to_dict()} if self.retired else {}
        raw |= {"rates": self.rates.to_dict()} if self.rates else {}
        raw |= {"parts": [list(part) for part in self.parts]} if self.parts else {}
        return raw | ({"carried": list(self.carried)} if self.carried else {})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Position:
        """Return the position that :meth:`to_dict` wrote. Raises ValueError for anything else."""
        epoch, offset = raw.get("epoch"), raw.get("offset")
        further = {"retired", "rates", "parts", "carried"}
        if {*raw} - further != {"epoch", "offset"} or type(epoch) is not int or type(offset) is not int:
            raise ValueError(f"this is not a position in the prompts: {dict(raw)!r}")
        if epoch < 0 or offset < 0:
            raise ValueError(f"epoch and offset of a position must be 0 or more: {dict(raw)!r}")
        return cls(
            epoch,
            offset,
            Retired.from_dict(raw["retired"]) if "retired" in raw else NONE_RETIRED,
            PassRates.from_dict(raw["rates"]) if "rates" in raw else NO_RATES,
            source_positions(raw.get("parts", ())),
            tuple(map(Carried.from_list, raw.get("carried", ()))),
        )


def source_positions(raw: Iterable[Sequence[Any]]) -> tuple[SourcePosition, ...]:
    """Return the positions of sources from plain JSON. Raises ValueError or TypeError for anything else."""
    return tuple(
        SourcePosition(
            count(draws), count(epoch), count(offset), tuple((count(one), count(many)) for one, many in known)
        )
        for draws, epoch, offset, known in raw
    )


@dataclass(eq=False)
class PromptStream:
    """An endless order of `num_prompts` indices: every epoch visits each once, in an order of its own if shuffled.

    The order is a function of the fields alone, and of the prompts that are retired, so a position is all that a
    resumed run needs. A rollout may take its prompts across the end of an epoch. So that none of them comes twice in
    it, the first `window` places of an epoch are drawn without the prompts that came less than `window` places before
    (a shuffle with a waiting time). `window` is therefore the largest number that can be taken without one of them
    twice. Raises ValueError if it exceeds `num_prompts`.

    Where prompts are retired, places are counted among those that are left. As these become fewer, the window shrinks
    to half of them, but not below `least` (by default `window`), which is as many as a rollout trains on.

    With a `floor`, an epoch passes over some prompts of which a pass rate is known: p = 0 and 1 teach nothing, so a
    prompt is taken with the chance 4p(1 - p), at least `floor`. `prior` has rates that stand until a group has told.
    """

    num_prompts: int
    seed: int
    shuffle: bool
    window: int
    least: int | None = None
    floor: float | None = None
    prior: npt.NDArray[np.float64] | None = None  # [num_prompts], NaN where nothing is known
    _orders: dict[_Key, npt.NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)  # of two epochs

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.num_prompts:
            raise ValueError(
                f"a rollout takes {self.window} prompts (generation_batch_size / num_generations), and the data has "
                f"{self.num_prompts}: it must take at least 1, and no more than there are"
            )
        if self.seed < 0:
            raise ValueError(f"run.seed is {self.seed}: it must be 0 or more")

    def take(self, position: Position, n: int) -> tuple[list[int], Position]:
        """Return the next `n` indices into the list of prompts, and the position behind them.

        They are all different if they are no more than the window. Raises ValueError if all prompts are retired.
        """
        retired = position.retired
        epoch, offset = position.epoch, position.offset
        if epoch < 0 or not 0 <= offset < self.num_prompts:
            raise ValueError(f"{position} lies outside the data, which has {self.num_prompts} prompts: has it changed?")
        gone = retired.mask(self.num_prompts)
        if gone.all():
            raise ValueError(f"all {self.num_prompts} prompts are retired: none is left to be sampled")
        taken: list[int] = []
        while len(taken) < n:
            order = self._order(epoch, retired, position.epoch)
            wanted = ~gone if self.floor is None else ~gone & self._in_turn(epoch, position.rates, self.floor)
            places = offset + np.flatnonzero(wanted[order[offset:]])
            if self.floor is not None:  # an epoch that is passed over in part may bring a prompt too soon
                recent = taken[max(0, len(taken) + 1 - min(self.window, self.num_prompts - len(retired))) :]
                places = places[~np.isin(order[places], recent)]
            places = places[: n - len(taken)]
            taken += order[places].tolist()
            offset = len(order) if len(taken) < n else int(places[-1]) + 1
            if offset == len(order):
                epoch, offset = epoch + 1, 0
        return taken, replace(position, epoch=epoch, offset=offset, retired=retired.entered(epoch, position.epoch))

    def left(self, retired: Retired) -> int:
        """Return the number of prompts that are not retired."""
        return self.num_prompts - len(retired)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of one epoch without retired prompts, [num_prompts] int64.

        It is derived from the orders of all epochs before.
        """
        return self._order(epoch, NONE_RETIRED, epoch)

    def _order(self, epoch: int, retired: Retired, begun: int) -> npt.NDArray[np.int64]:
        """Return the order of one epoch, where `begun` is the newest epoch of which a rollout has used prompts up."""
        left_out = [retired.left_out(number, begun) for number in range(epoch + 1)]
        if not self.shuffle:
            return np.flatnonzero(~retired.mask(self.num_prompts, left_out[epoch]))

        def key(number: int) -> _Key:
            return tuple(left_out[: number + 1]), retired.prompts[: left_out[number]]

        number = next((one for one in range(epoch, -1, -1) if key(one) in self._orders), 0)
        self._orders.setdefault(key(0), self._drawn(0))
        while number < epoch:  # two are kept, because a rollout may take from both, more than once
            before = self._orders[key(number)]
            number += 1
            previous = before[~retired.mask(self.num_prompts, left_out[number])[before]]
            least = self.window if self.least is None else self.least
            window = min(self.window, max(least, len(previous) // 2), len(previous))
            self._orders = {
                key(number - 1): before,
                key(number): _after(previous, self._drawn(number), window),
            }
        return self._orders[key(epoch)]

    def _in_turn(self, epoch: int, rates: PassRates, floor: float) -> npt.NDArray[np.bool_]:
        """Return [num_prompts] True for prompts that an epoch takes, by what is known of their pass rates."""
        known = np.full(self.num_prompts, np.nan) if self.prior is None else self.prior.copy()
        known[[*rates.rates]] = [*rates.rates.values()]
        chance = np.where(np.isnan(known), 1.0, np.maximum(floor, 4 * known * (1 - known)))
        raw = np.random.PCG64([self.seed, epoch, _CHANCE]).random_raw(self.num_prompts)
        return (raw >> np.uint64(11)) * 2.0**-53 < chance

    def _drawn(self, epoch: int) -> npt.NDArray[np.int64]:
        # Ranks of raw random words: unlike Generator.permutation, numpy promises these for all its versions.
        return np.argsort(np.random.PCG64([self.seed, epoch]).random_raw(self.num_prompts), kind="stable")


def _after(previous: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """Return the prompts of `previous` in the order of `drawn`, which may have more, but for a waiting time.

    Nothing recurs sooner than `window` places after its place in `previous`: place 0 may hold any but the last
    window - 1 of `previous`; each further place sets one more of those free. Of those that may come, the one that
    `drawn` has first comes first.
    """
    rank = np.argsort(drawn)  # each prompt's rank in `drawn`
    free = len(previous) - window + 1
    waiting = rank[previous[:free]].tolist()
    heapq.heapify(waiting)
    later = iter(rank[previous[free:]].tolist())
    order = np.empty_like(previous)
    for place in range(len(previous)):
        order[place] = heapq.heappop(waiting)
        if (freed := next(later, None)) is not None:
            heapq.heappush(waiting, freed)
    return drawn[order]


def _messages(row: Row, data: Data) -> Messages:
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    source = find_source(row.fields, data)
    system = data.system_prompt if source is None or source.system_prompt is None else source.system_prompt
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _stands_in(template: str, name: str) -> bool:
    """Tell whether a chat template can read a variable; `chat_template` is another template in its place."""
    return name == "chat_template" or re.search(rf"\b{re.escape(name)}\b", template) is not None


def _encode(rows: list[Row], texts: list[str], tokenizer: Any, data: Data) -> list[list[int]]:
    """Return the tokens of every text. A template has put special tokens into its text; plain text gets them here."""
    plain = [isinstance(row.prompt, str) and not data.chat_template for row in rows]
    encoded: dict[int, list[int]] = {}
    for special in (False, True):
        chosen = [i for i, is_plain in enumerate(plain) if is_plain == special]
        for first in range(0, len(chosen), _AT_ONCE):
            some = chosen[first : first + _AT_ONCE]
            tokens = tokenizer([texts[i] for i in some], add_special_tokens=special)["input_ids"]
            encoded.update(zip(some, tokens, strict=True))
            mark()
    return [encoded[i] for i in range(len(rows))]
