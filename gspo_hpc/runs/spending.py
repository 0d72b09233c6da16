"""The account of requests to judges: what a run has asked of endpoints in all its attempts, and what it may still ask.

spending/ of the run directory has one file for each rank with a reward pool, to which the processes of the pool append.
A request is noted before it is sent, with the most that it may use, and again when its answer is there, with what it
used. So a kill at any instant leaves each request that was sent in the account once: without an answer, it counts with
the most that it may have used.

A budget holds without locks. A process notes its request, reads the files of all ranks, and sends it only where
everything noted fits: of two that note theirs at once, at least one sees both. Requests under way may turn out to use
less, so a process waits for them before it finds the budget used up: not longer than a request of the run may take,
whatever their lines say. A line has a CRC-32; it begins and ends with a line break, so that one which a full disk has
torn costs no other.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Judges
from gspo_hpc.data.outcomes import OverBudget
from gspo_hpc.system.files import make_inner_dir, open_log, plain_disk_full, sync_dir, write_all
from gspo_hpc.system.text import MALFORMED, parse_json

FOLDER = "spending"  # of a run directory
_ASKED, _ANSWERED, _WITHDRAWN = "asked", "answered", "withdrawn"
_MOST = 10**12  # tokens or cost that a line of the account counts with: more is nonsense, whose sum might be no number
_ROUNDING = 1e-9  # share by which a sum of costs may be above the largest one, being rounded
_LIMITS = {  # settings of Judges: what they bound, and its name for people
    "max_requests": ("requests", "requests"),
    "max_prompt_tokens": ("prompt_tokens", "prompt tokens"),
    "max_completion_tokens": ("completion_tokens", "completion tokens"),
    "max_cost": ("cost", "cost"),
}


@dataclass(frozen=True)
class Amount:
    """Requests, and what they use: tokens, and a cost in the currency of the prices."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        """Return both together."""
        return Amount(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )


@dataclass(frozen=True)
class Patience:
    """Limits to how long the processes of a pool wait for requests of others, whatever the lines of these say.

    A line that was there when the pool began is waited for from then on, also by a process that began later.
    """

    longest: float  # seconds that a request of the run may take
    begun: float  # on the monotonic clock, which the processes of a node share
    noted: Mapping[str, int]  # bytes of each file then

    @classmethod
    def from_now(cls, folder: Path, longest: float) -> Patience:
        """Return that of a pool which begins now."""
        return cls(longest, time.monotonic(), {path.name: path.stat().st_size for path in _files(folder)})


@dataclass
class Account:
    """The requests in the files of a folder, read as far as they were written when :meth:`read` was called."""

    folder: Path
    patience: Patience | None = None  # of who sends requests
    answered: Amount = field(default_factory=Amount)
    open: dict[str, tuple[Amount, float]] = field(default_factory=dict)  # by number: the most, and how long it waits
    estimated: int = 0  # answers that did not say how many tokens they took
    ignored: int = 0  # whole lines that no run writes: less than nothing was used, say
    _read: dict[str, int] = field(default_factory=dict)  # bytes by file

    def read(self) -> None:
        """Read what was appended since the last call."""
        for path in _files(self.folder):
            begin = self._read.get(path.name, 0)
            with path.open("rb") as file:  # opened anew: so NFS shows what other nodes have written
                file.seek(begin)
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._read[path.name] = begin + end
            old, until = 0, [0.0, 0.0]  # bytes of earlier lines, and how long those and later ones wait at most
            if self.patience is not None:
                size = self.patience.noted.get(path.name, 0)
                old = data.rfind(b"\n", 0, max(0, min(size - begin, end))) + 1
                until = [since + self.patience.longest for since in (self.patience.begun, time.monotonic())]
            for lines, latest in zip((data[:old], data[old:end]), until, strict=True):
                for event in _events(lines):
                    try:
                        self._note(latest, *event)
                    except MALFORMED:  # a run directory may be of another's making
                        self.ignored += 1

    def total(self) -> Amount:
        """Return all requests together; one without an answer counts with the most that it may use."""
        return sum((most for most, _ in self.open.values()), self.answered)

    def certain(self) -> Amount:
        """Return the total without the tokens and costs of requests that may still be answered."""
        now = time.monotonic()
        open_ = (most if until < now else Amount(most.requests) for most, until in self.open.values())
        return sum(open_, self.answered)

    def _note(self, latest: float, kind: str, number: str, *values: Any) -> None:
        if kind == _ASKED:
            *used, told = values
            until = time.monotonic() + float(told) - time.time()
            # The line may be of another's making, or of a node whose clock is wrong. NaN is not below the latest.
            self.open[number] = _one(*used), until if until < latest else latest
            return
        if kind == _ANSWERED:
            *used, told = values
            amount = _one(*used)
            self.open.pop(number, None)
            self.answered += amount
            self.estimated += not told
            return
        if kind != _WITHDRAWN:
            raise ValueError(f"{kind} is no event")
        self.open.pop(number, None)


def _one(prompt_tokens: Any, completion_tokens: Any, cost: Any) -> Amount:
    """Return what a request uses by a line; ValueError for what is no amount, or less than nothing."""
    amount = Amount(1, int(prompt_tokens), int(completion_tokens), float(cost))
    if not (amount.prompt_tokens >= 0 and amount.completion_tokens >= 0 and 0 <= amount.cost < math.inf):
        raise ValueError("it uses less than nothing")
    tokens = min(amount.prompt_tokens, _MOST), min(amount.completion_tokens, _MOST)
    return Amount(1, *tokens, min(amount.cost, _MOST))


class Spending:
    """One process's end of the account. It notes requests, and says whether the budget allows for them."""

    def __init__(self, path: Path, limits: Judges, patience: Patience) -> None:
        """Append to the file `path` (rank-NNNN.requests of the folder); `limits` is the budget of the run."""
        make_inner_dir(path.parent)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file: move it away")
        self._path, self._limits = path, limits
        self._bounded = any(getattr(limits, name) is not None for name in _LIMITS)
        self._account = Account(path.parent, patience)
        self._process, self._count = secrets.token_hex(6), 0
        with plain_disk_full(path):
            self._fd = open_log(path)
            sync_dir(path.parent)

    def ask(self, most: Amount, seconds: float) -> str | None:
        """Note a request that is sent at once, with the most that it may use; return its number.

        None: it has to wait for others, which may leave room for it. `seconds`: after them, its answer will not come.
        Raises OverBudget where there is no room, OSError where the disk is full.
        """
        if self._bounded and not self._has_room(most):
            return None
        self._count += 1
        number = f"{self._process}-{self._count}"
        values = [most.prompt_tokens, most.completion_tokens, most.cost, round(time.time() + seconds, 1)]
        self._append([_ASKED, number, *values], durable=True)
        if self._bounded and not self._has_room():
            self._append([_WITHDRAWN, number])
            return None
        return number

    def answered(self, number: str, used: Amount, *, told: bool = True) -> None:
        """Note what a request has used. `told`: the endpoint said so."""
        self._append([_ANSWERED, number, used.prompt_tokens, used.completion_tokens, used.cost, int(told)])

    def _has_room(self, more: Amount | None = None) -> bool:
        """Return whether all that is noted fits the budget, with `more`; raise OverBudget if that will not change."""
        self._account.read()
        more = more or Amount()
        if not _over(self._account.total() + more, self._limits):
            return True
        if more.requests and (over := _over(self._account.certain() + more, self._limits)):
            name, (_, what) = over, _LIMITS[over]
            raise OverBudget(f"the budget of {what} (judges.{name}) is used up: {words(self._account, self._limits)}")
        return False

    def _append(self, event: list[Any], *, durable: bool = False) -> None:
        data = json.dumps(event, separators=(",", ":")).encode()
        with plain_disk_full(self._path):
            write_all(self._fd, b"\n%08x %s\n" % (zlib.crc32(data), data))
            if durable:
                os.fdatasync(self._fd)


def file_of(run: Path, rank: int) -> Path:
    """Return the file of a rank in a run directory."""
    return run / FOLDER / f"rank-{rank:04d}.requests"


def read(folder: Path) -> Account | None:
    """Return the account of a run from its folder; None where no judge was asked."""
    account = Account(folder)
    account.read()
    return account if account.total().requests else None


def words(account: Account, limits: Judges | None) -> str:
    """Return what was used, and of how much, for people."""
    used, parts = account.total(), []
    for setting, (name, what) in _LIMITS.items():
        value, most = getattr(used, name), None if limits is None else getattr(limits, setting)
        if value == 0 and most is None:
            continue
        of = "" if most is None else f" of {most:,}"
        parts.append(f"{what} {value:,.6g}{of}" if name == "cost" else f"{value:,}{of} {what}")
    if guessed := len(account.open) + account.estimated:
        parts.append(f"{guessed:,} of the requests without a count of tokens, which count with their most")
    if account.ignored:
        parts.append(f"{account.ignored:,} lines of {FOLDER}/ that no run writes, which are left out")
    return ", ".join(parts)


def _over(amount: Amount, limits: Judges) -> str | None:
    """Return the first setting that an amount exceeds."""
    for setting, (name, _) in _LIMITS.items():
        most = getattr(limits, setting)
        if most is not None and getattr(amount, name) > most * (1 + _ROUNDING * (name == "cost")):
            return setting
    return None


def _files(folder: Path) -> list[Path]:
    """Return the files of an account. What else has such a name is none: to open a pipe would block."""
    return [path for path in sorted(folder.glob("rank-*.requests")) if path.is_file()]


def _events(data: bytes) -> Iterator[list[Any]]:
    """Yield the events of lines that are whole."""
    for line in data.split(b"\n"):
        payload = line[9:]
        if line and line[:9] == b"%08x " % zlib.crc32(payload):
            with contextlib.suppress(ValueError):
                yield parse_json(payload)
