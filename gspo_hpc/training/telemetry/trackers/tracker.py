"""Trackers of a run, W&B, TensorBoard and Prometheus, beside metrics.jsonl, which is the truth and needs none of them.

None may cost a run anything. One thread starts and feeds them, behind a queue, so a server or a helper process that
hangs is waited for at the end only, and not for long. A tracker that fails gets one warning and no more records.

All attempts of a run are one W&B run: its id is the run's. `tracking.json` has the last step that each tracker has on
disk: steps that are repeated after a kill are not logged again, and what a tracker lacks of metrics.jsonl is logged
when the next attempt begins. A kill within SETTLE_SECONDS of a step can make that one step appear twice.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_hpc.config.schema import Tracking
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.files import read_json, write_json
from gspo_hpc.system.redact import redact
from gspo_hpc.training.telemetry.trackers.sink import Samples, Sink, in_one_line

CLOSE_SECONDS = 60.0  # what all trackers together may cost at the end
SETTLE_SECONDS = 1.0  # after this long wandb's own process surely has its history on disk
QUEUE_LENGTH = 10_000  # records that may wait for a tracker


class Tracker:
    """All trackers of a run, on the one rank that has them (`on_rank`); on others it does nothing.

    `config` has the run's settings as nested mappings; texts of keys that name a secret are left out.
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
        announce: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._warn, self._announce = warn, announce
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
            makers["tensorboard"] = lambda: _tensorboard(run_dir / "tensorboard", self._last.get("tensorboard"))
        if tracking.prometheus is not None:
            makers["prometheus"] = lambda: _prometheus(Path(str(tracking.prometheus)), run_name, run_id)
        if on_rank and not makers:
            announce("tracker: none but metrics.jsonl")
        if on_rank and makers:
            self._last = read_last(self._state)
            before = self._logged_before(run_dir)  # now: what is logged from here on comes through the queue
            self._thread = threading.Thread(target=self._work, args=(makers, before), name="tracking", daemon=True)
            self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Log one record with its `step`, once in every tracker; values that are no numbers (null) are left out.

        Returns at once. What a tracker that hangs has not taken after QUEUE_LENGTH records is dropped.
        """
        samples, self._samples = self._samples, []
        if self._thread is not None:
            copy = dict(record)
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(lambda: self._deliver(copy, samples))

    def log_samples(self, rows: Samples) -> None:
        """Log rows as in samples.jsonl, together with the next record."""
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
            late = " and ".join(self._sinks) or "tracking"
            self._warn(f"{late} did not finish within {CLOSE_SECONDS:.0f} s; the run ends without waiting for it")
            end_wandb_core()
        self._thread = None

    def _work(self, makers: Mapping[str, Callable[[], Sink | None]], before: Sequence[Mapping[str, Any]]) -> None:
        """Start the trackers, then do the jobs of the queue, until no tracker is left. Runs in the thread."""
        for name, make in makers.items():
            try:
                sink = make()
            except Exception as error:  # whatever it is, it must not end the run
                self._warn(f"{name} did not start; the run goes on without it: {in_one_line(error)}")
                continue
            if sink is not None:
                self._sinks[name] = sink
        places = [sink.place for sink in self._sinks.values()]
        self._announce(f"tracker: {', '.join(places) or 'none but metrics.jsonl'}")
        for record in before:
            self._deliver(record, [])
        while self._sinks:
            if self._queue.empty():
                self._remember()
            self._queue.get()()

    def _logged_before(self, run_dir: Path) -> list[dict[str, Any]]:
        """Return the records of earlier attempts, with which a tracker that lacks some catches up."""
        try:
            return RunDir(run_dir).read_metrics()
        except (OSError, ValueError) as error:
            self._warn(f"metrics.jsonl could not be read, so trackers may lack steps: {in_one_line(error)}")
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
            self._warn(f"{self._state.name} could not be written: {in_one_line(error)}")

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
            self._warn(f"{name} failed; the run goes on without it: {in_one_line(error)}")
            return False
        return True


def _wandb(
    tracking: Tracking, run_dir: Path, run_id: str, run_name: str, config: Any, warn: Callable[[str], None]
) -> Sink | None:
    from gspo_hpc.training.telemetry.trackers import wandb  # only in the thread: a run without it does not load it

    return wandb.start(tracking, run_dir, run_id, run_name, config, warn)


def _tensorboard(log_dir: Path, last: int | None) -> Sink:
    from gspo_hpc.training.telemetry.trackers import tensorboard  # as above

    return tensorboard.TensorBoard(log_dir, last)


def _prometheus(folder: Path, run_name: str, run_id: str) -> Sink:
    from gspo_hpc.training.telemetry.trackers import prometheus  # as above

    return prometheus.Prometheus(folder, run_name, run_id)


def end_wandb_core() -> None:
    """Kill wandb's own process where it hangs: at the exit of this one wandb would wait for it without end."""
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                if Path("/proc", pid, "comm").read_text().strip() == "wandb-core":
                    os.kill(int(pid), signal.SIGKILL)


def read_last(path: Path) -> dict[str, int]:
    """Return the last step by tracker; nothing if the file is missing or is not what was written."""
    try:
        raw = read_json(path)
    except ValueError:
        return {}
    return {str(name): step for name, step in raw.items() if isinstance(step, int)} if isinstance(raw, dict) else {}
