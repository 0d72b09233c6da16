"""The trackers that a config chooses. To add one, add its file to services/ and its entry here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from gspo_hpc.config.schema import Config, Tracking, as_dict
from gspo_hpc.runs.directory import RunDir
from gspo_hpc.system.redact import redact
from gspo_hpc.trackers.protocol import TrackedRun, Tracker

Say = Callable[[str], None]


@dataclass(frozen=True)
class Service:
    """A tracker that can be opened; None if it is turned off where it is opened.

    `abandon` lets the process end while a method of the tracker hangs.
    """

    name: str
    open: Callable[[TrackedRun, Say], Tracker | None]
    abandon: Callable[[], None] = lambda: None


def tracked_run(run: RunDir, config: Config) -> TrackedRun:
    """Return what trackers know of a run; secrets are left out.

    A run that was begun anew has another id than before: what they have is of the old config.
    """
    info = run.read_info()
    own = str(info.get("tracked_id") or info["run_id"])
    return TrackedRun(run.path, own, config.run.name, redact(as_dict(config)))


def chosen(tracking: Tracking, *, sync: bool = False) -> list[Service]:
    """Return the trackers of a run. With `sync`, they send to their servers what a run kept on this machine."""
    found = []
    if tracking.wandb != "disabled":
        found.append(_wandb(tracking, sync))
    if tracking.tensorboard:
        found.append(Service("TensorBoard", _tensorboard))
    if tracking.mlflow:
        found.append(Service("MLflow", lambda run, warn: _mlflow(tracking, run)))
    if tracking.trackio:
        found.append(Service("Trackio", lambda run, warn: _trackio(tracking, run)))
    if tracking.swanlab != "disabled":
        found.append(Service("SwanLab", lambda run, warn: _swanlab(tracking, run, sync)))
    if tracking.prometheus is not None and not sync:
        found.append(Service("Prometheus", lambda run, warn: _prometheus(tracking, run)))
    return found


# Each is imported when it is opened: a run without it does not load it, and neither does a login node.


def _wandb(tracking: Tracking, sync: bool) -> Service:
    def start(run: TrackedRun, warn: Say) -> Tracker | None:
        from gspo_hpc.trackers.services import wandb

        return wandb.upload(tracking, run, warn) if sync else wandb.start(tracking, run, warn)

    def abandon() -> None:
        from gspo_hpc.trackers.services import wandb

        wandb.end_core()

    return Service("W&B", start, abandon)


def _tensorboard(run: TrackedRun, warn: Say) -> Tracker:
    from gspo_hpc.trackers.services import tensorboard

    return tensorboard.TensorBoard(run.path / "tensorboard")


def _prometheus(tracking: Tracking, run: TrackedRun) -> Tracker:
    from gspo_hpc.trackers.services import prometheus

    return prometheus.Prometheus(str(tracking.prometheus), run.name, run.id)


def _mlflow(tracking: Tracking, run: TrackedRun) -> Tracker:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before it is imported, which sends something
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # of 7, which take minutes: `sync` can be repeated
    from gspo_hpc.trackers.services import mlflow

    return mlflow.Mlflow(tracking.project, run)


def _trackio(tracking: Tracking, run: TrackedRun) -> Tracker:
    from gspo_hpc.trackers.services import trackio

    return trackio.Trackio(tracking.project, run)


def _swanlab(tracking: Tracking, run: TrackedRun, sync: bool) -> Tracker:
    from gspo_hpc.trackers.services import swanlab

    return swanlab.Swanlab(tracking, run, online=sync or tracking.swanlab == "online")
