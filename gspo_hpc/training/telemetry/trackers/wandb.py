"""Weights & Biases as a tracker: online, or offline into the folder wandb/ of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gspo_hpc.config.reading import wandb_account
from gspo_hpc.config.schema import Tracking
from gspo_hpc.system.redact import redact
from gspo_hpc.training.telemetry.trackers.sink import Samples, encodable, in_one_line

INIT_SECONDS = 20.0  # what a W&B server that does not answer may cost at the start ...
FINISH_SECONDS = 30.0  # ... and at the end; what was not sent stays in wandb/ for `wandb sync`
FLUSH_SECONDS = 0.5  # how often wandb's own process writes its history to disk; 0.1 costs it twice the CPU
SAMPLE_COLUMNS = ("step", "phase", "prompt", "completion", "reward", "failure", "answer")


class Wandb:
    """A W&B run.

    For a table, and for nothing else, wandb asks its server before it takes it, and raises where there is no answer.
    """

    def __init__(self, run: Any, table: Callable[[Samples], Any], warn: Callable[[str], None]) -> None:
        self.run, self.table, self.warn = run, table, warn
        folder = Path(run.dir).parent  # RUN/wandb/offline-run-...
        self.place = f"W&B offline: wandb sync {folder}" if run.offline else f"W&B: {run.url}"
        self._takes_tables = True

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        """Log one row of the history, sent at once: a kill must not take the newest step with it."""
        if not (samples and self._try(lambda: self.run.log({**values, "samples": self.table(samples)}, step, True))):
            self.run.log(dict(values), step=step, commit=True)

    def close(self, samples: Samples, exit_code: int) -> None:
        """Finish the run; uploading is given up after FINISH_SECONDS."""
        if samples:
            self._try(lambda: self.run.summary.update({"samples_last": self.table(samples)}))
        self.run.finish(exit_code=exit_code)

    def _try(self, action: Callable[[], None]) -> bool:
        """Return True if a table was taken; after one that was not, none is offered any more."""
        if self._takes_tables:
            try:
                action()
            except Exception as error:  # whatever it is, rows go on
                self._takes_tables = False
                self.warn(f"W&B did not accept the table of samples ({in_one_line(error)}); they are in samples.jsonl")
        return self._takes_tables


def start(
    tracking: Tracking, run_dir: Path, run_id: str, run_name: str, config: Any, warn: Callable[[str], None]
) -> Wandb | None:
    """Start the W&B run of this attempt; offline without a key, and where the server does not answer in time."""
    import wandb

    mode = choose_mode(tracking.wandb, _has_key(wandb), warn)
    if mode == "disabled":
        return None

    known = wandb.Settings.model_fields  # older releases have fewer
    settings: dict[str, Any] = {
        "silent": True,
        "console": "off",  # what is printed may be completions
        "disable_git": True,  # the address of a remote may hold a password
        "save_code": False,
        "init_timeout": INIT_SECONDS,
        "finish_timeout": FINISH_SECONDS,
        "x_transaction_log_flush_interval": FLUSH_SECONDS,
    }

    def init(mode: str) -> Any:
        return wandb.init(
            id=run_id,
            resume="allow",
            name=run_name,
            project=tracking.wandb_project,
            entity=tracking.wandb_entity,
            dir=run_dir,
            config=config,
            settings=wandb.Settings(**{key: one for key, one in (settings | {"mode": mode}).items() if key in known}),
        )

    try:
        run = init(mode)
    except Exception as error:
        if mode == "offline":
            raise
        warn(f"W&B does not answer ({in_one_line(error)}); logging to wandb/ for a later `wandb sync`")
        wandb.teardown()  # else the id is still taken, by the run that did not start
        run = init("offline")

    def table(rows: Samples) -> Any:
        return wandb.Table(columns=list(SAMPLE_COLUMNS), data=[_cells(row) for row in rows])

    return Wandb(run, table, warn)


def choose_mode(asked: str, has_key: bool, warn: Callable[[str], None]) -> str:
    """Return online, offline or disabled: WANDB_MODE decides for `auto`, and without a key nothing is online."""
    mode = wandb_account.mode(asked, has_key, os.environ)
    if mode == "online" and not has_key:
        warn("W&B has no key: set WANDB_API_KEY or run `wandb login`; logging to wandb/ for a later `wandb sync`")
        return "offline"
    return mode


def _has_key(wandb: Any) -> bool:
    """Return True if wandb would find credentials by itself: in the environment, its settings, or the netrc file."""
    settings = wandb.setup().settings
    given = {name: getattr(settings, name, None) for name in ("api_key", "identity_token_file")}
    return bool(wandb_account.key_source(settings.base_url, os.environ, given))


def _cells(row: Mapping[str, Any]) -> list[Any]:
    cells = [row.get(column) for column in SAMPLE_COLUMNS]
    cells[-1] = json.dumps(redact(cells[-1]), ensure_ascii=False, default=str)
    return [encodable(cell) if isinstance(cell, str) else cell for cell in cells]
