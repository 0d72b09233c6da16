"""What goes to Weights & Biases and to TensorBoard, beside metrics.jsonl, which is the truth and needs neither.

Floor 3, the home of wandb and TensorBoard; both are imported only if asked for. Neither may cost a run anything: they
are started and fed by one thread, behind a queue, so that a server or a helper process of theirs that hangs is waited
for at the end only, and not for long. A tracker that fails is warned of once and left.

All attempts of a run are one W&B run: its id is the run's. `tracking.json` remembers the last step that each tracker
has on disk: steps that are done again after a kill are not logged again, and what a tracker lacks of metrics.jsonl is
logged when the next attempt begins. A kill within SETTLE_SECONDS of a step can make that one step appear twice.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from gspo_hpc.config import Tracking
from gspo_hpc.durable import read_json, write_json
from gspo_hpc.redact import redact
from gspo_hpc.rundir import RunDir

INIT_SECONDS = 20.0  # what a W&B server that does not answer may cost at the start ...
FINISH_SECONDS = 30.0  # ... and at the end; what was not sent stays in wandb/ for `wandb sync`
CLOSE_SECONDS = 60.0  # what all trackers together may cost at the end
FLUSH_SECONDS = 0.5  # how often wandb's own process writes its history to disk; 0.1 costs it twice the CPU ...
SETTLE_SECONDS = 1.0  # ... and after how long it surely has
QUEUE_LENGTH = 10_000  # records that may wait for a tracker
SAMPLE_COLUMNS = ("step", "phase", "prompt", "completion", "reward", "failure", "answer")

Samples = Sequence[Mapping[str, Any]]


class Sink(Protocol):
    """One place that records go to. Any method may raise anything."""

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        """The numbers of one step, and the samples shown with it."""

    def close(self, samples: Samples, exit_code: int) -> None:
        """Nothing more comes; `samples` belong to no logged step."""


class Tracker:
    """All trackers of a run, on the one rank that has them (`on_rank`); on others it does nothing.

    `config` is the run's settings as nested mappings; texts of keys that name a secret are left out.
    """

    def __init__(
        self,
        tracking: Tracking,
        run_dir: Path,
        run_id: str,
        run_name: str,
        config: Mapping[str, Any],
        on_rank: bool,
        warn: Callable[[str], None] = lambda text: print(f"warning: {text}", file=sys.stderr),
    ) -> None:
        self._warn = warn
        self._state = run_dir / "tracking.json"
        self._samples: list[Mapping[str, Any]] = []
        self._sinks: dict[str, Sink] = {}
        self._last: dict[str, int] = {}
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue(QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        makers: dict[str, Callable[[], Sink | None]] = {}
        if tracking.wandb != "disabled":
            makers["wandb"] = lambda: _wandb(tracking, run_dir, run_id, run_name, redact(config), warn)
        if tracking.tensorboard:
            makers["tensorboard"] = lambda: _TensorBoard(run_dir / "tensorboard", self._last.get("tensorboard"))
        if on_rank and makers:
            self._last = _read_last(self._state)
            before = self._logged_before(run_dir)  # now: what is logged from here on comes through the queue
            self._thread = threading.Thread(target=self._work, args=(makers, before), name="tracking", daemon=True)
            self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """One record with its `step`, once to every tracker; values that are no numbers (null) are left out.

        Returns at once. What a tracker that hangs has not taken after QUEUE_LENGTH records is dropped.
        """
        samples, self._samples = self._samples, []
        if self._thread is not None:
            copy = dict(record)
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(lambda: self._deliver(copy, samples))

    def log_samples(self, rows: Samples) -> None:
        """Rows as in samples.jsonl; they go out together with the next record."""
        self._samples.extend(rows)

    def close(self, exit_code: int) -> None:
        """Finish, within CLOSE_SECONDS. A run that goes on later goes on under the same id."""
        if self._thread is None:
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(lambda: self._finish(exit_code), timeout=CLOSE_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"{' and '.join(self._sinks) or 'tracking'} did not finish within {CLOSE_SECONDS:.0f} s; left")
            _end_wandb_core()
        self._thread = None

    def _work(self, makers: Mapping[str, Callable[[], Sink | None]], before: Sequence[Mapping[str, Any]]) -> None:
        """The thread: start the trackers, then one job of the queue after another, until there is none left to feed."""
        for name, make in makers.items():
            try:
                sink = make()
            except Exception as error:  # whatever it is, it must not end the run
                self._warn(f"{name} did not start, the run goes on without it: {_first_line(error)}")
                continue
            if sink is not None:
                self._sinks[name] = sink
        for record in before:
            self._deliver(record, [])
        while self._sinks:
            if self._queue.empty():
                self._remember()
            self._queue.get()()

    def _logged_before(self, run_dir: Path) -> list[dict[str, Any]]:
        """The records of earlier attempts: a tracker that lacks some, by a kill or because it is new, catches up."""
        try:
            return RunDir(run_dir).read_metrics()
        except (OSError, ValueError) as error:
            self._warn(f"metrics.jsonl was not read, trackers may lack steps: {_first_line(error)}")
            return []

    def _deliver(self, record: Mapping[str, Any], samples: Samples) -> None:
        step = int(record["step"])
        values = {
            key: float(value) if isinstance(value, float) else int(value)
            for key, value in record.items()
            if isinstance(value, (int, float))
        }
        for name in list(self._sinks):
            if step > self._last.get(name, -1) and self._use(name, lambda sink: sink.log(step, values, samples)):
                self._last[name] = step

    def _remember(self) -> None:
        """Write down what the trackers have, once they have it on disk: a kill takes what wandb still holds."""
        if not self._last:
            return
        time.sleep(SETTLE_SECONDS)
        try:
            write_json(self._state, self._last)
        except OSError as error:
            self._warn(f"{self._state.name} was not written: {_first_line(error)}")

    def _finish(self, exit_code: int) -> None:
        for name in list(self._sinks):
            self._use(name, lambda sink: sink.close(self._samples, exit_code))
        self._remember()
        self._sinks.clear()

    def _use(self, name: str, action: Callable[[Sink], None]) -> bool:
        try:
            action(self._sinks[name])
        except Exception as error:  # whatever it is, it must not end the run
            del self._sinks[name]
            self._warn(f"{name} failed, the run goes on without it: {_first_line(error)}")
            return False
        return True


class _Wandb:
    """A W&B run.

    For a table, and for nothing else, wandb asks its server before it takes it, and raises where there is no answer.
    """

    def __init__(self, run: Any, table: Callable[[Samples], Any], warn: Callable[[str], None]) -> None:
        self.run, self.table, self.warn = run, table, warn
        self._takes_tables = True

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        """One row of the history, sent at once: a kill must not take the newest step with it."""
        if not (samples and self._try(lambda: self.run.log({**values, "samples": self.table(samples)}, step, True))):
            self.run.log(dict(values), step=step, commit=True)

    def close(self, samples: Samples, exit_code: int) -> None:
        """Finish the run; uploading is given up after FINISH_SECONDS."""
        if samples:
            self._try(lambda: self.run.summary.update({"samples_last": self.table(samples)}))
        self.run.finish(exit_code=exit_code)

    def _try(self, action: Callable[[], None]) -> bool:
        """Whether a table was taken; after one that was not, none is offered any more."""
        if self._takes_tables:
            try:
                action()
            except Exception as error:  # whatever it is, rows go on
                self._takes_tables = False
                self.warn(f"W&B took no table of samples ({_first_line(error)}); they are in samples.jsonl")
        return self._takes_tables


class _TensorBoard:
    """An event file. Steps after `last` that an attempt wrote before it was killed are hidden by TensorBoard."""

    def __init__(self, log_dir: Path, last: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if last is None else last + 1
        self.writer: Any = SummaryWriter(str(log_dir), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float], samples: Samples) -> None:
        """One point of every curve."""
        for key, value in values.items():
            if key not in ("step", "time"):
                self.writer.add_scalar(key, value, step)
        for row in samples:
            text = _encodable(f"{row.get('prompt', '')}\n\n{row.get('completion', '')}")
            indented = "".join(f"    {line}\n" for line in text.splitlines())  # a code block: shown, not interpreted
            self.writer.add_text(f"samples/{row.get('phase', '')}", indented, step)
        self.writer.flush()

    def close(self, samples: Samples, exit_code: int) -> None:
        """Close the file."""
        self.writer.close()


def _wandb(
    tracking: Tracking, run_dir: Path, run_id: str, run_name: str, config: Any, warn: Callable[[str], None]
) -> _Wandb | None:
    """The W&B run of this attempt; offline without a key, and where the server does not answer in time."""
    import wandb

    mode = _mode(tracking.wandb, _has_key(wandb), warn)
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

    def start(mode: str) -> Any:
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
        run = start(mode)
    except Exception as error:
        if mode == "offline":
            raise
        warn(f"W&B does not answer ({_first_line(error)}); logging to wandb/ for a later `wandb sync`")
        wandb.teardown()  # else the id is still taken, by the run that did not start
        run = start("offline")

    def table(rows: Samples) -> Any:
        return wandb.Table(columns=list(SAMPLE_COLUMNS), data=[_cells(row) for row in rows])

    return _Wandb(run, table, warn)


def _mode(asked: str, has_key: bool, warn: Callable[[str], None]) -> str:
    """online, offline or disabled. WANDB_MODE decides for `auto`; without a key nothing is online, and nothing asks."""
    mode = asked
    if asked == "auto":
        mode = os.environ.get("WANDB_MODE", "")
        if mode not in ("online", "offline", "disabled"):
            return "online" if has_key else "offline"
    if mode == "online" and not has_key:
        warn("W&B has no key: set WANDB_API_KEY or run `wandb login`; logging to wandb/ for a later `wandb sync`")
        return "offline"
    return mode


def _has_key(wandb: Any) -> bool:
    """Whether wandb would find credentials by itself: in the environment, its settings, or the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    if settings.api_key:
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(urlsplit(settings.base_url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _end_wandb_core() -> None:
    """Kill wandb's own process where it hangs: at the exit of this one wandb would wait for it without end."""
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                if Path("/proc", pid, "comm").read_text().strip() == "wandb-core":
                    os.kill(int(pid), signal.SIGKILL)


def _cells(row: Mapping[str, Any]) -> list[Any]:
    cells = [row.get(column) for column in SAMPLE_COLUMNS]
    cells[-1] = json.dumps(redact(cells[-1]), ensure_ascii=False, default=str)
    return [_encodable(cell) if isinstance(cell, str) else cell for cell in cells]


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _read_last(path: Path) -> dict[str, int]:
    """The last step by tracker; nothing if the file is missing or is not what was written."""
    try:
        raw = read_json(path)
    except ValueError:
        return {}
    return {str(name): step for name, step in raw.items() if isinstance(step, int)} if isinstance(raw, dict) else {}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
