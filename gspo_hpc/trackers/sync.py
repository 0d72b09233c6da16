"""Send the trackers of a run what they lack of metrics.jsonl, after the run or between two attempts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gspo_hpc.config.schema import Config
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.exit_codes import DONE, FAILED, REQUEUE
from gspo_hpc.trackers.feed import deliver
from gspo_hpc.trackers.protocol import TrackedRun, in_one_line
from gspo_hpc.trackers.reader import MetricsReader
from gspo_hpc.trackers.registry import Service, chosen, tracked_run

CLOSE_SECONDS = 660.0  # what a tracker may take to finish once it has all records; more than W&B's own limit

_PROMETHEUS = "for its file has only the newest step, which a run writes while it goes on"


@dataclass(frozen=True)
class Result:
    """The outcome for one tracker: where it logs and the steps that were sent, or the error.

    `hangs`: a thread of the tracker's library may keep the process from ending.
    """

    name: str
    place: str = ""
    steps: Sequence[int] = ()
    last: int = -1  # the last step that it had before
    error: str = ""
    never: str = ""  # why it is never sent anything here
    hangs: bool = False


def sync(run: RunDir, config: Config, warn: Callable[[str], None]) -> list[Result]:
    """Send every tracker of the config what it lacks.

    Raises ValueError if the run goes on, for its own trackers send then, or if no tracker is chosen.
    """
    services = chosen(config.tracking, sync=True)
    if not services:
        lacks = "this run has no tracker to send to"
        if config.tracking.prometheus is not None:
            lacks = f"tracking.prometheus: there is nothing to send, {_PROMETHEUS}; {lacks} otherwise"
        raise ValueError(f"{lacks}: name one, such as tracking.wandb=online or tracking.mlflow=true")
    tracked = tracked_run(run, config)
    with run.lock():
        exit_code = _exit_code(run)
        found = [_sent(service, tracked, exit_code, warn) for service in services]
    results = [result for result in found if result is not None]
    if not results:
        raise ValueError("there is no tracker that anything could be sent to")
    if config.tracking.prometheus is not None:
        results.append(Result("Prometheus", "Prometheus", never=_PROMETHEUS))
    return results


def _sent(service: Service, tracked: TrackedRun, exit_code: int, warn: Callable[[str], None]) -> Result | None:
    """Send one tracker what it lacks. In a thread, because libraries take signals over in the main one."""
    found: list[Result | None] = []
    sent = threading.Event()  # or failed

    def work() -> None:
        tracker = None
        try:
            tracker = service.open(tracked, warn)
            if tracker is None:
                found.append(None)
                return
            steps = deliver(tracker, MetricsReader(RunDir(tracked.path), tracker.sent))
            sent.set()
            tracker.close(exit_code)
            found.append(Result(service.name, tracker.place, steps, tracker.sent.step))
        except ModuleNotFoundError as error:
            extra = {"wandb": "cpu", "tensorboard": "cpu"}.get(str(error.name), str(error.name))
            found.append(Result(service.name, error=f"{error.name} is not installed here: gspo_hpc[{extra}] has it"))
        except Exception as error:  # libraries raise what they like; the other trackers are sent theirs
            plain = isinstance(error, ValueError)
            told = str(error) if plain else in_one_line(error)
            found.append(Result(service.name, error=told, hangs=tracker is not None))  # it was not closed
        finally:
            sent.set()

    thread = threading.Thread(target=work, name=f"sync {service.name}", daemon=True)
    thread.start()
    sent.wait()
    thread.join(CLOSE_SECONDS)
    if thread.is_alive():
        service.abandon()
        late = f"it did not take everything within {CLOSE_SECONDS:.0f} s; the same command sends the rest"
        return Result(service.name, error=late, hangs=True)
    return found[0]


def _exit_code(run: RunDir) -> int:
    """Return the exit code of the newest attempt, as trackers were or would have been told it."""
    attempts = run.read_attempts()
    reason = attempts[-1]["reason"] if attempts else "stopped"
    return {"done": DONE, "failed": FAILED, "refused": FAILED}.get(reason, REQUEUE)
