"""The events of a run that people are told of, and what they are told."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

from gspo_hpc.config.schema import Config
from gspo_hpc.launch.notify import addresses
from gspo_hpc.launch.notify.sender import Sender
from gspo_hpc.runs import learning, reader
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.environment import node_name
from gspo_hpc.system.exit_codes import FAILED, REFUSED
from gspo_hpc.system.terminal import pasteable
from gspo_hpc.trackers.protocol import Record, Sent
from gspo_hpc.trackers.reader import MetricsReader

_POLL = 5.0  # seconds between two looks at metrics.jsonl
_GAP = re.compile(r"ProbeMismatch|GapMismatch|engine and trainer disagree")
_TITLES = {
    "done": "is done",
    "failed": "failed",
    "preempted": "was preempted",
    "gap": "stopped: engine and trainer disagree",
    "no_signal": "learns nothing",
}

_BUT_NOTHING = "is done, but learnt nothing"


def _say(text: str) -> None:
    print(f"gspo-hpc: {text}", file=sys.stderr, flush=True)


class Notices:
    """The notices of one process that starts attempts. Without addresses it does nothing."""

    def __init__(self, config: Config, run: RunDir, say: Callable[[str], None] = _say) -> None:
        self._notify, self._run, self._name = config.notify, run, config.run.name
        self._max_steps = config.run.max_steps
        self._sender: Sender | None = None
        self._over = threading.Event()
        self._watch: threading.Thread | None = None
        self._detail = ""  # of the last failure
        try:
            found = addresses.resolve(config.notify)
        except ValueError as error:  # here, not where it was checked: a node may lack a variable or a file
            say(str(error))
            return
        if found:
            self._sender = Sender(found, say)

    def __enter__(self) -> Self:
        if self._sender is not None and "no_signal" in self._notify.events:
            known = reader.read_records(self._run)  # what is logged from here on belongs to this attempt
            metrics = MetricsReader(self._run, Sent(known[-1]["step"] if known else -1))
            self._watch = threading.Thread(target=self._look, args=(metrics,), name="notices", daemon=True)
            self._watch.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop_looking()
        if self._sender is not None:
            self._sender.close(self._notify.timeout)

    def ended(self, reason: str, detail: str) -> None:
        """Tell how an attempt ended, where that matters before it is known whether another one follows."""
        self._detail = detail
        if self._sender is None:
            return
        if reason == "done":
            self._stop_looking()  # so that a rollout without a signal is told of before the end
            found = learning.judge(reader.read_records(self._run))
            worry = found.worry if found is not None else ""
            self._tell("done", worry and f"It {worry}", _BUT_NOTHING if found is not None and found.nothing else "")
        elif reason == "preempted":
            count = sum(record["reason"] == "preempted" for record in reader.read_attempts(self._run)[0])
            if count % self._notify.preempted == 0:
                self._tell("preempted", f"{count} times so far; it goes on by itself")
        elif reason in ("failed", "refused") and _GAP.search(detail):
            self._tell("gap", detail)

    def over(self, exit_code: int) -> None:
        """Tell that no other attempt follows a failure."""
        if exit_code in (FAILED, REFUSED) and self._sender is not None and not _GAP.search(self._detail):
            self._tell("failed", self._detail)

    def _stop_looking(self) -> None:
        self._over.set()
        if self._watch is not None:
            self._watch.join(1.0)

    def _tell(self, event: str, text: str, title: str = "") -> None:
        if self._sender is None or event not in self._notify.events:
            return
        lines = [text, self._progress(), f"{self._run.path} on {node_name()}"]
        self._sender.send(
            f"gspo-hpc: {self._name} {title or _TITLES[event]}", "\n".join(line for line in lines if line)
        )

    def _progress(self) -> str:
        """Return a line with the step, the reward and the accuracy; empty before the first step."""
        records = reader.read_records(self._run)
        parts: list[str] = []
        if records:
            of = f" of {self._max_steps:,}" if self._max_steps else ""
            parts.append(f"step {records[-1]['step']:,}{of}")
        if rewards := [value for record in records if (value := reader.value(record, "reward")) is not None]:
            parts.append(f"reward {rewards[-1]:.3f}")
        evaluated: dict[str, Any] = next((record for record in reversed(records) if "eval/accuracy" in record), {})
        if why := reader.not_graded(evaluated):
            parts.append(f"evaluation {why}")
        elif (accuracy := reader.accuracy(evaluated)) is not None:
            parts.append(f"accuracy {accuracy:.3f}")
        return ", ".join(parts)

    def _look(self, metrics: MetricsReader) -> None:
        """Read metrics.jsonl as it grows, and tell once of a rollout in which no update had anything to learn from."""
        rollout: list[Record] = []
        while True:
            over = self._over.wait(_POLL)
            for record in metrics.read():
                if "reward" not in record.values and "loss" not in record.values:
                    continue  # an evaluation
                if rollout and _rollout(record) != _rollout(rollout[0]):
                    if all(one.values.get("empty") for one in rollout):
                        self._tell("no_signal", pasteable(_nothing(rollout), self._run.path))
                        return
                    rollout = []
                rollout.append(record)
            if over:
                if rollout and all(one.values.get("empty") for one in rollout):
                    self._tell("no_signal", pasteable(_nothing(rollout), self._run.path))
                return


def _rollout(record: Record) -> float:
    return record.values.get("rollout", record.step)


def _nothing(rollout: list[Record]) -> str:
    steps = f"step {rollout[0].step}" if len(rollout) == 1 else f"steps {rollout[0].step} to {rollout[-1].step}"
    return f"{steps}: all completions of each group had the same reward (gspo-hpc diagnose RUN)"
