"""Weights & Biases as a tracker: online, or offline into the folder wandb/ of the run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config.reading import wandb_account
from gspo_hpc.config.schema import Tracking
from gspo_hpc.system.redact import redact
from gspo_hpc.trackers import compat
from gspo_hpc.trackers.protocol import Record, Samples, Sent, TrackedRun, encodable, in_one_line
from gspo_hpc.trackers.services import chunked_log

INIT_SECONDS = 20.0  # what a W&B server that does not answer may cost at the start ...
FINISH_SECONDS = 30.0  # ... and at the end; `gspo-hpc sync` sends what it did not take
UPLOAD_SECONDS = 600.0  # what an upload after the run may take at its end
FLUSH_SECONDS = 0.5  # how often wandb's own process writes its history to disk; 0.1 costs it twice the CPU
SAMPLE_COLUMNS = ("step", "phase", "prompt", "completion", "reward", "failure", "answer")
_NO_KEY = "W&B has no key: set WANDB_API_KEY or run `wandb login`"


class Wandb:
    """A W&B run.

    For a table, and for nothing else, wandb asks its server before it takes it, and raises where there is no answer.
    """

    def __init__(
        self, run: Any, sent: Sent, table: Callable[[Samples], Any], warn: Callable[[str], None], patience: float
    ) -> None:
        self.run, self.sent, self.table, self.warn, self.patience = run, sent, table, warn, patience
        folder = Path(run.dir).parent  # RUN/wandb/offline-run-...
        self.place = f"W&B offline: {folder}" if run.offline else f"W&B: {run.url}"
        self._takes_tables = True

    def log(self, records: Sequence[Record]) -> None:
        """Log a row of the history for each, sent at once: a kill must not take the newest step with it."""
        for record in records:
            if not (record.samples and self._log_with_table(record)):
                self.run.log(dict(record.values), step=record.step, commit=True)

    def close(self, exit_code: int) -> None:
        """Finish the run; raises TimeoutError if the server has not taken everything in time."""
        began = time.monotonic()
        self.run.finish(exit_code=exit_code)
        if not self.run.offline and time.monotonic() - began >= self.patience:
            raise TimeoutError(f"the server did not take everything within {self.patience:.0f} s")

    def _log_with_table(self, record: Record) -> bool:
        """Return True if a table was taken; after one that was not, none is offered any more."""
        if self._takes_tables:
            try:
                row = {**record.values, "samples": self.table(record.samples)}
                self.run.log(row, step=record.step, commit=True)
            except Exception as error:  # whatever it is, rows go on
                self._takes_tables = False
                self.warn(f"W&B did not accept the table of samples ({in_one_line(error)}); they are in samples.jsonl")
        return self._takes_tables


def start(tracking: Tracking, run: TrackedRun, warn: Callable[[str], None]) -> Wandb | None:
    """Start the W&B run of this attempt; offline without a key, and where the server does not answer in time."""
    import wandb

    mode = choose_mode(tracking.wandb, _has_key(wandb), warn)
    if mode == "disabled":
        return None
    try:
        return _open(wandb, mode, tracking, run, warn, FINISH_SECONDS)
    except Exception as error:
        if mode == "offline":
            raise
        later = f"`gspo-hpc sync {shlex.quote(str(run.path))}` sends it"
        warn(f"W&B does not answer ({in_one_line(error)}); logging to wandb/, and {later}")
        wandb.teardown()  # else the id is still taken, by the run that did not start
        return _open(wandb, "offline", tracking, run, warn, FINISH_SECONDS)


def upload(tracking: Tracking, run: TrackedRun, warn: Callable[[str], None]) -> Wandb | None:
    """Go on with the run on the server. Raises ValueError if there is no answer, or no key although one is needed."""
    import wandb

    if not _has_key(wandb):
        if tracking.wandb != "auto":
            raise ValueError(_NO_KEY)
        warn(f"{_NO_KEY}; nothing is sent to it")
        return None
    try:
        return _open(wandb, "online", tracking, run, warn, UPLOAD_SECONDS)
    except Exception as error:
        wandb.teardown()
        raise ValueError(f"W&B does not answer: {in_one_line(error)}") from None


def choose_mode(asked: str, has_key: bool, warn: Callable[[str], None]) -> str:
    """Return online, offline or disabled: WANDB_MODE decides for `auto`, and without a key nothing is online."""
    mode = wandb_account.mode(asked, has_key, os.environ)
    if mode == "online" and not has_key:
        warn(f"{_NO_KEY}; logging to wandb/, and `gspo-hpc sync` sends it later")
        return "offline"
    return mode


def last_local_step(run: TrackedRun) -> int:
    """Return the last step in the files that earlier attempts left in wandb/; -1 if there is none."""
    from wandb.proto.wandb_internal_pb2 import Record as Message  # type: ignore[attr-defined]  # made at import

    last = -1
    for path in run.path.glob(f"wandb/*run-*-{run.id}/run-{run.id}.wandb"):
        for raw in chunked_log.read(path):
            message = Message.FromString(raw)
            if message.WhichOneof("record_type") == "history":
                last = max(last, message.history.step.num)
    return last


def end_core() -> None:
    """Kill wandb's own process where it hangs: at the exit of this one wandb would wait for it without end."""
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                if Path("/proc", pid, "comm").read_text().strip() == "wandb-core":
                    os.kill(int(pid), signal.SIGKILL)


def _open(
    wandb: Any, mode: str, tracking: Tracking, run: TrackedRun, warn: Callable[[str], None], patience: float
) -> Wandb:
    known = wandb.Settings.model_fields  # older releases have fewer
    settings: dict[str, Any] = {
        "mode": mode,
        "silent": True,
        "console": "off",  # what is printed may be completions
        "disable_git": True,  # the address of a remote may hold a password
        "save_code": False,
        "init_timeout": INIT_SECONDS,
        "finish_timeout": patience,
        "x_transaction_log_flush_interval": FLUSH_SECONDS,
    }
    here = last_local_step(run) if mode == "offline" else -1
    with compat.without_wandb_launch(wandb.Run):
        opened = wandb.init(
            id=run.id,
            resume="allow",
            name=run.name,
            project=tracking.wandb_project,
            entity=tracking.wandb_entity,
            dir=run.path,
            config=dict(run.config),
            allow_val_change=True,  # an attempt may change some settings
            settings=wandb.Settings(**{key: one for key, one in settings.items() if key in known}),
        )

    def table(rows: Samples) -> Any:
        return wandb.Table(columns=list(SAMPLE_COLUMNS), data=[_cells(row) for row in rows])

    # Online, wandb asks the server how far it got, and goes on from there.
    there = opened.starting_step - 1 if opened.resumed else -1
    return Wandb(opened, Sent(here if opened.offline else there), table, warn, patience)


def _has_key(wandb: Any) -> bool:
    """Return True if wandb would find credentials by itself: in the environment, its settings, or the netrc file."""
    settings = wandb.setup().settings
    given = {name: getattr(settings, name, None) for name in ("api_key", "identity_token_file")}
    return bool(wandb_account.key_source(settings.base_url, os.environ, given))


def _cells(row: Mapping[str, Any]) -> list[Any]:
    cells = [row.get(column) for column in SAMPLE_COLUMNS]
    cells[-1] = json.dumps(redact(cells[-1]), ensure_ascii=False, default=str)
    return [encodable(cell) if isinstance(cell, str) else cell for cell in cells]
